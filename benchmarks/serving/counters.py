"""Sources of a server's prompt tokens, from the counters of its /metrics.

vLLM's names: `prefix_cache_*` is its own cache, `external_prefix_cache_*` is what its connector brought, kvtier or
another tier; kvtier's own counters say from which of its tiers. A server without such a page has no counters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from math import isfinite
from typing import Any

import httpx

SAMPLE = re.compile(r"^(vllm:[a-z0-9_]+)(?:\{(.*)\})? ([-+0-9.eE]+|NaN|[-+]?Inf)$")
TIMEOUT_S = 10.0
STORED_SHARE = 0.1  # a round with a larger share of hits did not compute its prompts
COUNTED_S = 0.25  # vLLM counts a step right after it has sent its tokens
PROMPT = "vllm:prompt_tokens_total"
TOKENS = {
    "prompt_tokens": PROMPT,
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "external_hit_tokens": "vllm:external_prefix_cache_hits_total",
}
OF_KVTIER = {
    "file_read_bytes": "vllm:kvtier_file_read_bytes_total",
    "saved_bytes": "vllm:kvtier_save_bytes_total",
    "failed_loads": "vllm:kvtier_load_failures_total",
}
SKIPPED = "vllm:kvtier_skipped_chunks_"

Counts = Mapping[str, float]
Tokens = Mapping[str, int]


def parse(text: str) -> dict[str, float]:
    """Return the sums over all engines behind the page, by name, without NaN and infinity."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if (match := SAMPLE.match(line)) and isfinite(float(match[3])):
            values[match[1]] = values.get(match[1], 0.0) + float(match[3])
    return values


def grown(before: Counts, after: Counts) -> dict[str, int]:
    """Return the growth: tokens of prompts and of hits, and kvtier's counters where it is there."""
    changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
    found = {short: changes.get(name, 0.0) for short, name in TOKENS.items()}
    found |= {short: changes[name] for short, name in OF_KVTIER.items() if name in changes}
    if skipped := [value for name, value in changes.items() if name.startswith(SKIPPED)]:
        found["skipped_chunks"] = sum(skipped)
    return {name: round(value) for name, value in found.items()}


def page(url: str) -> str | None:
    """Return the text of /metrics beside the API; None if the server has none."""
    try:
        answer = httpx.get(f"{url}/metrics", timeout=TIMEOUT_S)
    except (httpx.HTTPError, httpx.InvalidURL):
        return None
    return answer.text if answer.status_code == httpx.codes.OK else None


def read(url: str) -> dict[str, float] | None:
    time.sleep(COUNTED_S)
    text = page(url)
    found = None if text is None else parse(text)
    return found if found is not None and PROMPT in found else None


def since(url: str, before: Counts | None) -> dict[str, int] | None:
    """Return `grown` until now; None where the server does not count, or was restarted in between."""
    after = read(url)
    if before is None or after is None:
        return None
    counts = (name for name in before if name.endswith("_total"))
    return None if any(after.get(name, 0.0) < before[name] for name in counts) else grown(before, after)


def stored_share(tokens: Tokens | None) -> float:
    """Return the share of a round's tokens that were hits, in any cache; 0 if nothing was counted."""
    if not tokens or not tokens["prompt_tokens"]:
        return 0.0
    return (tokens["prefix_hit_tokens"] + tokens["external_hit_tokens"]) / tokens["prompt_tokens"]


def floor_s(floor: Mapping[str, Any] | None) -> float | None:
    """Return the mean seconds of the floor; None if it was not measured, or the GPU's own cache lacked the prompt."""
    tokens = (floor or {}).get("tokens")
    if not floor or (tokens and tokens["prefix_hit_tokens"] < tokens["prompt_tokens"] / 2):
        return None
    mean: float | None = floor["ttft"].get("mean")
    return mean


def failed_loads(rounds: Iterable[Tokens | None]) -> list[str]:
    """Return the fault to report for the rounds' tokens, if there is one."""
    failed = sum((tokens or {}).get("failed_loads", 0) for tokens in rounds)
    return [f"{failed} loads failed: their tokens count as hits, and were computed"] if failed else []
