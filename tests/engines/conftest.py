"""Models made on the fly, and engines run once a session: their results are shared by all tests and xdist workers."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.engines import forked

HERE = Path(__file__).parent
OLDER_PYTHON = Path(os.environ.get("ENGINE_027_PYTHON", HERE.parents[1] / ".venv-027" / "bin" / "python"))
"""Interpreter of the environment with vLLM 0.27.1, made by `make`."""
ENGINE_TIMEOUT_S = 1200  # on a machine that runs more than it can; seconds


class Lab:
    """A folder of the session in which models are made and engines run, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def model(self, kind: str) -> Path:
        """Folder of a small model with random weights: a kind of models.py."""
        folder = self.folder / kind
        with FileLock(self.folder / f"model-{kind}.lock"):
            if not (folder / "config.json").exists():
                log = self.folder / f"model-{kind}.log"
                made = forked.start([str(HERE / "models.py"), kind, str(folder)], log, log)
                assert made.wait(ENGINE_TIMEOUT_S) == 0, log.read_text()
        return folder

    def shards(self, kind: str, ranks: int) -> Path:
        """Folder of shards of a model, for so many ranks."""
        folder = self.folder / f"{kind}-shards-{ranks}"
        with FileLock(self.folder / f"shards-{kind}.lock"):
            if not folder.exists():
                log = self.folder / f"shards-{kind}.log"
                made = forked.start([str(HERE / "shards.py"), str(self.model(kind)), str(ranks), str(folder)], log, log)
                assert made.wait(ENGINE_TIMEOUT_S) == 0, log.read_text()
        return folder

    def run(self, name: str, specs: Sequence[dict[str, Any]], python: Path | str = sys.executable) -> list[Any]:
        """Results of one engine for each spec, all started together; from an earlier call if there was one."""
        with FileLock(self.folder / f"{name}.lock"):
            outputs = [self.folder / f"{name}-{number}.json" for number in range(len(specs))]
            if not all(output.exists() for output in outputs):
                with ThreadPoolExecutor(len(specs)) as pool:
                    jobs = [
                        pool.submit(self._run, output, spec, python)
                        for output, spec in zip(outputs, specs, strict=True)
                    ]
                    for job in jobs:
                        job.result()
            return [json.loads(output.read_text()) for output in outputs]

    def start(self, output: Path, spec: dict[str, Any], python: Path | str) -> tuple[int, str]:
        """Runs one engine to its end, with vLLM's second model runner if its spec says `second_runner`. Its status, and
        what it printed."""
        spec = {"model": str(self.model(spec.get("kind", "llama"))), "root": str(self.folder / "root")} | spec
        spec_path = output.with_suffix(".spec")
        spec_path.write_text(json.dumps(spec))
        log = output.with_suffix(".log")
        argv = [str(HERE / "engine.py"), str(spec_path), str(output)]
        engine = forked.start(argv, log, log, python=python, second_runner=spec.get("second_runner", False))
        try:
            return engine.wait(ENGINE_TIMEOUT_S), log.read_text()
        except TimeoutError:
            engine.kill()
            raise

    def _run(self, output: Path, spec: dict[str, Any], python: Path | str) -> None:
        status, log = self.start(output, spec, python)
        assert status == 0, f"{output.name}:\n{log[-10000:]}"


@pytest.fixture(scope="session", autouse=True)
def models_are_inspected_here() -> Iterator[None]:
    """vLLM imports itself in a process of its own for each class of models that its cache does not know."""
    registry = pytest.importorskip("vllm.model_executor.models.registry")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", lambda inspect: inspect())
        yield


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "engines"
    shared.mkdir(exist_ok=True)
    return Lab(shared)


@pytest.fixture(scope="session")
def older_python() -> Path:
    if not OLDER_PYTHON.exists():
        pytest.skip(f"no environment with vLLM 0.27.1 at {OLDER_PYTHON}")
    return OLDER_PYTHON
