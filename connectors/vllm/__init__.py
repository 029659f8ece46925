"""KVTierConnector: the KV connector of vLLM's V1 engine. vLLM imports this module by its path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvtier.connectors.vllm.connector import KVTierConnector

__all__ = ["KVTierConnector"]


def __getattr__(name: str) -> Any:
    """Import the connector only when vLLM asks for it: every vLLM process imports this package for its plugin."""
    if name != "KVTierConnector":
        raise AttributeError(name)
    from kvtier.connectors.vllm.connector import KVTierConnector

    return KVTierConnector
