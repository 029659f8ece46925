"""What the chaos test judges by: damage that is known, and growth."""

import gc
import os
from pathlib import Path

from tests.engines.disk import FLAGS, disk
from tests.engines.flat import CONTROL, DESCRIPTORS, LOOKS_MIN, MEMORY_MIB, Look, Watch, grown, look
from tests.engines.published import Damage


def test_what_is_left_of_a_prompt_ends_where_the_damage_begins() -> None:
    chunks = [[(1, 0, 5)], [(1, 0, 6), (2, 0, 0)], [(3, 0, 1)]]
    damage = Damage()
    assert damage.left_of(chunks) == 3
    damage.add(Damage(segments={(3, 0)}))
    assert damage.left_of(chunks) == 2
    damage.add(Damage(slots={(2, 0, 0)}))
    assert damage.left_of(chunks) == 1
    assert damage.left_of([]) == 0


def test_growth_is_seen_and_a_warm_up_is_none() -> None:
    def figures(last_mib: float, last_others: int, control_mib: float | None = None) -> list[str]:
        watch = Watch()
        for name, last in (("engine", Look(last_mib, 90, last_others)), (CONTROL, Look(control_mib or 0.0, 0, 90))):
            if name != CONTROL or control_mib is not None:
                looks = watch._looks.setdefault(name, [])
                looks += [Look(10.0 * number, 1, 10) for number in range(LOOKS_MIN)]
                looks += [Look(200.0, 1, 20)] * LOOKS_MIN + [last] * LOOKS_MIN
        return grown(watch.figures())

    assert figures(200.0 + MEMORY_MIB, 20 + DESCRIPTORS) == []
    assert figures(201.0 + MEMORY_MIB, 20) == ["engine: memory_mib from 200 to 249"]
    assert figures(200.0, 21 + DESCRIPTORS) == ["engine: descriptors from 20 to 29"]
    assert figures(230.0 + MEMORY_MIB, 20, control_mib=230.0) == [], "the engine itself grows, without the tier"
    assert figures(231.0 + MEMORY_MIB, 20, control_mib=230.0) == ["engine: memory_mib from 200 to 279"]
    assert figures(249.0, 20, control_mib=150.0) == ["engine: memory_mib from 200 to 249"]


def test_a_process_is_looked_at(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()  # it would close what other tests of this process left open
    try:
        before = look(os.getpid())
        with (tmp_path / "0-0.kvseg").open("w"), (tmp_path / "x").open("w"):
            after = look(os.getpid())
    finally:
        gc.enable()
    assert after.segments == before.segments + 1 and after.others >= before.others + 1
    assert after.anon_mib > 1


def test_the_disk_does_what_it_is_told(tmp_path: Path) -> None:
    """As far as this machine permits it."""
    with disk(tmp_path, 4 << 20) as own:
        file = own.root / "file"
        file.write_bytes(b"as it is")
        assert (own.below / "file").read_bytes() == b"as it is"
        assert os.listdir(own.root) == ["file"]
        if own.n_bytes is not None:
            own.fill()
            assert _fault(lambda: (own.root / "more").write_bytes(bytes(8192))) == "No space left on device"
            own.free()
            (own.root / "more").write_bytes(bytes(8192))
        if own.flags is not None:
            for flag, fault in (("read-only", "Read-only file system"), ("reads fail", "Input/output error")):
                own.set(flag, True)
                harm = file.read_bytes if flag == "reads fail" else lambda: (own.root / "new").write_bytes(b"")
                assert _fault(harm) == fault
                own.set(flag, False)
            assert file.read_bytes() == b"as it is"
            own.set(FLAGS[0], True)  # what hangs goes on when the disk is taken away
    assert not os.path.ismount(tmp_path / "below") and not os.path.ismount(tmp_path / "mounted")


def _fault(harm: object) -> str:
    assert callable(harm)
    try:
        harm()
    except OSError as fault:
        return fault.strerror
    return ""
