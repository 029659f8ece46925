"""The faults of chaos.py, each by its name."""

from collections.abc import Callable, Sequence

from tests.engines.chaos import ARCHIVE, POOL, Chaos, Harm
from tests.engines.disk import Disk
from tests.engines.fleet import Member
from tests.engines.published import Damage, Segment, Slot
from tests.waiting import wait_until

FLIPS = 24
FILES = 2


def _known(chaos: Chaos) -> list[Slot]:
    """Of prompts that are asked for again, so that damage to them is met."""
    chunks = chaos.published.chunks([*ARCHIVE, *POOL])
    return sorted({place for one in chunks.values() for places in one for place in places})


def _segments(chaos: Chaos) -> list[Segment]:
    """One of what is asked for again, and one of any."""
    known = chaos.rng.choice(_known(chaos))[:2]
    others = sorted({slot[:2] for slot in chaos.published.all()} - {known})
    return [known, *chaos.rng.sample(others, min(len(others), FILES - 1))]


def flip(chaos: Chaos) -> Damage:
    known, others = _known(chaos), chaos.published.all()
    slots = {*chaos.rng.sample(known, FLIPS // 2), *chaos.rng.sample(others, min(len(others), FLIPS // 2))}
    return chaos.published.flip(sorted(slots), chaos.rng)


def truncate(chaos: Chaos) -> Damage:
    return chaos.published.cut(_segments(chaos), chaos.rng)


def delete(chaos: Chaos) -> Damage:
    return chaos.published.remove(_segments(chaos))


def drop_deleted(chaos: Chaos) -> None:
    """Do what housekeeping does at the end of its grace time, which is longer than this test. Until then, a missing
    file on a file system that is not local may be away: its chunks are misses, and nobody saves them again."""
    chaos.published.drop_sets({set_id for set_id, _ in chaos.damage.segments})


def _flag(name: str, is_on: bool) -> Callable[[Chaos], None]:
    return lambda chaos: chaos.disk.set(name, is_on)


def kill_worker(chaos: Chaos) -> None:
    """The last one. What it was answering ends with it."""
    chaos.engines[-1].process.kill()


def start_worker(chaos: Chaos) -> None:
    """It finds what the others saved at once."""
    chaos.ended.append(chaos.engines.pop())
    engine = chaos.begin(len(chaos.ended))
    chaos.engines.append(engine)
    wait_until(lambda: _reloads(chaos, engine), "what it reloads", 60.0)  # an index that was late rests for a moment
    chaos.load(engine)


def _reloads(chaos: Chaos, engine: Member) -> bool:
    answers = engine.ask("ask", numbers=ARCHIVE, saves=False)
    chaos.judge.check(answers)
    return sum(answer["tier_tokens"] for answer in answers) > 0


def restart_redis(chaos: Chaos) -> None:
    chaos.server.start()  # it keeps nothing on disk


ON_FILES = (
    Harm("segments truncated", truncate),
    Harm("bits flipped", flip),
    Harm("segments deleted", delete, drop_deleted),
)
ON_REDIS = (
    Harm("Redis paused", lambda chaos: chaos.server.pause(), lambda chaos: chaos.server.go_on()),
    Harm("Redis killed, back empty", lambda chaos: chaos.server.kill(), restart_redis),
)
ON_WORKERS = (Harm("a worker killed", kill_worker, start_worker),)
THROUGH_FUSE = tuple(
    Harm(name, _flag(flag, True), _flag(flag, False))
    for name, flag in (
        ("reads hang", "reads hang"),
        ("every file operation hangs", "all hangs"),
        ("reads fail (EIO)", "reads fail"),
        ("the root read-only", "read-only"),
    )
)
FULL = Harm(
    "the disk full", lambda chaos: chaos.disk.fill(), lambda chaos: chaos.disk.free(), lambda chaos: chaos.disk.fill()
)


def possible(disk: Disk) -> tuple[list[Harm], list[str]]:
    """Those that can be tried on this disk, and the names of those that cannot."""
    can = {FULL: disk.n_bytes is not None} | dict.fromkeys(THROUGH_FUSE, disk.flags is not None)
    all_of_them: Sequence[Harm] = (*ON_FILES, *THROUGH_FUSE, FULL, *ON_REDIS, *ON_WORKERS)
    return [h for h in all_of_them if can.get(h, True)], [h.name for h in all_of_them if not can.get(h, True)]
