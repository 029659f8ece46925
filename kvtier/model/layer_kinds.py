"""Kinds of attention layers, and those that kvtier serves: one rule for `kvtier plan`, which reads config.json, and for
the connectors, which read the specs of the KV cache."""

from collections.abc import Collection

# Names as in `layer_types` of a config.json.
FULL = "full_attention"
WINDOW = "sliding_attention"
CHUNK = "chunked_attention"
LOCAL = {WINDOW: "a window", CHUNK: "a chunk"}  # layers that attend to a part of the prefix, and which
ONLY = "only full attention and MLA work"


def refusal(kinds: Collection[str]) -> str:
    """Return why KV of a model with layers of these kinds cannot be stored, "" if it can.

    Layers that attend within a window are served beside others that attend to everything: an engine then keeps all KV
    of both for a connector. (vLLM: `unify_hybrid_kv_cache_specs`, without which there are several KV-cache groups.)
    """
    other = sorted(set(kinds) - {FULL} - set(LOCAL))
    if other:
        return f"layers of {', '.join(other)} may drop or mix KV of a prefix; {ONLY}"
    if FULL not in kinds:
        within = " or ".join(sorted(LOCAL[kind] for kind in set(kinds))) or "nothing"
        return f"all its layers attend within {within}, and an engine drops the KV before it; {ONLY}"
    return ""
