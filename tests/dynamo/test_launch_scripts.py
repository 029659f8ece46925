"""The launch scripts of configs/dynamo without Dynamo: what they start, with which arguments, and that they end it.

Started is a stand-in that writes down what it was called with. With Dynamo itself: `python -m tests.dynamo`.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "configs" / "dynamo"
TIMEOUT_S = 60
STAND_IN = """#!{python}
import json, os, sys, time
call = {{"argv": sys.argv[1:], "env": dict(os.environ), "pid": os.getpid()}}
path = os.path.join({folder!r}, f"{{os.getpid()}}.call")
with open(path + ".part", "w") as file:
    json.dump(call, file)
os.rename(path + ".part", path)
time.sleep(0.5 if "--end-soon" in sys.argv else 600)
"""


class Launched:
    """A script that runs, and the calls that it made."""

    def __init__(self, folder: Path, script: str, *arguments: str, **variables: str) -> None:
        self.folder = folder
        stand_in = folder / "stand-in"
        stand_in.write_text(STAND_IN.format(python=sys.executable, folder=str(folder)))
        stand_in.chmod(0o700)
        given = {"MODEL": "/models/llama", "KVTIER_ROOT": "/kv", "PYTHON": str(stand_in), "RUN": str(folder / "run")}
        self.process = subprocess.Popen(
            [str(SCRIPTS / script), *arguments],
            env=os.environ | given | variables,
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def calls(self, count: int) -> list[dict[str, Any]]:
        """So many, the frontend's first, then by number of the worker."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(found := list(self.folder.glob("*.call"))) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} came"
            assert self.process.poll() is None, self.process.stdout and self.process.stdout.read()
            time.sleep(0.05)
        return sorted(
            (json.loads(path.read_text()) for path in found), key=lambda call: call["env"].get("DYN_SYSTEM_PORT", "")
        )


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Any]:
    launched: list[Launched] = []

    def start(script: str, *arguments: str, **variables: str) -> Launched:
        launched.append(Launched(tmp_path, script, *arguments, **variables))
        return launched[-1]

    yield start
    for script in launched:
        if script.process.poll() is None:
            os.killpg(script.process.pid, signal.SIGKILL)
        script.process.wait()


def flag(call: dict[str, Any], name: str) -> Any:
    """The argument after this one, the last time that it stands there; read, if it is JSON."""
    argv = call["argv"]
    value = argv[len(argv) - argv[::-1].index(name)]
    return json.loads(value) if value.startswith("{") else value


def test_aggregated_serving_starts_a_frontend_and_workers_that_share_the_tier(launch: Any) -> None:
    frontend, *workers = launch("aggregated.sh", "--max-model-len", "4096", ROUTER="--router-temperature 0.5").calls(3)
    assert frontend["argv"][:2] == ["-m", "dynamo.frontend"]
    assert flag(frontend, "--router-mode") == "kv" and flag(frontend, "--router-temperature") == "0.5"
    for number, worker in enumerate(workers, 1):
        assert worker["argv"][:2] == ["-m", "dynamo.vllm"]
        assert flag(worker, "--kv-transfer-config") == {
            "kv_connector": "KVTierConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_module_path": "kvtier.connectors.vllm",
        }
        assert flag(worker, "--kv-events-config") == {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{20080 + number}",
        }
        assert worker["env"]["CUDA_VISIBLE_DEVICES"] == str(number - 1)
        assert worker["env"]["KVTIER_ROOT"] == "/kv"
        assert worker["argv"][-2:] == ["--max-model-len", "4096"]
    for call in (frontend, *workers):
        assert call["env"]["DYN_DISCOVERY_BACKEND"] == "file" and call["env"]["DYN_EVENT_PLANE"] == "zmq"
        assert call["env"]["DYN_FILE_KV"] == frontend["env"]["DYN_FILE_KV"]


def test_further_workers_need_no_frontend_of_their_own_and_have_their_own_ports_and_gpus(launch: Any) -> None:
    (worker,) = launch("aggregated.sh", WORKERS="1", FIRST="3", HTTP_PORT="0", GPUS="2").calls(1)
    assert worker["env"]["CUDA_VISIBLE_DEVICES"] == "4,5" and flag(worker, "--tensor-parallel-size") == "2"
    assert worker["env"]["DYN_SYSTEM_PORT"] == "19093"


def test_on_the_cpu_the_workers_run_the_file_for_it_in_blocks_that_it_takes(launch: Any) -> None:
    (worker,) = launch("aggregated.sh", WORKERS="1", HTTP_PORT="0", DEVICE="cpu").calls(1)
    assert worker["argv"][0] == str(SCRIPTS / "vllm_cpu.py") and Path(worker["argv"][0]).exists()
    assert flag(worker, "--block-size") == "32" and "CUDA_VISIBLE_DEVICES" not in set(worker["env"]) - set(os.environ)


def test_disaggregated_serving_has_kvtier_beside_nixl_where_prompts_are_prefilled(launch: Any) -> None:
    _, prefill, decode = launch("disaggregated.sh").calls(3)
    both, alone = flag(prefill, "--kv-transfer-config"), flag(decode, "--kv-transfer-config")
    assert flag(prefill, "--disaggregation-mode") == "prefill" and flag(decode, "--disaggregation-mode") == "decode"
    children = both["kv_connector_extra_config"]["connectors"]
    assert [child["kv_connector"] for child in children] == ["NixlConnector", "KVTierConnector"]
    assert both["kv_connector"] == "MultiConnector" and both["kv_load_failure_policy"] == "recompute"
    assert children[1]["kv_load_failure_policy"] == "recompute"
    assert alone == children[0]
    ports = [call["env"]["VLLM_NIXL_SIDE_CHANNEL_PORT"] for call in (prefill, decode)]
    assert len(set(ports)) == 2
    for call in (prefill, decode):  # NIXL refuses engines that differ in it
        assert "--disable-hybrid-kv-cache-manager" in call["argv"]


def test_an_interrupt_ends_all_that_was_started(launch: Any) -> None:
    launched = launch("aggregated.sh")
    calls = launched.calls(3)
    launched.process.send_signal(signal.SIGTERM)
    assert launched.process.wait(TIMEOUT_S) == 0
    for call in calls:
        assert not Path(f"/proc/{call['pid']}").exists()


def test_one_that_ends_by_itself_ends_all_with_status_1(launch: Any) -> None:
    launched = launch("aggregated.sh", "--end-soon")
    assert launched.process.wait(TIMEOUT_S) == 1
    assert "a process ended" in launched.process.stdout.read()


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"MODEL": ""}, "MODEL is the folder"),
        ({"KVTIER_ROOT": ""}, "set KVTIER_CONFIG or KVTIER_ROOT"),
        ({"DEVICE": "tpu"}, "DEVICE is gpu or cpu, not tpu"),
    ],
)
def test_what_is_missing_is_said(launch: Any, variables: dict[str, str], said: str) -> None:
    launched = launch("aggregated.sh", **variables)
    assert launched.process.wait(TIMEOUT_S) not in (0, None)
    assert said in launched.process.stdout.read()
