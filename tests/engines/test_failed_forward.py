"""ForwardWatch that do not end: nothing of what they leave in the engine's blocks may be saved.

Real engines in which one raises are in test_real_engine.py and test_shared_root.py.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

pytest.importorskip("vllm")

from kvtier.connectors.vllm.worker import ForwardWatch


@contextmanager
def as_vllm_does(forwards: ForwardWatch, number: int) -> Iterator[None]:
    """KVConnectorModelRunnerMixin: a generator, and `wait_for_save` in its finally."""
    forwards.begins(number)
    try:
        yield
    finally:
        forwards.ends()
        forwards.ends()


def test_forwards_that_end_are_trusted_also_in_a_handler_of_something_else() -> None:
    forwards = ForwardWatch()
    for number in (7, 8):
        with as_vllm_does(forwards, number):
            pass
    try:
        raise ValueError("of the caller")
    except ValueError:
        with as_vllm_does(forwards, 9), suppress(KeyError):
            raise KeyError("within the forward, and handled there") from None
    with as_vllm_does(forwards, 10):
        pass
    assert not forwards.has_failed


@pytest.mark.parametrize("fault", [MemoryError("out of it"), SystemExit(), KeyboardInterrupt()], ids=repr)
def test_one_that_raises_is_known_where_it_ends_and_later(
    fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    forwards = ForwardWatch()
    with caplog.at_level(logging.ERROR, "kvtier"), pytest.raises(type(fault)), as_vllm_does(forwards, 1):
        raise fault
    assert forwards.has_failed and repr(fault) in caplog.text
    with as_vllm_does(forwards, 2):
        pass
    assert forwards.has_failed and caplog.text.count("no more KV is saved") == 1


def test_one_that_never_ended_is_known_before_the_next_step() -> None:
    forwards = ForwardWatch()
    forwards.begins(1)
    forwards.begins(2)
    assert forwards.has_failed


def test_a_step_that_never_came_is_missed() -> None:
    forwards = ForwardWatch()
    with as_vllm_does(forwards, 1):
        pass
    forwards.begins(3)
    assert forwards.has_failed
