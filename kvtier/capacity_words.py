"""Why segments find no room, in words: which key, how much there is, and what to do. Said by engines and commands."""

from __future__ import annotations

from kvtier.sizes import exact, size

SEGMENTS_MIN = 4
"""Of each rank one is being filled and at least one is kept ready (kvtier.keeper): what is less leaves them half."""


def beyond_the_disk(capacity_bytes: int, room_bytes: int) -> str:
    """Of a capacity that the root's disk has no room for; "" when it has. room_bytes: what is free there for the tier,
    and what its segments take."""
    if capacity_bytes <= room_bytes:
        return ""
    return (
        f"capacity_bytes ({exact(capacity_bytes)}) is more than the tier can have here ({size(room_bytes)}): it would "
        "fill the disk before it evicts; set it to less"
    )


def few_segments(capacity_bytes: int, segment_bytes: int) -> str:
    """Of a capacity that segments which are being filled or kept ready take most of; "" when they don't."""
    if capacity_bytes >= SEGMENTS_MIN * segment_bytes:
        return ""
    return (
        f"capacity_bytes ({exact(capacity_bytes)}) is less than {SEGMENTS_MIN} times segment_bytes "
        f"({exact(segment_bytes)}): each GPU fills one segment and keeps one ready, and little is left to be found "
        "again; raise it, or lower segment_bytes"
    )


def unlike_capacities(own_bytes: int, other_bytes: int, other: str) -> str:
    """Of another engine on the same root. other: its name."""
    return (
        f"capacity_bytes is {exact(own_bytes)} here and {exact(other_bytes)} at {other}, on the same root: each evicts "
        "what is above its own, so the least of them counts; set it alike for all engines of a root"
    )


def beyond_quota(of: str, key: str, quota_bytes: int) -> str:
    """of: as "tenant 'search'"; key: of the settings."""
    return f"{of} is at its quota of {exact(quota_bytes)}; raise {key}, or set another with `kvtier quota`"


def beyond_capacity(capacity_bytes: int, room_bytes: int) -> str:
    """room_bytes: as `beyond_the_disk` has it, or capacity_bytes where that is less."""
    if room_bytes < capacity_bytes:
        return (
            f"the root's disk has {size(room_bytes)} for the tier, capacity_bytes is {exact(capacity_bytes)}, and "
            "nothing there can be evicted right now; if this lasts, free space on the disk"
        )
    return (
        f"capacity_bytes ({exact(capacity_bytes)}) is taken, and nothing can be evicted right now; if this lasts, "
        "raise it, lower segment_bytes, or look at `kvtier pin`"
    )
