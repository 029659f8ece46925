"""Crash images: prefixes of what a save and an eviction write, what of them a power loss may leave, and that beside an
index which was kept elsewhere. `make soak` looks at all of them, many times."""

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.crash.image_checks import Found, Saved, check_image
from tests.crash.images import INDEX, Choose, Image, Kind, Losing, Step, newest, read_record
from tests.support.ends import quiet as quiet  # a fixture

HERE = Path(__file__).parent
SEED = 20261122
NAMES_BEHIND_MAX = 12  # steps by which the names on the disk may be behind the bytes
PASSING = ("v2/.write-test-", "v2/.direct-io-probe-", "mark-")
pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler for what records the writes")


class Recorded(NamedTuple):
    steps: list[Step]
    saved: Saved


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    root, record, library = folder / "root", folder / "record", folder / "record_writes.so"
    root.mkdir()
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, HERE / "record_writes.c", "-ldl"], check=True)
    told = {"LD_PRELOAD": str(library), "RECORD_WRITES": str(record), "RECORD_WRITES_BELOW": str(root)}
    command = [sys.executable, "-m", "tests.crash.record_writes", str(root)]
    done = subprocess.run(command, env=os.environ | told, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    steps = read_record(record)
    return Recorded(steps, Saved(steps, folder / "scratch"))


def is_index(path: str) -> bool:
    return path == str(INDEX) or path.startswith(f"{INDEX}/")


def put_index(image: Image, root: Path) -> None:
    (root / INDEX.parent).mkdir(exist_ok=True)
    image.put(root, newest, is_index)
    (root / INDEX / "lock.mdb").unlink(missing_ok=True)  # it is written as a map of memory, which is not recorded


def checked(root: Path, image: Image, choose: Choose, index: Image | None, saved: Saved) -> Found:
    """Makes the image at `root`, with that index or none, checks it and removes it."""
    root.mkdir()
    image.put(root, choose, lambda path: not is_index(path))
    if index is not None:
        put_index(index, root)
    found = check_image(root, saved)
    shutil.rmtree(root)
    return found


def telling(steps: list[Step], index_every: int) -> list[int]:
    """Prefixes (their lengths): those that end with a change of segments or the files beside them, and some of those
    that end with one of the index. What passes and is the same at each start counts once."""
    first_start = next(number for number, step in enumerate(steps) if step.path.startswith("mark-"))

    def tells(number: int, step: Step) -> bool:
        if step.kind is Kind.SYNC:
            return False
        if step.is_of_the_index:
            return number % index_every == 0
        return number < first_start or not step.path.startswith(PASSING)

    return [number + 1 for number, step in enumerate(steps) if tells(number, step)]


def claimed(recorded: Recorded, n_steps: int) -> set[bytes]:
    """Chunks that were told to be saved by then, and whose sets nobody had begun to evict."""
    done = {step.path for step in recorded.steps[:n_steps] if step.kind is Kind.MKDIR}
    marks = [number for number, step in enumerate(recorded.steps) if step.path.startswith("mark-")]
    keys = set()
    for number, prompt in enumerate(recorded.saved.prompts):
        name = f"{recorded.saved.set_of(prompt[0]):016x}"
        gone = [at for at, step in enumerate(recorded.steps) if step.kind is Kind.UNLINK and name in step.path]
        evicted_after = max((at for at in marks if gone and at < gone[0]), default=len(recorded.steps))
        if f"mark-saved-{number}" in done and n_steps <= evicted_after:
            keys.update(prompt)
    return keys


def check_killed(recorded: Recorded, folder: Path, n_steps: int, rng: random.Random) -> Found:
    """The process was killed after a step, or within the write that is the last of them."""
    steps, part_bytes = recorded.steps[:n_steps], 0
    if steps[-1].kind is Kind.WRITE and not steps[-1].is_of_the_index and rng.random() < 0.5:
        part_bytes = rng.randrange(1, len(steps[-1].data) + 1)
    image = Image.of_killed(steps, part_bytes)
    found = checked(folder / f"killed-{n_steps}", image, newest, image, recorded.saved)
    assert (found.lost, found.bad) == (frozenset(), 0), "visible => complete (I1)"
    assert claimed(recorded, n_steps) <= found.loaded, "it was told to be saved"
    return found


def check_power_loss(recorded: Recorded, folder: Path, n_steps: int, rng: random.Random, with_index: bool) -> Found:
    """with_index: of that moment or a later one, as Redis would have it."""
    image = Image.of_power_loss(recorded.steps[:n_steps], n_steps - rng.randrange(NAMES_BEHIND_MAX))
    choose = Losing(rng, rng.choice([0.0, 0.5, 0.9, 0.99]))
    kept = Image.of_killed(recorded.steps[: rng.randrange(n_steps, len(recorded.steps) + 1)]) if with_index else None
    return checked(folder / f"power-{n_steps}", image, choose, kept, recorded.saved)


def test_the_record_is_complete(recorded: Recorded, tmp_path: Path) -> None:
    """All that was done gives the root as it is, byte for byte: nothing passes by the recorder."""
    root = next(tmp_path.parent.glob("recorded*/root"))
    Image.of_killed(recorded.steps).put(tmp_path, newest)
    paths = sorted(path.relative_to(root) for path in root.rglob("*") if path.name != "lock.mdb")
    assert paths == sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.name != "lock.mdb")
    for path in paths:
        if (root / path).is_file():
            assert (root / path).read_bytes() == (tmp_path / path).read_bytes(), path
    kinds = {step.kind for step in recorded.steps if not step.is_of_the_index}
    assert kinds >= {Kind.CREATE, Kind.WRITE, Kind.SIZE, Kind.ALLOCATE, Kind.SYNC, Kind.LINK, Kind.UNLINK}
    synced = {step.path for step in recorded.steps if step.kind is Kind.SYNC}
    assert not any(path.endswith(".kvseg") for path in synced), "docs/file-format.md says that segments are not synced"


def test_killed_after_each_step(recorded: Recorded, tmp_path: Path) -> None:
    rng = random.Random(SEED)
    found = [check_killed(recorded, tmp_path, n, rng) for n in telling(recorded.steps, 16)]
    assert len(found) > 60
    assert max(len(one.loaded) for one in found) >= 6, "next to nothing was there; the test proves nothing"


@pytest.mark.parametrize("with_index", [False, True], ids=["rebuilt", "kept"])
def test_power_is_lost(recorded: Recorded, tmp_path: Path, with_index: bool) -> None:
    rng, found = random.Random(SEED), list[Found]()
    lengths = telling(recorded.steps, 100)
    # The record's steps are those of threads, in an order of their own each time: of some records more has to be seen.
    for n in rng.sample(lengths, len(lengths)):
        found.append(check_power_loss(recorded, tmp_path, n, rng, with_index))
        loaded, lost = sum(len(one.loaded) for one in found), sum(len(one.lost) for one in found)
        if len(found) >= 45 and min(loaded, lost) >= 10 and sum(one.bad for one in found) >= 20:
            break
    else:
        pytest.fail(f"{loaded} chunks were there and {lost} lost in {len(found)} images; the test proves nothing")


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_all_images(recorded: Recorded, tmp_path: Path, seed: int) -> None:
    """Every prefix, in three ways."""
    rng = random.Random(seed)
    for n_steps in range(1, len(recorded.steps) + 1):
        check_killed(recorded, tmp_path, n_steps, rng)
        for with_index in (False, True):
            check_power_loss(recorded, tmp_path, n_steps, rng, with_index)
