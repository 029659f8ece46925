"""Demands on an engine's KV transfer settings (vLLM's --kv-transfer-config): one rule for `kvtier check`, which reads
their JSON, and for the connector."""

import json
from collections.abc import Mapping
from typing import Any

from kvtier.errors import HIDDEN, ConfigError

CONNECTOR, MODULE = "KVTierConnector", "kvtier.connectors.vllm"
MULTI = "MultiConnector"  # of vLLM: several connectors, each with a configuration of its own
ROLES = {"kv_both": (True, True), "kv_consumer": (True, False), "kv_producer": (False, True)}  # role -> (loads, saves)
ROOT_VARIABLE = "KVTIER_ROOT"  # variable with which vLLM's plugin supplies the connector's configuration
POLICY = "recompute"
VLLM_POLICY = "fail"  # vLLM's default of kv_load_failure_policy
SETTINGS_KEY = "kv_connector_extra_config"


def roles_of(role: object) -> tuple[bool, bool]:
    """Return (loads, saves) of a kv_role. Raises ConfigError for one that is not known."""
    if not isinstance(role, str) or role not in ROLES:
        raise ConfigError("kv_role", role, "use kv_both (load and save), kv_producer (save) or kv_consumer (load)")
    return ROLES[role]


def check_policy(policy: object) -> None:
    """Raises ConfigError for a policy that ends requests."""
    if policy != POLICY:
        # In a MultiConnector the place matters: the policy of the whole does not count for kvtier's own entry.
        fix = f'add "kv_load_failure_policy": "{POLICY}" beside "kv_connector": "{CONNECTOR}" in --kv-transfer-config'
        why = "a block that cannot be loaded is then computed, instead of ending its request"
        raise ConfigError("kv_load_failure_policy", policy, f"{fix}: {why}")


def policy_of_multi(policy: object) -> str:
    """Return a warning where a MultiConnector's own policy, the one that vLLM reads, ends requests; "" where not."""
    if policy == POLICY:
        return ""
    fix = f'set "kv_load_failure_policy": "{POLICY}" at the {MULTI} too'
    return f"{fix}: vLLM reads it there, and ends a request of which a block cannot be loaded"


def _child(multi: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return kvtier's configuration among those of a MultiConnector. Raises ConfigError."""
    settings = multi.get(SETTINGS_KEY)
    children = settings.get("connectors") if isinstance(settings, dict) else None
    for child in children if isinstance(children, list) else []:
        if isinstance(child, dict) and child.get("kv_connector") == CONNECTOR:
            return child
    raise ConfigError("kv_connector", MULTI, f"vLLM would not load kvtier: add {CONNECTOR} to its connectors")


def read_transfer_config(text: str) -> tuple[Mapping[str, Any], str]:
    """Check the JSON of --kv-transfer-config as an engine would. Return kvtier's settings in it, and a warning or "".

    Raises ConfigError.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        # The text is not shown: settings may hold a password.
        raise ConfigError("--kv-transfer-config", HIDDEN, f"it is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError("--kv-transfer-config", HIDDEN, "it must be a JSON object, as vLLM takes it")
    but = ""
    if found.get("kv_connector") == MULTI:
        but = policy_of_multi(found.get("kv_load_failure_policy", VLLM_POLICY))
        found = _child(found)
    for key, wanted in (("kv_connector", (CONNECTOR,)), ("kv_connector_module_path", (MODULE, None))):
        if found.get(key) not in wanted:
            raise ConfigError(key, found.get(key), f"vLLM would not load kvtier: set it to {wanted[0]}")
    roles_of(found.get("kv_role"))
    check_policy(found.get("kv_load_failure_policy", VLLM_POLICY))
    settings = found.get(SETTINGS_KEY, {})
    if not isinstance(settings, dict):
        raise ConfigError(SETTINGS_KEY, HIDDEN, 'it must be an object of settings, as {"config": "/etc/kvtier.yaml"}')
    return settings, but
