"""The evictor on real roots: who was replaced stops, a death at any step leaves nothing behind, and quotas, pins and
tenants hold from a request's cache salt to the files."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.eviction.choice import Selection
from kvtier.eviction.evictor import LEASE_TTL_S, Evictor
from kvtier.eviction.limits import UNLIMITED, Need, Quotas, Rules, namespace_note, quota_value, tenant_note
from kvtier.eviction.pins import Pin
from kvtier.eviction.set_removal import PREFIX, Removal
from kvtier.index.base import EVICT_LEASE, Index, SetInfo
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.scrub import verify
from kvtier.maintenance.sweeper import ORPHAN_GRACE_S, Sweeper
from kvtier.plan import SavePlan
from kvtier.scheduler.segment_allocator import TENANT_IDLE_S
from kvtier.scheduler.store import WantedChunk
from kvtier.storage.root import find_root
from kvtier.storage.segments import SegmentFiles
from tests.eviction.test_capacity import BLOCKS, RECORD_BYTES, SEGMENT_BYTES, TARGET, small_disk, tiny, tokens_of
from tests.scheduler.test_slow_writers import after, once
from tests.support.rig import Engine
from tests.waiting import wait_until

SPACE = bytes(16)


def put(index: Index, number: int, **changes: object) -> None:
    info = SetInfo(number, SPACE, "gone", 100, float(number), float(number), is_open=False)
    assert index.create_set(replace(info, **changes))  # type: ignore[arg-type]


def ids(index: Index) -> list[int]:
    return [info.set_id for info in index.sets()]


def on_disk(root: Path) -> set[int]:
    return {int(path.name[:16], 16) for path in root.glob("v2/*/*.kvseg")}


def disk_bytes(root: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in root.glob("v2/*/*.kvseg"))


# --- one at a time ---


@pytest.mark.parametrize("when", ["between two sets", "before a removal"])
def test_an_evictor_that_was_replaced_removes_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The evictor was stopped (SIGSTOP, a hung mount) for longer than its lease, and another evictor went on. Before a
    removal the index itself checks the token."""
    index, now = MemoryIndex(), [100.0]
    for number in range(3):
        put(index, number)
    slow = Evictor(index, tmp_path, "slow", clock=lambda: now[0])

    def be_replaced() -> None:
        now[0] += 60.0
        assert index.acquire_lease(EVICT_LEASE, "other", now[0], 30.0)

    target, name = (slow._remover, "remove") if when == "between two sets" else (index, "put_note")
    monkeypatch.setattr(target, name, after(getattr(target, name), once(be_replaced)))
    assert slow.make_room(Need(300, SPACE), 300) is None
    assert ids(index) == ([1, 2] if when == "between two sets" else [0, 1, 2]) and index.notes("", 100.0) == {}


# --- deaths ---


class Killed(BaseException):
    """As SIGKILL: no handler runs."""


@pytest.mark.parametrize("step", range(6))
def test_a_death_at_any_step_of_an_eviction_leaves_nothing_behind(tmp_path: Path, step: int) -> None:
    """Every change of the index is a step; the evictor dies after it. The next evictor completes the removal, and from
    then on files and index agree and are within the capacity."""
    writer = tiny(tmp_path, sets=6)
    for number in range(5):
        writer.save(tokens_of(number), BLOCKS)
    writer.close()
    path = str(tmp_path / "v2" / "index")
    dying = LmdbIndex(path)
    set_bytes = max(info.n_bytes for info in dying.sets())
    capacity_bytes = dying.counts().n_bytes
    _die(dying, step)
    with pytest.raises(Killed):
        Evictor(dying, tmp_path / "v2", "killed").make_room(Need(set_bytes, SPACE), capacity_bytes)
    dying.close()

    index = LmdbIndex(path)
    later = Evictor(index, tmp_path / "v2", "next", clock=lambda: time.time() + 60)
    assert later.make_room(Need(set_bytes, SPACE), capacity_bytes) is not None
    assert on_disk(tmp_path) == set(ids(index))
    assert disk_bytes(tmp_path) == index.counts().n_bytes <= capacity_bytes - set_bytes
    assert index.notes(PREFIX, 0.0) == {}
    assert not verify(find_root(tmp_path), index).bad
    index.close()


def _die(index: LmdbIndex, step: int) -> None:
    """The `step`-th change that an eviction makes is its last."""
    left = [step]

    def dying(work: Callable[..., object]) -> Callable[..., object]:
        def run(*arguments: object) -> object:
            left[0] -= 1
            done = work(*arguments)
            if left[0] < 0:
                raise Killed
            return done

        return run

    for name in ("put_note", "remove_set", "drop_note", "acquire_lease"):
        setattr(index, name, dying(getattr(index, name)))
    index.release_lease = lambda name, owner: None  # type: ignore[method-assign]  # it is dead


def evict_and_die(evictor: Evictor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove sets from the index, and die before their files are unlinked."""

    def die(*_: object) -> int:
        raise Killed

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(SegmentFiles, "unlink_set", die)
        evictor.evict(Selection(), 1 << 30)


def test_a_sweep_ends_what_an_evictor_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No engine needs room any more, so no engine evicts: without the sweep the files would stay, uncounted."""
    writer = tiny(tmp_path, sets=6)
    writer.save(tokens_of(1), BLOCKS)
    writer.close()
    index = LmdbIndex(str(tmp_path / "v2" / "index"))
    evict_and_die(Evictor(index, tmp_path / "v2", "killed"), monkeypatch)
    assert ids(index) == [] and on_disk(tmp_path)
    Sweeper(index, tmp_path / "v2", "sweeper").sweep()
    assert not on_disk(tmp_path) and index.notes(PREFIX, 0.0) == {}
    assert ORPHAN_GRACE_S > 60, "it was not swept as an orphan"
    index.close()


QUOTAS = {
    "capacity": (UNLIMITED, 100),
    "tenant": (Rules(quotas=Quotas(None, {}, {"red": 100})), 1000),
    "namespace": (Rules(quotas=Quotas(None, {SPACE: 100}, {})), 1000),
}


@pytest.mark.parametrize("limit", QUOTAS)
def test_what_a_killed_evictor_left_on_disk_counts_for_every_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    index, (rules, capacity_bytes) = MemoryIndex(), QUOTAS[limit]
    put(index, 1, tenant="red")

    evict_and_die(Evictor(index, tmp_path, "killed", rules), monkeypatch)
    assert ids(index) == [], "its file is still there"
    other = Evictor(index, tmp_path, "other", rules, clock=lambda: time.time() + LEASE_TTL_S)
    need = Need(100, SPACE, "red")
    assert not other.fits(need, capacity_bytes)
    assert other.make_room(need, capacity_bytes) == 0 and other.fits(need, capacity_bytes)


@pytest.mark.parametrize("limit", QUOTAS)
def test_a_set_whose_removal_goes_on_while_others_count_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """It left the index after removals were asked for and before sets were: its files counted for nothing."""
    index, (rules, capacity_bytes) = MemoryIndex(), QUOTAS[limit]
    put(index, 1, tenant="red")
    index.put_note(f"{PREFIX}{1:016x}", Removal(1, SPACE, 100, "red").pack(), None)
    asked = "some_sets" if limit == "capacity" else "notes"
    ask = getattr(index, asked)

    def remove_behind(*what: object) -> object:
        found = ask(*what)
        index.remove_set(1)
        return found

    monkeypatch.setattr(index, asked, remove_behind)
    assert not Evictor(index, tmp_path, "me", rules).fits(Need(100, SPACE, "red"), capacity_bytes)


# --- limits, pins, and what an administrator asks ---


def test_limits_are_kept_without_a_writer(tmp_path: Path) -> None:
    index = MemoryIndex()
    for number in range(10):
        put(index, number, tenant="t" if number % 2 else "")
    rules = Rules(high_fraction=0.9, low_fraction=0.7, ttl_s=97.5, quotas=Quotas(None, {}, {"t": 300}))
    evictor = Evictor(index, tmp_path, "me", rules, clock=lambda: 100.0)
    evictor.keep_limits(2000)
    assert ids(index) == [4, 5, 6, 7, 8, 9], "0, 1, 2 are too old, and the tenant is above its quota by 3"
    evictor.keep_limits(600)
    assert ids(index) == [6, 7, 8, 9], "600 is more than nine tenths of 600, and 400 not more than seven"
    evictor.keep_limits(445)
    assert ids(index) == [6, 7, 8, 9], "between the watermarks"
    index.put_note(tenant_note("t"), quota_value(100), None)
    index.put_note(namespace_note(SPACE), quota_value(200), None)
    evictor.keep_limits(2000)
    assert ids(index) == [8, 9], "quotas set at run time"


def test_pins_hold_against_everything_but_their_cap_and_their_end(tmp_path: Path) -> None:
    index, now = MemoryIndex(), [100.0]
    for number in range(10):
        put(index, number)
    rules = Rules(ttl_s=1.0, pinned_max_fraction=0.3, quotas=Quotas(0, {}, {}))
    evictor = Evictor(index, tmp_path, "me", rules, clock=lambda: now[0])
    pin = Pin("1", SPACE, None, "", 50.0, 200.0)
    index.put_note(pin.name, pin.pack(), pin.expires_s)
    evictor.keep_limits(1000)
    assert ids(index) == [0, 1, 2], "three tenths of the capacity, the oldest sets of the namespace"
    assert evictor.evict(Selection(), 1000) is not None and ids(index) == [0, 1, 2]
    assert evictor.make_room(Need(900, SPACE), 1000) is None and ids(index) == [0, 1, 2]
    now[0] = 201.0
    evictor.keep_limits(1000)
    assert ids(index) == [] and index.notes("pin/", now[0]) == {}


def test_an_administrator_sees_what_would_go_and_then_it_goes(tmp_path: Path) -> None:
    engine = tiny(tmp_path, sets=8)
    for number in range(5):
        engine.save(tokens_of(number), BLOCKS)
    index, keys = engine.store._keeper._index, engine.keys(tokens_of(0))
    engine.close()
    index = LmdbIndex(str(tmp_path / "v2" / "index"))
    evictor = Evictor(index, tmp_path / "v2", "admin")
    meant = Selection(set_ids=evictor.sets_of([b"?" * 16, *keys]))
    preview = evictor.preview(meant, 1 << 30)
    assert preview.sets and preview.freed_bytes == 0 and preview.n_bytes == sum(i.n_bytes for i in preview.sets)
    assert len(index.resolve(keys)) == 5, "a dry run"
    done = evictor.evict(meant, 1 << 30)
    assert done is not None and done.sets == preview.sets and done.freed_bytes == preview.n_bytes
    assert index.resolve(keys) == [] and index.counts().sets > 0
    assert index.acquire_lease(EVICT_LEASE, "engine", time.time(), 60.0)
    assert evictor.evict(Selection(), 1 << 30) is None, "an engine evicts right now"
    index.close()


def test_room_is_made_in_the_background_before_a_writer_needs_it(tmp_path: Path) -> None:
    engine = tiny(tmp_path, sets=20, capacity={"high_watermark": 0.6, "low_watermark": 0.4})
    keeper = engine.store._keeper
    for number in range(22):  # more than 13 sets, and the capacity is never reached
        engine.save(tokens_of(number), BLOCKS)
    keeper._due.limits_s = 0.0
    wait_until(lambda: engine.store.metrics.total().get("evicted_bytes", 0) > 0)
    assert keeper._index.counts().n_bytes <= 0.6 * 20 * engine.settings.segment_bytes
    assert engine.load(tokens_of(21), TARGET)[0] == 5


def test_a_reserve_of_the_disk_is_left_to_others() -> None:
    with small_disk(64) as root:
        room = {"reserve_bytes": 32 << 20}
        engine = tiny(root, capacity_bytes=1 << 30, index={"path": f"{root}-index"}, capacity=room)
        for number in range(30):
            engine.save(tokens_of(number), BLOCKS)
            disk = os.statvfs(root)
            assert disk.f_bavail * disk.f_frsize >= (32 << 20) - 2 * SEGMENT_BYTES
        assert engine.store.metrics.total()["evicted_bytes"] > 0
        assert engine.load(tokens_of(29), TARGET)[0] == 5
        engine.close()
    shutil.rmtree(f"{root}-index")


# --- tenants ---

TENANTS = {
    "tenants": [
        {"name": "red", "cache_salts": ["red-*"], "quota_bytes": 4 * SEGMENT_BYTES},
        {"name": "blue", "cache_salts": ["blue"]},
    ]
}


def save_for(engine: Engine, tenant: str, number: int, wait_s: float = 20.0) -> SavePlan | None:
    """Saves five chunks of this tenant, as soon as it has a set; or does not, when it gets none in that time."""
    engine.store.expect(tenant)
    side = engine.store._keeper.allocators.of(tenant, time.time())
    deadline = time.monotonic() + wait_s
    while side.wants_set() and time.monotonic() < deadline:
        time.sleep(0.01)
    engine.prefill(tokens_of(number), BLOCKS)
    keys = engine.keys(tokens_of(number))
    wanted = [WantedChunk(key, SPACE, tuple(BLOCKS[i * 4 : i * 4 + 4]), tenant) for i, key in enumerate(keys)]
    plan = engine.store.plan_save(wanted)
    if plan is not None:
        engine.run_save(plan)
    return plan


def test_a_set_holds_chunks_of_one_tenant_and_a_rebuild_knows_whose(tmp_path: Path) -> None:
    engine = tiny(tmp_path, sets=20, capacity=TENANTS)
    for number, tenant in enumerate(["", "red", "blue", "red", ""]):
        plan = save_for(engine, tenant, number)
        assert plan is not None and {chunk.tenant for chunk in plan.chunks} == {tenant}
    index = engine.store._keeper._index

    def whose() -> dict[str, set[int]]:
        found: dict[str, set[int]] = {}
        for info in index.sets():
            if index.members(info.set_id):
                found.setdefault(info.tenant, set()).add(info.set_id)
        return found

    before = whose()
    assert set(before) == {"", "red", "blue"}
    for number, tenant in enumerate(["", "red", "blue"]):
        assert Evictor(index, tmp_path, "x").sets_of(engine.keys(tokens_of(number))) <= before[tenant]
    engine.close()
    index = LmdbIndex(str(tmp_path / "v2" / "index"))
    index.clear()
    Sweeper(index, tmp_path / "v2", "me").rebuild()
    assert whose() == before
    index.close()


def test_a_tenant_whose_sets_may_not_go_is_not_saved_and_that_is_counted(tmp_path: Path) -> None:
    engine = tiny(tmp_path, sets=20, capacity=TENANTS)
    for number in range(6):  # other engines' sets, which are still filled
        one = {"tenant": "red", "namespace": engine.namespace.id, "n_bytes": 2 << 20, "is_open": True, "owner": "other"}
        put(engine.store._keeper._index, 900 + number, **one)
    engine.store._keeper._index.acquire_lease("writer/other", "other", time.time(), 1000.0)
    assert save_for(engine, "red", 1, wait_s=0.5) is None
    wait_until(lambda: engine.store._keeper.allocators.of("red", time.time()).backoff.is_resting(time.time()))
    assert save_for(engine, "red", 1, wait_s=0.5) is None
    assert engine.store.metrics.total()["skipped_chunks_quota"] > 0
    assert save_for(engine, "blue", 2) is not None, "others are saved all the same"


def test_a_tenant_that_is_idle_holds_no_open_set(tmp_path: Path) -> None:
    engine = tiny(tmp_path, sets=20, capacity=TENANTS)
    save_for(engine, "blue", 1)
    index, keeper = engine.store._keeper._index, engine.store._keeper
    assert any(info.is_open and info.tenant == "blue" for info in index.sets())
    for side in keeper.allocators.all():
        if side.tenant:
            side.used_s -= TENANT_IDLE_S
    wait_until(lambda: not any(info.is_open and info.tenant == "blue" for info in index.sets()))
    assert any(info.is_open and info.tenant == "" for info in index.sets())
    assert [info.n_bytes for info in index.sets() if info.tenant == "blue"] == [4096 + 5 * RECORD_BYTES]
    assert engine.load(tokens_of(1), TARGET)[0] == 5
    assert save_for(engine, "blue", 2) is not None, "and comes back"
