"""Records for the tests of the embedded index, and processes that use one."""

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess

from kvtier.format.geometry import Extent
from kvtier.index import entry
from kvtier.index.base import Location, NewRecord, SetInfo
from kvtier.index.lmdb.index import LmdbIndex

WHOLE = Extent(0, 2, 0, 2)
NAMESPACE = bytes(range(16))
FRESH = multiprocessing.get_context("forkserver")  # processes that share nothing, without the imports of "spawn"
FRESH.set_forkserver_preload(["pytest", "kvtier.index.lmdb.index"])
PROCESS_TIMEOUT_S = 60.0


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def record(number: int, set_id: int, slot: int) -> NewRecord:
    return NewRecord(key(number), Location(set_id, 0, slot, 4096, WHOLE, (number, slot)), WHOLE)


def set_info(set_id: int, owner: str = "engine") -> SetInfo:
    return SetInfo(set_id, NAMESPACE, owner, 1 << 20, 1.0, 1.0)


def fill(index: LmdbIndex, set_id: int, numbers: range) -> int:
    index.create_set(set_info(set_id))
    return index.publish([record(number, set_id, slot) for slot, number in enumerate(numbers)])


def check(index: LmdbIndex, keys: list[bytes]) -> None:
    """Entries, members and sets agree: nothing points to a set that is gone."""
    members = {(key, entry.place(at)) for info in index.sets() for key, at in index.members(info.set_id)}
    assert len(members) == index.counts().records
    resolved = {(one, entry.place(at)) for one in keys for value in index.resolve([one]) for at in entry.unpack(value)}
    asked = set(keys)
    assert resolved == {member for member in members if member[0] in asked}


def start(work: Callable[..., object], *arguments: object) -> BaseProcess:
    process = FRESH.Process(target=work, args=arguments)
    process.start()
    return process


def join(*processes: BaseProcess) -> None:
    deadline = time.monotonic() + PROCESS_TIMEOUT_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * len(processes)
