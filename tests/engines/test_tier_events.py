"""KV events of the tier, block by block as vLLM publishes its own cache's: hashes, parents, tokens and extra keys.

First against vLLM's Request and block pool without an engine, then what a real engine's publisher sends.
"""

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvtier.connectors import dynamo
from kvtier.connectors.dynamo import chunk_blocks, events_of, wants_events
from kvtier.connectors.faults import Faults
from kvtier.connectors.kv_events import Added, ChunkBlocks, Removed
from kvtier.connectors.tracked_request import BlockShape
from kvtier.connectors.vllm.scheduler import SchedulerHalf

BLOCK, CHUNK = 16, 64
SHAPE = BlockShape(CHUNK, BLOCK)
LORA = LoRARequest("french", 7, "/adapters/french")
IMAGES = [
    MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, length))
    for name, offset, length in (("cat", 20, 30), ("dog", 60, 70))
]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "salted": {"cache_salt": "tenant-1"},
    "adapter": {"lora_request": LORA},
    "images": {"mm_features": IMAGES},
    "all of them": {"cache_salt": "tenant-1", "lora_request": LORA, "mm_features": IMAGES},
}


def request(hash_tokens: int = BLOCK, n_tokens: int = 260, **kind: Any) -> Request:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(hash_tokens, sha256)
    return Request("r", list(range(n_tokens)), SamplingParams(max_tokens=1), None, block_hasher=hasher, **kind)


def published(request: Request, first_block: int, n_blocks: int, hash_tokens: int = BLOCK) -> BlockStored:
    """What vLLM publishes when these blocks of a request come into its own cache."""
    pool = BlockPool(100, True, hash_tokens, enable_kv_cache_events=True)
    blocks = pool.get_new_blocks(first_block + n_blocks)
    pool.cache_full_blocks(request, blocks, first_block, first_block + n_blocks, BLOCK, 0)
    (event,) = pool.take_events()
    return event


def told(request: Request, *chunks: int, hash_tokens: int = BLOCK) -> list[Any]:
    described = [chunk_blocks(request, chunk, SHAPE, hash_tokens) for chunk in chunks]
    return events_of([Added(blocks) for blocks in described if blocks is not None], BLOCK, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("first_chunk", "n_chunks"), [(0, 1), (0, 4), (1, 1), (2, 2)])
def test_the_tiers_events_are_those_of_vllms_own_cache_but_for_the_medium(
    kind: str, first_chunk: int, n_chunks: int
) -> None:
    own = request(**KINDS[kind])
    (event,) = told(own, *range(first_chunk, first_chunk + n_chunks))
    expected = published(own, first_chunk * SHAPE.blocks, n_chunks * SHAPE.blocks)
    assert event.medium == "STORAGE" and expected.medium == "GPU"
    expected.medium = event.medium
    assert event == expected
    assert kind == "plain" or any(event.extra_keys) or first_chunk


def test_hashes_finer_than_blocks_are_put_together_as_vllm_does() -> None:
    own = request(hash_tokens=BLOCK // 2)
    (event,) = told(own, 1, hash_tokens=BLOCK // 2)
    expected = published(own, SHAPE.blocks, SHAPE.blocks, hash_tokens=BLOCK // 2)
    assert (event.block_hashes, event.parent_block_hash) == (expected.block_hashes, expected.parent_block_hash)
    assert event.token_ids == expected.token_ids


@pytest.mark.parametrize(("number", "kind"), [("1", int), ("0", bytes)])
def test_hashes_are_published_as_vllm_is_told_to(monkeypatch: pytest.MonkeyPatch, number: str, kind: type) -> None:
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", number)
    own = request()
    (event,) = told(own, 1)
    expected = published(own, SHAPE.blocks, SHAPE.blocks)
    assert event.block_hashes == expected.block_hashes and isinstance(event.block_hashes[0], kind)
    assert event.parent_block_hash == expected.parent_block_hash


def test_a_chunk_that_vllm_has_not_hashed_whole_is_not_told() -> None:
    own = request(n_tokens=CHUNK + BLOCK)
    assert chunk_blocks(own, 0, SHAPE, BLOCK) is not None
    assert chunk_blocks(own, 1, SHAPE, BLOCK) is None
    assert chunk_blocks(own, 9, SHAPE, BLOCK) is None


def test_prompts_that_are_told_one_after_the_other_stay_apart() -> None:
    """Chunks 0 and 1 of one, then chunk 1 of another, whose parent is not what stands before it."""
    one, other = request(), request(cache_salt="x")
    events = told(one, 0, 1) + told(other, 1)
    described = [chunk_blocks(who, chunk, SHAPE, BLOCK) for who, chunk in ((one, 0), (one, 1), (other, 1))]
    assert events_of([Added(blocks) for blocks in described if blocks], BLOCK, None) == events
    assert [len(event.block_hashes) for event in events] == [8, 4]


def test_order_is_kept_between_what_is_added_and_what_is_removed() -> None:
    first, second = (ChunkBlocks((name,), None, (1,) * BLOCK, (None,)) for name in (b"a", b"b"))
    changes = [Added(first), Removed((b"a",)), Removed((b"c",)), Added(second)]
    events = events_of(changes, BLOCK, "full_attention")
    assert [type(event) for event in events] == [BlockStored, BlockRemoved, BlockStored]
    assert events[1] == BlockRemoved(block_hashes=[0x61, 0x63], medium="STORAGE", group_idx=0)
    assert events[0].kv_cache_spec_kind == "full_attention"


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (None, False),
        (KVEventsConfig(), False),
        (KVEventsConfig(enable_kv_cache_events=True, publisher="null"), False),
        (KVEventsConfig(enable_kv_cache_events=True), True),
    ],
)
def test_events_are_made_only_where_they_are_published(config: Any, wanted: bool) -> None:
    assert wants_events(SimpleNamespace(kv_events_config=config)) is wanted


def test_a_vllm_whose_events_lack_a_field_is_said_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dynamo, "NEEDED_FIELDS", ("a_field_that_never_was",))
    config = SimpleNamespace(kv_events_config=KVEventsConfig(enable_kv_cache_events=True))
    assert not wants_events(config)
    assert "the tier sends no KV events" in caplog.text and "a_field_that_never_was" in caplog.text


def test_without_events_nothing_is_kept_or_asked_for() -> None:
    half = SchedulerHalf.__new__(SchedulerHalf)
    half._events = None
    half._bridge = SimpleNamespace(has_pending_gathers=lambda: False)  # type: ignore[assignment]
    assert list(half.take_events()) == [] and not half.needs_a_step()


def test_events_that_wait_ask_for_a_step_and_a_fault_in_them_ends_nothing() -> None:
    def fail() -> list[Any]:
        raise ValueError("a field is gone")

    half = SchedulerHalf.__new__(SchedulerHalf)
    half._faults = Faults()
    half._events = SimpleNamespace(has_waiting=True, take=fail)  # type: ignore[assignment]
    half._bridge = SimpleNamespace(has_pending_gathers=lambda: False)  # type: ignore[assignment]
    assert half.needs_a_step()
    assert list(half.take_events()) == [] and half._faults.take() == 1


# --- a real engine ---


@pytest.fixture(scope="session")
def engines(lab: Any) -> list[dict[str, Any]]:
    """Two engines after each other on one root: one computes and saves, the other finds; then sets are evicted."""
    root = lab.folder / "events"
    results = []
    for name in ("computes", "finds"):
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"ipc://{root}-{name}",
            "replay_endpoint": f"ipc://{root}-{name}-replay",
        }
        llm = {"kv_events_config": events, "max_num_batched_tokens": 512}
        spec = {"root": str(root), "llm": llm, "scenarios": [["kv_events", name == "finds"]]}
        results += lab.run(f"events-{name}", [spec])
    return results


def by_medium(result: dict[str, Any], phase: str, medium: str, kind: str = "BlockStored") -> list[dict[str, Any]]:
    return [event for event in result["kv_events"][phase] if event["type"] == kind and event["medium"] == medium]


def blocks(events: list[dict[str, Any]]) -> dict[str, tuple[Any, ...]]:
    """Block hash -> parent, tokens, extra keys, adapter: all that places a block in a router's index."""
    found: dict[str, tuple[Any, ...]] = {}
    for event in events:
        parent, size = event["parent_block_hash"], event["block_size"]
        extras = event.get("extra_keys") or [None] * len(event["block_hashes"])
        for number, name in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][number * size : (number + 1) * size]
            found[name] = (parent, tokens, extras[number], event.get("lora_name"), event.get("kv_cache_spec_kind"))
            parent = name
    return found


def test_a_real_engine_tells_of_what_it_saved_as_it_tells_of_its_own_cache(engines: list[dict[str, Any]]) -> None:
    computes = engines[0]
    own = blocks(by_medium(computes, "computed", "GPU"))
    told = blocks(by_medium(computes, "computed", "STORAGE"))
    assert len(told) == computes["kv_events"]["whole_blocks"]
    assert {name: own[name] for name in told} == told
    salted = [extras for _, _, extras, _, _ in told.values() if extras]
    assert salted == [["tenant-1"]]


def test_another_engine_tells_of_what_it_found_as_the_first_one_did(engines: list[dict[str, Any]]) -> None:
    computes, finds = engines
    assert blocks(by_medium(finds, "computed", "STORAGE")) == blocks(by_medium(computes, "computed", "STORAGE"))
    assert finds["kv_events"]["cached"] == computes["kv_events"]["whole_tokens"]


def test_each_block_is_told_of_once(engines: list[dict[str, Any]]) -> None:
    for result in engines:
        names = [name for event in by_medium(result, "computed", "STORAGE") for name in event["block_hashes"]]
        assert len(names) == len(set(names))
        assert by_medium(result, "again", "STORAGE") == []


def test_evicted_blocks_are_taken_back(engines: list[dict[str, Any]]) -> None:
    finds = engines[1]
    gone = [name for event in by_medium(finds, "evicted", "STORAGE", "BlockRemoved") for name in event["block_hashes"]]
    assert sorted(gone) == sorted(blocks(by_medium(finds, "computed", "STORAGE")))


def test_the_wire_format_is_vllms(engines: list[dict[str, Any]]) -> None:
    """What was sent decodes into vLLM's own classes."""
    event = dict(by_medium(engines[0], "computed", "STORAGE")[0])
    assert msgspec.convert(event, BlockStored, strict=False).medium == "STORAGE"
