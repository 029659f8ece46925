"""Signed namespaces: who can write to the share and to the index, but has not the secret, cannot have an engine load
what it made up. The same plants do work where nothing is signed, so these tests would see one that passes."""

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvtier.cli import main
from kvtier.config.settings import Settings
from kvtier.doctor.report import _signing
from kvtier.errors import ConfigError
from kvtier.format.checksum import slab_checksum, slab_seed
from kvtier.format.geometry import PAGE_BYTES, Extent
from kvtier.format.record import HEADS_PER_SIGNED_RECORD_MAX, RecordHeader, SegmentHeader, is_blank, slot_start, tags_in
from kvtier.format.signing import Signer
from kvtier.index import entry as entries
from kvtier.index.base import Location
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.scrub import verify
from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from kvtier.runtime.exit_status import FOUND_BAD, OK
from kvtier.storage.root import find_root
from kvtier.worker.cuda_events import CudaEvent
from tests.support import walks
from tests.support.ends import engines_end as engines_end  # a fixture
from tests.support.lazy import LazyEngine
from tests.support.rig import Engine, geometry, is_equal

TOKENS = list(range(1000, 1000 + 64 * 3))
OTHERS = list(range(5000, 5000 + 64 * 3))
BLOCKS, TARGET = list(range(12)), list(range(100, 112))
NO_CACHE = {"host": {"arena_bytes": 8 << 20, "admit": "never"}}
SECRET = b"a secret of at least thirty-two bytes"


def key_file(folder: Path, secret: bytes = SECRET, name: str = "secret", mode: int = 0o600) -> Path:
    path = folder / name
    path.write_bytes(secret)
    path.chmod(mode)
    return path


def signed(folder: Path, **changes: object) -> dict[str, object]:
    """Settings."""
    return NO_CACHE | {"signing": {"key_file": str(key_file(folder))}} | changes


def failed(engine: Engine, tokens: list[int] = TOKENS) -> list[frozenset[int]]:
    return [done.failed_blocks for done in engine.load(tokens, TARGET)[1]]


def saved(root: Path, changes: dict[str, object], **more: Any) -> Engine:
    """Return the engine, ended, that saved TOKENS."""
    engine = Engine(root, changes=changes, **more)
    engine.save(TOKENS, BLOCKS)
    engine.close()
    return engine


@pytest.fixture
def late(tmp_path: Path) -> Iterator[LazyEngine]:
    """Yield an engine over a device that signs its records and has saved some."""
    with walks.all_given_back() as made:
        engine = LazyEngine(tmp_path / "kv", changes=signed(tmp_path))
        engine.lay_over(admit="never")
        made.append(engine)
        assert {done.outcome for done in walks.save(engine)} == {SaveOutcome.SAVED}
        yield engine


# --- what is ours is loaded ---


@pytest.mark.parametrize("writers", [1, 2, 4])
@pytest.mark.parametrize("readers", [1, 2, 4])
def test_any_engine_with_the_secret_loads_it(tmp_path: Path, writers: int, readers: int) -> None:
    """Also one of other ranks, which reads some slabs of a record, or of several."""
    changes = signed(tmp_path)
    saved(tmp_path / "kv", changes, tensor_size=writers)
    reader = Engine(tmp_path / "kv", tensor_size=readers, changes=changes)
    assert failed(reader) == [frozenset()] * readers
    assert reader.holds(TOKENS, TARGET), "what was computed"
    assert reader.load(TOKENS, TARGET)[0] == 3


def test_who_has_another_secret_or_none_finds_nothing(tmp_path: Path) -> None:
    other = {"signing": {"key_file": str(key_file(tmp_path, SECRET[::-1], "other"))}}
    made = [Engine(tmp_path / "kv", changes=changes) for changes in (signed(tmp_path), NO_CACHE | other, NO_CACHE)]
    assert len({engine.namespace.id for engine in made}) == 3
    for engine in made:
        assert len(engine.save(TOKENS, BLOCKS)) == 3
        assert engine.load(OTHERS, TARGET)[0] == 0
    assert "signing" not in made[2].namespace.canonical_json(), "unsigned namespaces are those of before"


def test_signed_loads_on_a_device_go_through_host_memory(
    late: LazyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, seen = late.worker.io.ring, []
    submit_each = ring.submit_each
    monkeypatch.setattr(ring, "submit_each", lambda batches: [seen.extend(chain(*batches)), submit_each(batches)][1])
    assert walks.load(late).failed_blocks == frozenset()
    assert is_equal(late.blocks(walks.TARGET), walks.expected(late))
    assert len(seen) == 10 and not any(op.on_device for op in seen), "slabs and header pages, into host memory"
    found = late.transfers[0].metrics.total()
    assert names.HOST_HIT_CHUNKS not in found and found[names.FILE_READ_BYTES] > 0
    plant_in_files(tmp_path / "kv", late.namespace.id, changed_slabs)
    assert walks.load(late).failed_blocks == frozenset(walks.TARGET)
    time.sleep(0.1)
    late.transfers[0].tidy()  # reads ahead that were under way have their slots until they return


def test_what_goes_bad_on_the_way_up_is_read_again(
    late: LazyEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy, copies = late.order.begin_copies, []
    zeros = torch.zeros(late.host.slot_bytes, dtype=torch.uint8)

    def bad_once(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> CudaEvent:
        copies.extend(pairs)
        ((target, source),) = pairs
        return copy([(target, zeros[: source.numel()] if len(copies) == 1 else source)])

    monkeypatch.setattr(late.order, "begin_copies", bad_once)
    assert walks.load(late).failed_blocks == frozenset()
    assert len(copies) == 6 and is_equal(late.blocks(walks.TARGET), walks.expected(late))


def test_a_full_host_arena_makes_signed_loads_wait_and_loses_none(late: LazyEngine) -> None:
    taken = []
    while (slot := late.host.reserve()) is not None:
        taken.append(slot)
    late.host.discard(taken.pop())  # one is left to land in
    assert walks.load(late).failed_blocks == frozenset()
    assert is_equal(late.blocks(walks.TARGET), walks.expected(late))
    for slot in taken:
        late.host.discard(slot)


def test_nobody_who_waits_for_a_slot_takes_the_one_that_was_just_read_into(late: LazyEngine) -> None:
    host = late.host

    class Crowded(threading.Condition):
        """Lock of the arena: after each release, another thread takes a slot and gives it back."""

        is_others = False

        def __exit__(self, *args: Any) -> None:
            if not self.is_others:
                self.is_others = True
                slot = host.reserve()
                if slot is not None:
                    host.discard(slot)
                self.is_others = False
            super().__exit__(*args)

    taken = [late.host.reserve() for _ in range(late.host.n_slots - 1)]
    late.host._lock = Crowded()
    assert walks.load(late).failed_blocks == frozenset()
    assert is_equal(late.blocks(walks.TARGET), walks.expected(late))
    for slot in taken:
        assert slot is not None
        late.host.discard(slot)


# --- what strangers plant is not ---

Records = dict[int, tuple[RecordHeader, np.ndarray, list[bytes]]]  # slot -> header, slabs (heads, bytes) and tags


def records_of(path: Path) -> tuple[SegmentHeader, Records]:
    content = path.read_bytes()
    segment = SegmentHeader.unpack(content[:PAGE_BYTES])
    found: Records = {}
    for slot in range(segment.slots):
        at = segment.slot_offset(slot)
        page = content[at : at + PAGE_BYTES]
        if is_blank(page):
            break
        header = RecordHeader.unpack(page)
        n_heads, size = header.extent.n_heads, header.slab_bytes
        slabs = np.frombuffer(content, np.uint8, n_heads * size, at + PAGE_BYTES).reshape(n_heads, size).copy()
        found[slot] = (header, slabs, tags_in(page, n_heads))
    return segment, found


def summed(header: RecordHeader, slabs: np.ndarray) -> RecordHeader:
    """With the checksums of these slabs, which everybody can compute."""
    first = header.extent.first_head
    sums = (
        slab_checksum(slab, slab_seed(header.key, head, header.extent.first_layer))
        for head, slab in enumerate(slabs, start=first)
    )
    return replace(header, checksums=tuple(sums))


def changed_slabs(records: Records) -> None:
    for header, slabs, _ in records.values():
        slabs[0, 100] ^= 1
        assert header.key


def another_keys_record(records: Records) -> None:
    """Whole records of other prefixes, with their tags, under these keys."""
    headers = [header for header, _, _ in records.values()]
    parts = [(slabs, tags) for _, slabs, tags in records.values()]
    for slot, header in enumerate(headers):
        records[slot] = (header, *parts[(slot + 1) % len(parts)])


def heads_change_places(records: Records) -> None:
    for slot, (header, slabs, tags) in records.items():
        records[slot] = (header, slabs[::-1].copy(), tags[::-1])


def no_tags(records: Records) -> None:
    for slot, (header, slabs, _) in records.items():
        records[slot] = (header, slabs[::-1].copy(), [])


def tags_of_another_secret(records: Records) -> None:
    theirs = Signer(b"what the stranger makes up, 32 bytes at least")
    for slot, (header, slabs, _) in records.items():
        slabs[:] = 7
        records[slot] = (header, slabs, list(theirs.tags(header.namespace, header.key, header.extent, list(slabs))))


def plant_in_files(root: Path, namespace: bytes, plant: Callable[[Records], None]) -> None:
    (path,) = (root / "v2" / namespace.hex()).glob("*.kvseg")
    segment, records = records_of(path)
    plant(records)
    with path.open("r+b") as file:
        for slot, (header, slabs, tags) in records.items():
            file.seek(segment.slot_offset(slot))
            file.write(summed(header, slabs).pack(tags) + slabs.tobytes())


PLANTS = [changed_slabs, another_keys_record, heads_change_places, no_tags, tags_of_another_secret]


@pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "not signed"])
@pytest.mark.parametrize("plant", PLANTS)
def test_what_is_planted_in_files(tmp_path: Path, plant: Callable[[Records], None], is_signed: bool) -> None:
    changes = signed(tmp_path) if is_signed else NO_CACHE
    changes = changes | {"index": {"kind": "memory"}}  # made anew from what the files say, by the next engine
    writer = saved(tmp_path / "kv", changes)
    plant_in_files(tmp_path / "kv", writer.namespace.id, plant)
    reader = Engine(tmp_path / "kv", changes=changes)
    rebuilt(reader)
    before = reader.blocks(TARGET)
    (transfer,) = reader.transfers
    answered = failed(reader)
    if not is_signed:
        assert answered == [frozenset()], "a checksum is no signature"
        return
    assert answered == [frozenset(TARGET)] and transfer.metrics.total()[names.CHECKSUM_FAILURES] >= 1
    assert all((a == b).all() for a, b in zip(reader.blocks(TARGET), before, strict=True))
    assert reader.load(TOKENS, TARGET)[0] == 0, "it is not offered again"


def rebuilt(engine: Engine) -> None:
    keeper, worker = engine.store._keeper, engine.transfers[0]._worker
    assert keeper._sweeper.rebuild() is not None
    object.__setattr__(worker, "index", keeper._index)  # one in memory is each half's own


def test_a_record_of_another_namespace_with_the_same_secret(tmp_path: Path) -> None:
    """Keys chain from the namespace, so the stranger writes the other model's record under the key that is wanted."""
    changes = signed(tmp_path) | {"index": {"kind": "memory"}}
    writers = [saved(tmp_path / "kv", changes, weights=weights) for weights in ("one", "two")]
    one, two = (next((tmp_path / "kv" / "v2" / w.namespace.id.hex()).glob("*.kvseg")) for w in writers)
    _, theirs = records_of(two)

    def plant(records: Records) -> None:
        for slot, (header, _, _) in records.items():
            records[slot] = (header, theirs[slot][1], theirs[slot][2])

    plant_in_files(tmp_path / "kv", writers[0].namespace.id, plant)
    reader = Engine(tmp_path / "kv", weights="one", changes=changes)
    rebuilt(reader)
    assert failed(reader) == [frozenset(TARGET)]
    assert one.exists()


def test_a_record_that_was_copied_to_another_slot_is_the_same_kv(tmp_path: Path) -> None:
    changes = signed(tmp_path) | {"index": {"kind": "memory"}}
    writer = saved(tmp_path / "kv", changes)

    def turn(records: Records) -> None:
        found = list(records.values())
        for slot in records:
            header, slabs, tags = found[(slot + 1) % 3]
            records[slot] = (replace(header, slot=slot), slabs, tags)

    plant_in_files(tmp_path / "kv", writer.namespace.id, turn)
    reader = Engine(tmp_path / "kv", changes=changes)
    rebuilt(reader)
    assert failed(reader) == [frozenset()]
    assert reader.holds(TOKENS, TARGET), "what was computed"


@pytest.mark.parametrize("is_signed", [True, False], ids=["signed", "not signed"])
@pytest.mark.parametrize("what", ["another's record", "an empty slot"])
def test_who_can_write_to_the_index_alone(tmp_path: Path, what: str, is_signed: bool) -> None:
    """An entry says where slabs lie and what they sum to: both are the stranger's to choose. That others' prompts have
    been saved, or that a slot is still empty, is enough to know what lies there."""
    engine = Engine(tmp_path / "kv", changes=signed(tmp_path) if is_signed else NO_CACHE)
    engine.save(TOKENS, BLOCKS)
    engine.save(OTHERS, list(range(20, 32)))
    asked, others = engine.keys(TOKENS), engine.keys(OTHERS)
    told = [place_of(engine, key) for key in (others if what == "another's record" else asked)]
    if what == "an empty slot":
        told = [location._replace(slot=location.slot + 8) for location in told]
    planted = [
        entries.pack([with_sums(engine, key, at)], engine.shape.whole) for key, at in zip(asked, told, strict=True)
    ]
    (done,) = engine.run_load(engine.store.plan_load("r", asked, planted, TARGET, 0))
    assert done.failed_blocks == (frozenset(TARGET) if is_signed else frozenset())


def place_of(engine: Engine, key: bytes) -> Location:
    found = engine.store.lookup([key])
    assert found
    return entries.unpack(found[0])[0]


def with_sums(engine: Engine, key: bytes, at: Location) -> Location:
    """As it must be for the bytes that lie there to pass for the key's."""
    (path,) = (engine.root / "v2" / engine.namespace.id.hex()).glob(f"{at.set_id:016x}-*.kvseg")
    record_bytes = PAGE_BYTES + at.extent.n_heads * at.slab_bytes
    offset = slot_start(at.set_id, at.slot, record_bytes) + PAGE_BYTES
    with path.open("rb") as file:
        file.seek(offset)
        content = file.read(at.extent.n_heads * at.slab_bytes)
    slabs = np.frombuffer(content, np.uint8).reshape(at.extent.n_heads, at.slab_bytes)
    sums = (slab_checksum(slab, slab_seed(key, head, at.extent.first_layer)) for head, slab in enumerate(slabs))
    return at._replace(checksums=tuple(sums))


# --- looking at it ---


def test_verify_checks_signatures_with_the_secret_and_says_when_it_has_none(tmp_path: Path) -> None:
    engine = saved(tmp_path / "kv", signed(tmp_path))
    root, signer = find_root(tmp_path / "kv"), Signer(SECRET)
    assert verify(root, MemoryIndex(), signer=signer).unproved == 0
    assert verify(root, MemoryIndex(), signer=signer).bad == ()
    plant_in_files(tmp_path / "kv", engine.namespace.id, changed_slabs)
    found = verify(root, MemoryIndex(), signer=signer)
    assert [finding.what for finding in found.bad] == ["head 0 was not signed with the secret"] * 3
    for other in (None, Signer(SECRET[::-1])):
        found = verify(root, MemoryIndex(), signer=other)
        assert found.bad == () and found.unproved == found.records == 3


def test_check_and_doctor_say_what_is_wrong_with_the_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"root: {tmp_path}/kv\ncapacity_bytes: 1GiB\nsigning: {{key_file: {key_file(tmp_path)}}}\n")
    assert main(["check", str(config)]) == OK
    assert f"signing.key_file: {tmp_path}/secret" in capsys.readouterr().out
    verdict = _signing(Settings.load({"config": str(config)}))
    assert verdict.level == "ok" and Signer(SECRET).fingerprint in verdict.value
    key_file(tmp_path, mode=0o644)
    assert main(["check", str(config)]) == FOUND_BAD
    assert "chmod 600" in capsys.readouterr().err
    assert _signing(Settings.load({"config": str(config)})).level == "bad"


def test_the_command_verify_takes_the_secret_from_the_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = saved(tmp_path / "kv", signed(tmp_path))
    plant_in_files(tmp_path / "kv", engine.namespace.id, no_tags)
    shutil.rmtree(tmp_path / "kv" / "v2" / "index")  # which knows other checksums
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"root: {tmp_path}/kv\nsigning: {{key_file: {tmp_path}/secret}}\n")
    assert main(["verify", str(config)]) == FOUND_BAD
    assert "was not signed with the secret" in capsys.readouterr().out
    main(["verify", str(tmp_path / "kv")])
    assert "The signatures of 3 records were not checked" in capsys.readouterr().out


# --- the secret ---


def refusal(path: Path) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Settings.load({"root": "/x", "signing": {"key_file": str(path)}}).signing.signer()
    assert caught.value.key == "signing.key_file" and SECRET.decode() not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_secret_that_others_can_reach(tmp_path: Path, mode: int) -> None:
    assert "chmod 600" in refusal(key_file(tmp_path, mode=mode)).fix


def test_a_secret_that_is_too_short_or_too_long(tmp_path: Path) -> None:
    for content in (b"", b"x" * 31, b"x" * 31 + b"\n\n", b"x" * 5000):
        assert "32 to 4096 bytes" in refusal(key_file(tmp_path, content)).fix


def test_a_secret_that_is_no_file_or_anothers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no secret can be read" in refusal(tmp_path / "none").fix
    os.mkfifo(tmp_path / "pipe")
    assert "plain file" in refusal(tmp_path / "pipe").fix
    assert "absolute" in str(
        pytest.raises(ConfigError, Settings.load, {"root": "/x", "signing": {"key_file": "k"}}).value
    )
    path = key_file(tmp_path)
    os.chown(path, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert "another user's" in refusal(path).fix


def test_a_line_break_at_the_end_is_no_part_of_it(tmp_path: Path) -> None:
    found = {
        Settings(root=Path("/x"), signing={"key_file": key_file(tmp_path, content)}).signing.signer().fingerprint  # type: ignore
        for content in (SECRET, SECRET + b"\n", SECRET + b"\r\n")
    }
    assert found == {Signer(SECRET).fingerprint}


def test_the_secret_stands_in_no_text(tmp_path: Path) -> None:
    settings = Settings.load({"root": "/x", "signing": {"key_file": str(key_file(tmp_path))}})
    signer = settings.signing.signer()
    texts = repr(settings) + repr(signer) + settings.model_dump_json()
    assert SECRET.decode() not in texts and str(SECRET) not in texts


def test_more_heads_than_a_signed_record_has_room_for(tmp_path: Path) -> None:
    n_heads = HEADS_PER_SIGNED_RECORD_MAX + 1
    shape = geometry(layers=1, kv_heads=n_heads, k_head_size=8, v_head_size=8, chunk_tokens=16)
    with pytest.raises(ConfigError, match=f"room for {n_heads - 1} KV heads a rank, not {n_heads}"):
        Engine(tmp_path / "kv", shape, changes=signed(tmp_path))
    engine = Engine(tmp_path / "kv2", replace(shape, kv_heads=n_heads - 1), changes=signed(tmp_path))
    assert len(engine.save(TOKENS[:16], [0])) == 1
    assert failed(engine, TOKENS[:16]) == [frozenset()]


def test_a_record_of_more_heads_than_have_tags_is_nobodys() -> None:
    slabs, extent = [bytes(8)] * 496, Extent(0, 1, 0, 496)
    header = RecordHeader(b"k" * 16, b"p" * 16, b"n" * 16, PAGE_BYTES, 64, 0, extent, 7, (0,) * 496)
    bad = Signer(SECRET).bad_slabs(b"n" * 16, b"k" * 16, extent, slabs, tags_in(header.pack(), 496))
    assert bad == list(range(496))


def test_tags_are_pinned() -> None:
    """Of other software or of this one in a year."""
    signer = Signer(bytes(range(32)))
    (tag,) = signer.tags(b"n" * 16, b"k" * 16, Extent(2, 3, 5, 1), [np.arange(4096).astype(np.uint8)])
    assert (signer.fingerprint, tag.hex()) == (
        "51a4389dfedbdd8c1fbc0f632fbe15ff",
        "06611edbbd24cce0d0c400b6d7fb0c7e",
    )
    whole = signer.tags(b"n" * 16, b"k" * 16, Extent(2, 3, 0, 6), [np.arange(4096).astype(np.uint8)] * 6)
    assert whole[5] == tag and len(set(whole)) == 6, "a tag is the same whatever is read with it"
