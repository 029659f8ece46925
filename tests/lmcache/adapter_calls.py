"""Run in LMCache's environment: its own adapter, made from its own configuration, with its own keys and objects.

python adapter_calls.py ADAPTER.json       prints what came of it, as JSON
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from lmcache.cli.commands.bench.l2_adapter_bench.data import make_aligned_tensor, make_memory_objects, wait_eventfd
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter, native_plugin_l2_adapter

OBJECT_BYTES = 10_000
N_KEYS = 6


def key(number: int, salt: str) -> ObjectKey:
    return ObjectKey(number.to_bytes(32, "big"), "org/model", 0x01000100, cache_salt=salt)


class Calls:
    """What the server's controllers ask of an adapter; each waits for its answer."""

    def __init__(self, spec: dict[str, Any]) -> None:
        config = native_plugin_l2_adapter.NativePluginL2AdapterConfig.from_dict(spec)
        self.adapter = create_l2_adapter(config)

    def store(self, keys: list[ObjectKey], fill: int) -> list[Any]:
        """[whether it went well, bytes that LMCache books for it]"""
        memory = objects(len(keys), fill)  # to be there until the task has ended: views of it do not keep it
        task = self.adapter.submit_store_task(keys, memory)
        done: dict[int, Any] = {}
        while task not in done:
            wait_eventfd(self.adapter.get_store_event_fd())
            done.update(self.adapter.pop_completed_store_tasks())
        del memory
        return [done[task].is_successful(), done[task].bytes_transferred()]

    def look_up(self, keys: list[ObjectKey]) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {0: MemoryLayoutDesc(shapes=[], dtypes=[])})
        fd, query = self.adapter.get_lookup_and_lock_event_fd(), self.adapter.query_lookup_and_lock_result
        return bits(answer_of(fd, query, task), len(keys))

    def load(self, keys: list[ObjectKey]) -> list[int | None]:
        """The byte that each is full of; None: not loaded."""
        memory = objects(len(keys), 200)
        task = self.adapter.submit_load_task(keys, memory)
        found = bits(answer_of(self.adapter.get_load_event_fd(), self.adapter.query_load_result, task), len(keys))
        fills = [set(bytes(one.byte_array)) for one in memory]
        return [fill.pop() if is_here and len(fill) == 1 else None for fill, is_here in zip(fills, found, strict=True)]

    def usage(self) -> list[Any]:
        used = self.adapter.get_usage()
        return [used.total_bytes_used, dict(used.bytes_by_cache_salt)]


def objects(n: int, fill: int) -> Any:
    return make_memory_objects(make_aligned_tensor(n * OBJECT_BYTES), n, OBJECT_BYTES, 0, fill)


def answer_of(fd: int, query: Callable[[int], Any], task: int) -> Any:
    while (answer := query(task)) is None:
        wait_eventfd(fd)
    return answer


def bits(bitmap: Any, n: int) -> list[bool]:
    return [bool(bitmap.test(place)) for place in range(n)]


def main() -> None:
    with open(sys.argv[1]) as file:
        spec = json.load(file)
    calls = Calls(spec)
    plain, salted = [key(number, "") for number in range(N_KEYS)], [key(number, "tenant") for number in range(N_KEYS)]
    result = {
        "before": calls.look_up(plain),
        "store": [calls.store(plain, 10), calls.store(salted, 50)],
        "again": calls.store(plain[:2], 90),
        "look_up": calls.look_up([*plain, key(99, "")]),
        "load": [calls.load(plain), calls.load([*salted, key(99, "tenant")])],
        "usage": calls.usage(),
    }
    calls.adapter.delete([*plain[:2], *salted[:1]])
    result |= {
        "usage_after": calls.usage(),
        "look_up_after": [calls.look_up(plain), calls.look_up(salted)],
        "load_after": calls.load(plain),
        "tier_usage": calls.adapter._client.usage_bytes(),
        "status": calls.adapter.report_status(),
    }
    calls.adapter.close()
    print("\nRESULT " + json.dumps(result))


main()
