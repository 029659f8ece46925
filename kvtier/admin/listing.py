"""The segment sets of a root, a page at a time, and one of them with its files."""

from collections.abc import Collection

from kvtier.admin.answers import SegmentFile, SetDetails, SetPage, SetRow
from kvtier.admin.opened import NotThere, Opened
from kvtier.index.base import SetInfo
from kvtier.storage.segments import SegmentFiles, segment_name

PAGE_MAX = 1000


def list_sets(
    opened: Opened, namespace: bytes | None, tenant: str | None, is_open: bool | None, after: int, limit: int
) -> SetPage:
    """List at most `limit` sets with ids above `after`, in the order of their ids, which is the order of creation.
    namespace, tenant, is_open: filters; None: any. Raises IndexUnavailable."""
    sets = opened.index.sets()
    found = [
        info
        for info in sets
        if info.set_id > after
        and namespace in (None, info.namespace)
        and tenant in (None, info.tenant)
        and is_open in (None, info.is_open)
    ]
    page = found[:limit]
    next_after = f"{page[-1].set_id:016x}" if len(found) > len(page) else None
    protected = opened.protected(sets)
    return SetPage(sets=[row_of(info, protected) for info in page], next_after=next_after)


def describe_set(opened: Opened, set_id: int) -> SetDetails:
    """Raises NotThere, IndexUnavailable."""
    sets = opened.index.sets()  # all of them: pins protect up to a cap, the older sets first
    info = next((info for info in sets if info.set_id == set_id), None)
    if info is None:
        raise NotThere("the index has no such segment set")
    files = SegmentFiles(opened.root.folder / info.namespace.hex(), direct=False)
    parts = files.part_bytes(set_id).items()
    return SetDetails(
        records=len(opened.index.members(set_id)),
        files=[SegmentFile(name=segment_name(set_id, part), n_bytes=n_bytes) for part, n_bytes in parts],
        **row_of(info, opened.protected(sets)).model_dump(),
    )


def row_of(info: SetInfo, protected: Collection[int]) -> SetRow:
    """Describe a set in a row. protected: ids of the sets that pins keep."""
    return SetRow(
        set_id=f"{info.set_id:016x}",
        namespace=info.namespace.hex(),
        tenant=info.tenant,
        owner=info.owner,
        n_bytes=info.n_bytes,
        created_s=info.created_s,
        used_s=info.used_s,
        uses=info.uses,
        is_open=info.is_open,
        is_pinned=info.set_id in protected,
    )
