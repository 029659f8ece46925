"""Where a server took its prompts' tokens from, by the counters of its /metrics.

vLLM's names: `prefix_cache_*` is its own cache, `external_prefix_cache_*` whatever its connector brought, kvtier or
another tier; kvtier's own counters say from which of its tiers. A server without such a page has no counters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

import httpx

SAMPLE = re.compile(r"^(vllm:[a-z0-9_]+)(?:\{(.*)\})? ([-+0-9.eE]+|NaN|[-+]?Inf)$")
BLOCKS = re.compile(r'num_gpu_blocks="(\d+)"')
BLOCK_TOKENS = re.compile(r'(?<!_)block_size="(\d+)"')
TIMEOUT_S = 10.0
STORED_SHARE = 0.1
"""Above this share of hits a round that is to be computed is none."""
COUNTED_S = 0.25

PREFIX_HITS, PREFIX_QUERIES = "vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"
EXTERNAL_HITS, EXTERNAL_QUERIES = "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"
PROMPT = "vllm:prompt_tokens_total"
BYTES = {"file_read_bytes": "vllm:kvtier_file_read_bytes_total", "saved_bytes": "vllm:kvtier_save_bytes_total"}
FAILED_LOADS = "vllm:kvtier_load_failures_total"
SKIPPED = "vllm:kvtier_skipped_chunks_"


@dataclass(frozen=True)
class Counters:
    """Sums over all engines behind the page, by name; of numbers, and NaN is none."""

    values: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> Counters:
        values: dict[str, float] = {}
        for line in text.splitlines():
            if (match := SAMPLE.match(line)) and isfinite(float(match[3])):
                values[match[1]] = values.get(match[1], 0.0) + float(match[3])
        return cls(values)

    def since(self, before: Counters) -> dict[str, int]:
        """Tokens of prompts, and whose KV was not computed for whose sake: of vLLM's cache, of a connector."""
        grown = {name: value - before.values.get(name, 0.0) for name, value in self.values.items()}
        tokens = {
            "prompt_tokens": grown.get(PROMPT, 0.0),
            "prefix_hit_tokens": grown.get(PREFIX_HITS, 0.0),
            "external_hit_tokens": grown.get(EXTERNAL_HITS, 0.0),
            **{short: grown[name] for short, name in BYTES.items() if name in grown},
            **({"failed_loads": grown[FAILED_LOADS]} if FAILED_LOADS in grown else {}),
        }
        if skipped := [value for name, value in grown.items() if name.startswith(SKIPPED)]:
            tokens["skipped_chunks"] = sum(skipped)
        return {name: round(value) for name, value in tokens.items()}


def page(url: str) -> str | None:
    """The text of /metrics beside the API; None where the server has none."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return answer.text if answer.status_code == httpx.codes.OK else None


def look(url: str) -> Counters | None:
    """Waits a little: vLLM counts a step right after its tokens were sent."""
    time.sleep(COUNTED_S)
    text = page(url)
    found = None if text is None else Counters.parse(text)
    return found if found is not None and PROMPT in found.values else None


def since(url: str, before: Counters | None) -> dict[str, int] | None:
    """Counters.since of now; None where the server does not count, or began anew in between."""
    after = look(url)
    if before is None or after is None:
        return None
    counts = (name for name in before.values if name.endswith("_total"))
    return None if any(after.values.get(name, 0.0) < before.values[name] for name in counts) else after.since(before)


def stored_share(tokens: Mapping[str, int] | None) -> float:
    """Of a round's tokens those that were hits, of whichever cache; 0 where nothing was counted."""
    if not tokens or not tokens["prompt_tokens"]:
        return 0.0
    return (tokens["prefix_hit_tokens"] + tokens["external_hit_tokens"]) / tokens["prompt_tokens"]


def floor_s(floor: Mapping[str, Any] | None) -> float | None:
    """Mean seconds of `Rounds.floor`; None where it was not asked, or the GPU's own cache did not have the prompt."""
    tokens = (floor or {}).get("tokens")
    if not floor or (tokens and tokens["prefix_hit_tokens"] < tokens["prompt_tokens"] / 2):
        return None
    mean: float | None = floor["ttft"].get("mean")
    return mean


def failed_loads(rounds: Iterable[Mapping[str, int] | None]) -> list[str]:
    """What is to be said of those of all rounds' tokens."""
    failed = sum((tokens or {}).get("failed_loads", 0) for tokens in rounds)
    return [f"{failed} loads failed: their tokens count as hits, and were computed"] if failed else []


def cache_tokens(url: str) -> int | None:
    """How many tokens fit into vLLM's own KV cache; None where the server does not say."""
    text = page(url) or ""
    line = next((line for line in text.splitlines() if line.startswith("vllm:cache_config_info{")), "")
    blocks, size = BLOCKS.search(line), BLOCK_TOKENS.search(line)
    return int(blocks[1]) * int(size[1]) if blocks and size else None
