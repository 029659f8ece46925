"""What computing and loading cost one engine, another one like it expects."""

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.build import open_store
from kvtier.connectors.load_costs import LoadCosts
from kvtier.errors import Corrupt, IndexUnavailable
from kvtier.index.memory import MemoryIndex
from kvtier.scheduler.cost_history import KEPT_S, PREFIX, CostHistory, note_name, pack, unpack
from kvtier.scheduler.engine_report import About
from kvtier.scheduler.load_threshold import NEVER, Costs, FixedThreshold, LoadCost, LoadThreshold
from kvtier.scheduler.store import Store
from kvtier.storage import root_owner
from tests.support.rig import geometry, namespace, settings, shares
from tests.waiting import wait_until

SPACE = bytes(range(16))
GPU = About(2, "vllm", "0.25.1", "model", "", "NVIDIA H200")
SEEN = Costs(65e-6, LoadCost(0.004, 2.5e-6))
SECONDS = st.floats(1e-9, 1e6)


@given(SECONDS, SECONDS, SECONDS)
def test_a_note_says_what_was_seen(prefill_s: float, fixed_s: float, token_s: float) -> None:
    costs = Costs(prefill_s, LoadCost(fixed_s, token_s))
    assert unpack(pack(costs)) == costs


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        b'{"prefill_token_s":0,"load_fixed_s":1,"load_token_s":1}',
        b"1" * 2000,
        b"[" * 1000,
        b'{"prefill_token_s":1,"load_fixed_s":-1,"load_token_s":1}',
        b'{"prefill_token_s":NaN,"load_fixed_s":1,"load_token_s":1}',
        b'{"prefill_token_s":1,"load_fixed_s":1e999,"load_token_s":1}',
    ],
)
def test_what_is_no_note_is_none(note: bytes) -> None:
    with pytest.raises(Corrupt):
        unpack(note)
    index = MemoryIndex()
    index.put_note("costs/x", note, None)
    kept = CostHistory(index, "costs/x")
    kept.refresh(1.0)
    assert kept.expected is None
    kept.latest = SEEN
    kept.refresh(1.0)
    assert unpack(index.notes("costs/", 2.0)["costs/x"]) == SEEN


def test_engines_that_differ_do_not_expect_the_same() -> None:
    others = [
        replace(GPU, ranks=1),
        replace(GPU, engine="sglang"),
        replace(GPU, engine_version="0.32.0"),
        replace(GPU, device="NVIDIA H100"),
    ]
    names = [note_name(SPACE, about) for about in (GPU, *others)] + [note_name(bytes(16), GPU)]
    assert len(set(names)) == len(names)
    assert note_name(SPACE, GPU) == note_name(SPACE, replace(GPU, model="as others call it"))


@pytest.mark.parametrize("machine_id", ["5d1c", ""])
def test_a_pod_of_another_name_expects_the_costs_of_its_machine(
    machine_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have no machine id: then by the boot of its host."""
    (tmp_path / "machine-id").write_text(machine_id)
    (tmp_path / "boot-id").write_text("0c9f")
    monkeypatch.setattr(root_owner, "MACHINE_ID_FILE", tmp_path / "machine-id")
    monkeypatch.setattr(root_owner, "BOOT_ID_FILE", tmp_path / "boot-id")
    name = note_name(SPACE, GPU)
    monkeypatch.setattr("socket.gethostname", lambda: "pod-7f9c")
    assert note_name(SPACE, GPU) == name
    monkeypatch.setattr(root_owner, "BOOT_ID_FILE", tmp_path / "absent")
    assert (note_name(SPACE, GPU) == name) == bool(machine_id)


def test_little_changes_are_not_written() -> None:
    index = MemoryIndex()
    kept = CostHistory(index, "costs/x")
    written: list[bytes] = []
    put = index.put_note
    index.put_note = lambda name, value, expires_s: (written.append(value), put(name, value, expires_s))[1]  # type: ignore[func-returns-value, method-assign]
    for factor in (1.0, 1.05, 0.95, 1.2, 1.25):
        kept.latest = replace(SEEN, prefill_token_s=factor * SEEN.prefill_token_s)
        kept.refresh(1.0)
    assert len(written) == 2


def test_an_index_that_does_not_answer_is_asked_again() -> None:
    index = MemoryIndex()
    index.put_note("costs/x", pack(SEEN), 1.0 + KEPT_S)
    kept = CostHistory(index, "costs/x")
    notes = index.notes

    def fails(prefix: str, now_s: float) -> dict[str, bytes]:
        raise IndexUnavailable("gone")

    index.notes = fails  # type: ignore[method-assign]
    with pytest.raises(IndexUnavailable):
        kept.refresh(1.0)
    index.notes = notes  # type: ignore[method-assign]
    kept.refresh(1.0)
    assert kept.expected == SEEN


@pytest.mark.parametrize("beats", [True, False])
def test_the_next_engine_knows_when_it_has_started(tmp_path: Path, beats: bool) -> None:
    """Also from one that ended before its next sign of life."""

    def start(about: About) -> Store:
        wanted = settings(tmp_path, writer_lease_s=0.3 if beats else 60.0)
        return open_store(wanted, namespace(geometry()), shares(geometry()), about)

    first = start(GPU)
    assert first.costs is not None and first.costs.expected is None
    first.costs.latest = SEEN
    if beats:
        wait_until(lambda: bool(first.index.notes(PREFIX, time.time())))
    first.close()
    second = start(GPU)
    assert second.costs is not None and second.costs.expected == SEEN
    second.close()
    other = start(About())
    assert other.costs is None, "nobody asks"
    other.close()


def test_the_engine_tells_and_learns(caplog: pytest.LogCaptureFixture) -> None:
    """The connector's part: what was kept is expected, what is seen is kept, and that nothing is loaded is said."""
    caplog.set_level(logging.WARNING, "kvtier")
    kept = CostHistory(MemoryIndex(), "costs/x")
    kept.expected = Costs(25e-6, LoadCost(0.002, 131e-6))  # a disk
    now = [0.0]
    costs = LoadCosts(LoadThreshold(LoadCost(0.0, 0.0)), kept, lambda: now[0])
    assert costs.limit.min_tokens == NEVER
    assert [record.message.split(",")[0] for record in caplog.records] == ["kvtier: hits are computed and not loaded"]
    costs.calibrate(LoadCost(0.002, 130e-6))
    costs.saw_step(8192, 0.2)
    assert kept.latest == Costs(0.2 / 8192, LoadCost(0.002, 130e-6)) and len(caplog.records) == 1
    now[0] = 3601.0
    costs.saw_step(1, 0.01)
    assert len(caplog.records) == 1, "a step that decodes says nothing of prefills"
    costs.saw_step(8192, 0.2)
    assert len(caplog.records) == 2
    LoadCosts(FixedThreshold(256), None).saw_step(8192, 0.2)
    LoadCosts(FixedThreshold(8192), kept).saw_step(8192, 0.2)
    assert len(caplog.records) == 2, "who has set it knows"
