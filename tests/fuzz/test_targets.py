"""Every parser under inputs that are nearly right: only the errors that it declares come out, in a time that is in
proportion, and what is taken is what it says. Inputs that once were a bug stand in `corpus/<target>` and are tried each
time. Others are made up: the same ones in each run, many more of other seeds under `make soak`."""

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from kvtier.errors import ConfigError, Corrupt
from tests.fuzz import configuration, documents, formats, inputs
from tests.support.ends import quiet as quiet  # a fixture

CORPUS = Path(__file__).parent / "corpus"
SEED = 20261123
CPU_S_MAX = 10.0  # for one input of at most a few hundred KiB
SOURCES = {formats: inputs.BYTES, documents: inputs.JSON, configuration: (*inputs.YAML, *inputs.JSON)}
TARGETS = {name: (module, changes) for module, changes in SOURCES.items() for name in module.SEEDS}
SLOW = {"settings_file": 40, "secret_file": 30, "notes": 80, "safetensors_header": 120}  # fewer inputs of these
USUAL = 250


def is_accepted(target: Callable[[bytes, Path], None], data: bytes, folder: Path) -> bool:
    """Return True if the target accepts the input. Raises what the target does not declare."""
    started_s = time.thread_time()
    try:
        target(data, folder)
    except (Corrupt, ConfigError):
        return False
    finally:
        assert time.thread_time() - started_s < CPU_S_MAX, "it takes too long"
    return True


def tried_many(name: str, n_inputs: int, seed: int, folder: Path) -> int:
    """Return the number of inputs that the target accepted."""
    module, changes = TARGETS[name]
    rng, target, taken = random.Random(seed), getattr(module, name), 0
    for _ in range(n_inputs):
        data = inputs.changed(rng, module.SEEDS[name], changes)
        try:
            taken += is_accepted(target, data, folder)
        except BaseException as fault:
            (folder / "input").write_bytes(data)
            fault.add_note(f"the input is {folder / 'input'}; when this is mended, put it into {CORPUS / name}")
            raise
    return taken


def corpus() -> Sequence[Path]:
    return sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_right_is_taken(name: str, tmp_path: Path) -> None:
    """Else the others would only show that everything is refused."""
    module, _ = TARGETS[name]
    assert any(is_accepted(getattr(module, name), data, tmp_path) for data in module.SEEDS[name])


@pytest.mark.parametrize("path", corpus(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_was_a_bug(path: Path, tmp_path: Path) -> None:
    module, _ = TARGETS[path.parent.name]
    is_accepted(getattr(module, path.parent.name), path.read_bytes(), tmp_path)


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_nearly_right(name: str, tmp_path: Path) -> None:
    tried_many(name, SLOW.get(name, USUAL), SEED, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", TARGETS)
def test_much_that_is_nearly_right(name: str, tmp_path: Path) -> None:
    for seed in range(50):
        tried_many(name, SLOW.get(name, USUAL), seed, tmp_path)
