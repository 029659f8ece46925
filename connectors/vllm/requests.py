"""Requests of vLLM: conversion to RequestViews, with extras and permissions, and the blocks that vLLM gave to them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from kvtier.connectors.tracked_request import RequestView
from kvtier.connectors.vllm.lora import Adapters
from kvtier.format.namespace import join_extras, lora_extra, multimodal_extra, salt_extra
from kvtier.model.tenants import NO_TENANTS, Tenants
from kvtier.runtime.repeated_log import RepeatedLog

_repeated = RepeatedLog()  # a client repeats its mistake with each request

SWITCHES = ("kvtier_load", "kvtier_save")  # keys of a request's kv_transfer_params


def why_items_are_not_cached(vllm_config: Any) -> str:
    """Return why requests with multimodal items are neither loaded nor saved; "" if they are.

    An item's identifier is a hash of its content (or a client's name for it). Without a cache to look items up in, vLLM
    only numbers them. And if an item's tokens attend to each other (Gemma 3), vLLM as of 0.32 may split the item
    between two steps: after a hit that ends in it, or after a step that ended right before it. The KV of its first part
    is then different under the same key."""
    model = vllm_config.model_config
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is None:
        return ""
    if getattr(model, "is_mm_prefix_lm", False):
        return "this model's images attend to their later tokens, and vLLM may split them between steps"
    has_prefix_cache = bool(getattr(vllm_config.cache_config, "enable_prefix_caching", False))
    if has_prefix_cache or bool(getattr(multimodal, "mm_processor_cache_gb", 0)):
        return ""
    return "without prefix caching and with mm_processor_cache_gb 0, vLLM does not tell their contents apart"


def view_of(
    request: Any,
    chunk_tokens: int,
    adapters: Adapters,
    caches_items: bool = True,
    tenants: Tenants = NO_TENANTS,
    loads: bool = True,
) -> RequestView:
    """Return the view of a request. A request whose KV has no unambiguous key may neither load nor save.

    caches_items: see why_items_are_not_cached. loads: this engine may load.
    """
    may_load, may_save = _switches(request)
    may_load &= loads
    has_no_key = _has_no_key(request) or (bool(request.mm_features) and not caches_items)
    extras = None if has_no_key else _extras(request, chunk_tokens, adapters)
    if extras is None:
        extras, may_load, may_save = {}, False, False
    if getattr(request, "skip_reading_prefix_cache", False):
        may_load = False
    tenant = tenants.label(request.cache_salt)
    return RequestView(request.request_id, request.all_token_ids, extras, may_load, may_save, tenant)


def _switches(request: Any) -> tuple[bool, bool]:
    """Return (may load, may save). A switch is on unless it is present with a value other than true: a client that
    wrote "no" wanted to opt out."""
    switches = request.kv_transfer_params or {}
    if not isinstance(switches, Mapping):
        _repeated.warning("mapping", "kv_transfer_params is no mapping; the request is neither loaded nor saved")
        return False, False
    unknown = [key for key in switches if str(key).startswith("kvtier") and key not in SWITCHES]
    if unknown:
        _repeated.warning("unknown", "kv_transfer_params has no %s; it has %s", unknown[0], " and ".join(SWITCHES))
        return False, False
    load, save = (switches.get(name, True) is True for name in SWITCHES)
    return load, save


def _has_no_key(request: Any) -> bool:
    """Return True for prompt embeddings, which are no tokens, and for resumable (streaming) sessions, which rewrite
    their tokens."""
    embeds = getattr(request, "prompt_embeds", None)
    return embeds is not None or request.prompt_token_ids is None or bool(getattr(request, "resumable", False))


def _extras(request: Any, chunk_tokens: int, adapters: Adapters) -> dict[int, bytes] | None:
    """Return chunk number -> extras; None if some input cannot be identified."""
    items: dict[int, list[bytes]] = defaultdict(list)
    lora = request.lora_request
    if lora is not None:
        fingerprint = adapters.fingerprint(lora)
        if fingerprint is None:
            return None
        items[0].append(lora_extra("", fingerprint))
    if request.cache_salt:
        items[0].append(salt_extra(request.cache_salt))
    for feature in request.mm_features or ():
        place = feature.mm_position
        if not feature.identifier or place.length <= 0:
            return None
        for chunk in range(place.offset // chunk_tokens, (place.offset + place.length - 1) // chunk_tokens + 1):
            start = place.offset - chunk * chunk_tokens
            items[chunk].append(multimodal_extra(feature.identifier, start, place.length))
    return {chunk: join_extras(of_chunk) for chunk, of_chunk in items.items()}


class GivenBlocks:
    """Blocks given to requests. reached: tokens that the steps of each request have reached since it got its blocks.

    The first block of each request is kept for vLLM's reference count: blocks of a preempted or ended request may stay
    in use until its load, or a step that was planned with it, has ended.
    """

    def __init__(self) -> None:
        self.reached: dict[str, int] = {}
        self._first: dict[str, Any] = {}
        self._left: dict[int, Any] = {}  # of ended requests, by number, as many may share one

    def anew(self, request_id: str, blocks: Sequence[Any]) -> None:
        """Note new blocks of a request."""
        self.reached.pop(request_id, None)
        self._first.update((request_id, block) for block in blocks[:1])

    def ended(self, request_id: str) -> int:
        """Note the end of a request. Return how many tokens its steps reached."""
        block = self._first.pop(request_id, None)
        if block is not None:
            self._left[block.block_id] = block
        self._left = {number: left for number, left in self._left.items() if left.ref_cnt > 0}
        return self.reached.pop(request_id, 0)

    def are_held(self) -> bool:
        """Return True if any of the blocks is in use."""
        return any(block.ref_cnt > 0 for block in (*self._first.values(), *self._left.values()))
