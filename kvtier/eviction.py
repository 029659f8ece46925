"""Which segment sets go when space is needed. Pure: sets in, set ids out."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvtier.index.base import SetInfo


def least_recently_used(sets: Sequence[SetInfo], free_bytes: int, protected: Collection[int] = ()) -> list[int]:
    """Ids of the sets to remove, longest unused first, until they make up `free_bytes`; all there is if they can't.

    Never: a set that its writer still fills, a pinned one, one in `protected`.
    """
    victims = []
    for info in sorted(sets, key=lambda info: (info.used_s, info.set_id)):
        if free_bytes <= 0:
            break
        if info.is_open or info.is_pinned or info.set_id in protected:
            continue
        victims.append(info.set_id)
        free_bytes -= info.n_bytes
    return victims
