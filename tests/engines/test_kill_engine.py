"""SIGKILL of real vLLM at three moments while it saves: what the next engine is offered is right (I1, I2)."""

import json
import random
import time
from pathlib import Path
from typing import Any

from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.memory import MemoryIndex
from kvtier.maintenance.scrub import verify
from kvtier.storage.root import find_root
from tests.engines import forked
from tests.engines.conftest import ENGINE_TIMEOUT_S, HERE
from tests.engines.test_real_engine import KV_NOISE

KILLS = 3
SEED = 20261120


def killed_while_saving(lab: Any, root: Path, number: int, delay_s: float) -> None:
    """Starts an engine that prefills and saves without end, and kills it `delay_s` after its first segment shows."""
    before = {path: path.stat().st_mtime_ns for path in root.glob("v2/*/*.kvseg")}
    spec = {"model": str(lab.model("llama")), "root": str(root), "scenarios": [["endless", number]]}
    spec_path = lab.folder / f"killed-{number}.spec"
    spec_path.write_text(json.dumps(spec))
    log = spec_path.with_suffix(".log")
    engine = forked.start([str(HERE / "engine.py"), str(spec_path), str(spec_path.with_suffix(".json"))], log, log)
    deadline = time.monotonic() + ENGINE_TIMEOUT_S
    while {path: path.stat().st_mtime_ns for path in root.glob("v2/*/*.kvseg")} == before:
        assert engine.poll() is None and time.monotonic() < deadline, log.read_text()[-3000:]
        time.sleep(0.02)
    time.sleep(delay_s)
    engine.kill()


def test_killed_engines_leave_nothing_wrong(lab: Any) -> None:
    root = lab.folder / "killed-root"
    rng = random.Random(SEED)
    for number in range(KILLS):
        killed_while_saving(lab, root, number, rng.uniform(0.05, 1.5))
        found = find_root(root)
        index = LmdbIndex(str(found.index_path)) if found.index_path else MemoryIndex()
        report = verify(found, index)
        index.close()
        assert report.bad == ()
    spec = {"root": str(root), "scenarios": [["after_kills", KILLS]]}
    (result,) = lab.run("after-kills", [spec])
    answers = result["after_kills"]
    assert all(answers["same_tokens"]) and answers["kv_diff"] < KV_NOISE
    assert sum(answers["cached"]) > 0, "nothing was reloaded; the test proves nothing"
    saved, loaded = result["saved"], result["loaded"]
    assert loaded and all(digests == saved.get(key, digests) for key, digests in loaded.items())
    assert result["counters"].get("checksum_failures", 0) == 0
