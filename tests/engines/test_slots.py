"""CONTRACT with vLLM's turboquant kernels: a token's KV of one head is one slot, and means the same wherever it lies.

The kernels of the installed releases write and read it, interpreted on the CPU (slots.py); kvtier's own gather and
scatter move it between.
"""

import json
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytest.importorskip("triton")

import vllm

from kvtier.connectors.vllm.kv_dtypes import SLOTS
from tests.engines import forked

HERE = Path(__file__).parent


def check(output: Path, release: str) -> None:
    found = json.loads(output.read_text())
    assert found.pop("release").split("+")[0] == release
    assert list(found) == list(SLOTS)
    for preset, facts in found.items():
        k_error, v_error = facts.pop("nmse")
        assert k_error < 0.04 and v_error < 0.04, f"{preset}: what is read is what was written, but for its own error"
        expected = {"bytes_equal": True, "untouched": True, "read_equal": True, "changed": [[5, 1]]}
        assert facts == expected, preset


def test_slots_of_this_release(tmp_path: Path) -> None:
    output, log = tmp_path / "out.json", tmp_path / "log"
    ended = forked.start([str(HERE / "slots.py"), str(output)], log, log, second_runner=True)  # it has Triton
    assert ended.wait(300) == 0, log.read_text()[-4000:]
    check(output, vllm.__version__.split("+")[0])


def test_slots_of_the_older_release(tmp_path: Path, older_python: Path) -> None:
    output = tmp_path / "out.json"
    command = [str(older_python), str(HERE / "slots.py"), str(output)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=HERE)
    assert ended.returncode == 0, ended.stderr[-4000:]
    check(output, "0.27.1")
