"""Lookups within steps: one question each, an answer for as long as somebody holds the key."""

from collections.abc import Sequence

from kvtier.connectors.vllm_tiering.lookups import StepLookups
from tests.manual_jobs import ManualJobs


class Index:
    """What is there, what was asked, and a clock."""

    def __init__(self, queued_max: int = 8) -> None:
        self.there = {b"a", b"b"}
        self.asked: list[list[bytes]] = []
        self.now_s = 0.0
        self.jobs = ManualJobs(queued_max)
        self.lookups = StepLookups(self.exists, self.jobs, 5.0, lambda: self.now_s)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked.append(list(keys))
        return [key in self.there for key in keys]

    def ask(self, keys: str, request: str = "r") -> list[bool | None]:
        return [self.lookups.ask(key.encode(), request) for key in keys]


def test_one_question_a_step_and_the_answer_in_a_later_one() -> None:
    index = Index()
    assert index.ask("ax") == [None, None] and index.ask("ab", "other") == [None, None]
    assert index.jobs.pending() == 0
    index.lookups.end_step()
    assert index.ask("axb") == [None, None, None]
    index.jobs.run()
    assert index.ask("axb") == [None, None, None], "within a step answers do not change"
    index.lookups.end_step()
    assert index.ask("axb") == [True, False, True]
    assert index.asked == [[b"a", b"x", b"b"]] and index.jobs.pending() == 0


def test_what_was_marked_missing_stays_so_while_a_request_holds_it() -> None:
    index = Index()
    index.ask("ab")
    index.lookups.end_step()
    index.lookups.mark_missing([b"a", b"z"])
    index.jobs.run()
    index.ask("a", "other")
    index.lookups.end_step()
    assert index.ask("ab") == [False, True], "an answer that comes later changes nothing"
    index.lookups.forget("r")
    assert index.ask("a", "other") == [False]
    index.lookups.forget("other")
    index.lookups.forget("never seen")
    assert index.ask("ab") == [None, None], "nobody held them: they are asked again"
    index.lookups.end_step()
    index.jobs.run()
    index.lookups.end_step()
    assert index.ask("ab") == [True, True] and index.asked == [[b"a", b"b"]] * 2


def test_what_nobody_wants_any_more_is_not_asked_and_its_answer_is_dropped() -> None:
    index = Index()
    index.ask("ab")
    index.lookups.forget("r")
    index.lookups.end_step()
    assert index.jobs.pending() == 0
    index.ask("a")
    index.lookups.end_step()
    index.lookups.forget("r")
    index.jobs.run()
    assert index.ask("x") == [None] and index.lookups._questions.keys() == {b"x"}


def test_a_key_without_an_answer_in_time_is_a_miss() -> None:
    index = Index()
    index.ask("a")
    index.lookups.end_step()
    index.now_s = 5.0
    assert index.ask("a") == [None]
    index.now_s = 5.1
    assert index.ask("a") == [False]
    index.jobs.run()
    index.lookups.end_step()
    assert index.ask("a") == [False]


def test_what_finds_no_room_in_the_queue_is_asked_in_a_later_step() -> None:
    index = Index(queued_max=1)
    index.ask("a")
    index.lookups.end_step()
    index.ask("bx")
    index.lookups.end_step()
    assert index.ask("abx") == [None, None, None], "no answer of the index"
    index.jobs.run()
    index.lookups.end_step()
    index.jobs.run()
    assert index.ask("abx") == [True, True, False] and index.asked == [[b"a"], [b"b", b"x"]]


def test_all_missing() -> None:
    index = Index()
    index.ask("ab")
    index.lookups.end_step()
    index.lookups.mark_all_missing()
    index.jobs.run()
    index.lookups.end_step()
    assert index.ask("ab") == [False, False]
