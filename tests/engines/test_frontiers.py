"""How much of a request with a LoRA adapter may be saved: what surely was computed with the weights of its key."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from kvtier.connectors.vllm.lora import Adapters
from kvtier.connectors.vllm.save_progress import FrontierDelay, Frontiers

from .adapter_files import lora, write

FILE = "adapter_config.json"


class Asked:
    """A request of 300 tokens for an adapter in a folder, followed by Frontiers with two steps in flight."""

    def __init__(self, folder: Path | None, drafts: int = 0) -> None:
        asked_for = None
        adapters = Adapters()
        if folder is not None:
            asked_for = lora(write(folder, 1.0))
            assert adapters.fingerprint(asked_for) is not None
        self.request: Any = SimpleNamespace(
            request_id="r",
            lora_request=asked_for,
            num_tokens=300,
            num_prompt_tokens=300,
            num_computed_tokens=0,
            num_output_tokens=0,
        )
        self.frontiers = Frontiers(True, FrontierDelay(drafts, 2), adapters)
        self.frontiers.track(self.request)

    def steps(self, first: int, n: int, computed: int = 0) -> list[int]:
        """What may be saved after each of n steps of 50 tokens."""
        frontiers, request = self.frontiers, self.request
        planned = [frontiers.of_step(request, computed + 50 * number, 50, first + number) for number in range(n)]
        return planned if frontiers.is_of_its_key(request) else [0] * n

    def end(self, computed: int, outputs: int) -> int:
        self.request.num_computed_tokens, self.request.num_output_tokens = computed, outputs
        return self.frontiers.of_end(self.request, computed)


def test_without_an_adapter_a_step_counts_at_once() -> None:
    asked = Asked(None)
    assert asked.steps(7, 3) == [50, 100, 150]
    assert asked.end(150, 0) == 150


def test_with_one_a_step_counts_when_it_was_carried_out(tmp_path: Path) -> None:
    assert Asked(tmp_path).steps(7, 5) == [0, 0, 50, 100, 150]
    assert Asked(tmp_path, drafts=1).steps(7, 5) == [0, 0, 0, 50, 100]


def test_steps_without_the_request_count_as_well(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    assert asked.steps(3, 1) == [0]
    assert asked.steps(9, 1, computed=50) == [50]


def test_other_blocks_hold_nothing_of_the_steps_before(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    assert asked.steps(0, 4) == [0, 0, 50, 100]
    asked.frontiers.anew(asked.request)
    assert asked.steps(4, 3) == [0, 0, 50]


@pytest.mark.parametrize(("outputs", "frontier"), [(1, 200), (0, 100)], ids=["answer", "abort"])
def test_an_answer_alone_tells_that_its_steps_were_carried_out(tmp_path: Path, outputs: int, frontier: int) -> None:
    asked = Asked(tmp_path)
    asked.steps(0, 4)
    assert asked.end(200, outputs) == frontier


def test_an_answer_from_before_a_preemption_does_not(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.steps(0, 6)
    asked.request.num_output_tokens = 3
    asked.frontiers.anew(asked.request)
    asked.steps(6, 3)
    assert asked.end(150, outputs=3) == 50


@pytest.mark.parametrize("change", ["write", "remove"])
def test_files_that_changed_end_it(tmp_path: Path, change: str) -> None:
    asked = Asked(tmp_path)
    assert asked.steps(0, 3)[-1] == 50 and asked.frontiers.is_of_its_key(asked.request)
    if change == "write":
        (tmp_path / FILE).write_text("{ }")
    else:
        (tmp_path / FILE).unlink()
    assert asked.steps(3, 2, computed=150) == [0, 0]
    assert not asked.frontiers.is_of_its_key(asked.request)
    assert asked.end(250, outputs=1) == 0


def test_a_change_is_seen_at_the_end_too(tmp_path: Path) -> None:
    asked = Asked(tmp_path)
    asked.steps(0, 1)
    (tmp_path / FILE).write_text("{ }")
    assert asked.end(50, outputs=1) == 0
