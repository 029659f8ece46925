"""Real vLLM engines with settings of their own, one Redis and one folder: what any computes all reuse, bit for bit, and
a Redis that is killed, emptied or paused under load costs misses, never a request, a token or a stall."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.engines.fleet import (
    CONNECT_MS,
    REPLY_MS,
    START_TIMEOUT_S,
    Judge,
    Member,
    answered,
    fleet,
    hit_ratio,
    index_of,
    kvtier,
    settings_file,
    tier_ratio,
)
from tests.engines.fleet_prompts import CHUNK_TOKENS, whole_tokens
from tests.engines.test_real_engine import assert_loads_equal_saves
from tests.redis_server import Server, free_port, has_redis, standalone
from tests.waiting import wait_until

pytestmark = has_redis

POOL = list(range(24))
ARCHIVE = list(range(1000, 1009))
"""Asked for at the beginning and after each fault, never between: hits on it are of entries that came back."""
SECRET = "correct-horse"
FRESH = 1_000_000  # the load's new prompts: those of engine n begin at (n + 1) times this
RECOVERY_TIMEOUT_S = 240.0
LOOKUP_BOUND_S = (CONNECT_MS + REPLY_MS) / 1000
CALL_BOUND_S = 0.25  # of one call on the scheduler's thread: it waits for 2 ms, the rest is this machine's
QUIET_S = 0.5  # a machine that runs little else adds at most this to any wait
SHORT_WINDOW_S = 4.0
"""A fault lasts this long. A call that waits for its end takes as long; a shorter wait may be the busy machine's."""


class Window(NamedTuple):
    """What the load of all engines saw between two moments."""

    name: str
    began_s: float
    ended_s: float

    def of(self, engines: Sequence[Member]) -> list[dict[str, Any]]:
        """Requests that lay within."""
        found = [answer for engine in engines for answer in engine.requests()]
        return [answer for answer in found if self.began_s <= answer["began_s"] and answer["ended_s"] <= self.ended_s]


class Trial:
    """A load on all engines, and what is done to Redis meanwhile."""

    def __init__(
        self, engines: list[Member], judge: Judge, server: Server, window_s: float, back_s: float = 0.0
    ) -> None:
        """window_s, back_s: how long a fault lasts, and how long the load is watched after it."""
        self.engines, self.judge, self.server, self.window_s, self.back_s = engines, judge, server, window_s, back_s
        self.windows: list[Window] = []
        self.recovery_s: dict[str, float] = {}

    def begin_load(self) -> None:
        for place, engine in enumerate(self.engines):
            engine.ask("load", pool=POOL, fresh=FRESH * (place + 1))

    def stop_load(self) -> None:
        for engine in self.engines:
            engine.ask("stop")

    def watch(self, name: str, seconds: float, are_answered: bool = False) -> Window:
        """Lets the load go on for so long, and for two waves of each engine at least. are_answered: by the index."""
        began = time.monotonic()
        time.sleep(seconds)

        def count(engine: Member) -> int:
            found = [answer for answer in engine.requests() if answer["began_s"] >= began]
            return len(answered(found) if are_answered else found)

        wait_until(lambda: all(count(engine) >= 8 for engine in self.engines), name, RECOVERY_TIMEOUT_S)
        window = Window(name, began, time.monotonic())
        self.windows.append(window)
        return window

    def fault(self, name: str, harm: Callable[[], object], mend: Callable[[], object], costs_hits: bool = True) -> None:
        """Hits go when it begins, if at all, and come back after its end, by themselves."""
        print(f"--- {name}", flush=True)
        harm()
        away = self.watch(f"{name}: away", self.window_s, are_answered=not costs_hits)
        if not costs_hits:
            check_that_it_costs_no_hits(away.of(self.engines))
        mend()
        began = time.monotonic()
        wait_until(lambda: self.all_hit(began), f"hits after: {name}", RECOVERY_TIMEOUT_S)
        self.recovery_s[name] = time.monotonic() - began
        self.watch(f"{name}: back", self.back_s)
        self.judge.check(away.of(self.engines))
        ask_until_found(self.engines[len(self.recovery_s) % len(self.engines)], ARCHIVE, self.judge)

    def all_hit(self, since_s: float) -> bool:
        """Whether each engine's last requests of the pool were whole hits."""
        found = [answered(engine.requests()) for engine in self.engines]
        lately = [[a for a in each if a["number"] in POOL and a["began_s"] > since_s][-8:] for each in found]
        return all(len(answers) == 8 and hit_ratio(answers) == 1.0 for answers in lately)

    def table(self) -> str:
        lines = [f"{'':24} requests  not answered  hits  TTFT p50  p99  max   lookup max  call max  step max"]
        for window in self.windows:
            found = window.of(self.engines)
            ttft = sorted(answer["ttft_s"] for answer in found)
            pool = [answer for answer in found if answer["number"] in POOL]
            lookup, call = (max(a[name] for a in found) for name in ("lookup_s", "longest_call_s"))
            step = max(answer["longest_step_s"] for answer in found)
            n_missed = len(found) - len(answered(found))
            lines.append(
                f"{window.name:24} {len(found):8} {n_missed:13} {tier_ratio(pool):5.0%} "
                f"{statistics.median(ttft) * 1e3:9.0f} {ttft[int(len(ttft) * 0.99)] * 1e3:4.0f} "
                f"{ttft[-1] * 1e3:4.0f} {lookup * 1e3:12.0f} {call * 1e3:9.0f} {step * 1e3:9.0f} ms"
            )
        recovered = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.recovery_s.items())
        return "\n".join([*lines, f"hits are whole again after: {recovered}"])


def ask_until_found(engine: Member, numbers: Sequence[int], judge: Judge) -> None:
    """What this engine does not save when it must compute it is there. An index that got too little of a busy machine's
    time may get no calls for a second, and what was published waits as long."""
    deadline = time.monotonic() + RECOVERY_TIMEOUT_S
    while True:
        answers = engine.ask("ask", numbers=numbers, saves=False)
        judge.check(answers)
        if hit_ratio(answers) == 1.0:
            return
        assert time.monotonic() < deadline, f"{engine.name}: no hits"
        time.sleep(0.5)


def check_that_it_costs_no_hits(answers: Sequence[dict[str, Any]]) -> None:
    """What Redis was asked and answered is found; and nobody left it alone because it refuses to write."""
    pool = answered([answer for answer in answers if answer["number"] in POOL])
    told = ("number", "tier_tokens", "cached", "began_s", "lookup_s")
    # What is less than a chunk is not worth a load: an engine has the rest from a request beside, which may have asked
    # when Redis did not answer.
    missed = [
        {name: answer[name] for name in told}
        for answer in pool
        if whole_tokens(answer["number"]) - answer["cached"] >= CHUNK_TOKENS
    ]
    assert pool and not missed, missed
    pauses = {pause for answer in answers for pause in answer["pauses"]}
    assert all("imeout" in pause or "took too long" in pause for pause in pauses), pauses


def reuse_each_others(engines: list[Member], judge: Judge) -> None:
    """Each computes a part of the archive, then each finds all of it."""
    for engine in engines:
        engine.ask("wait_for_set")  # Each wave of `ask` empties vLLM's cache: what has no set by then is not saved.
    share = len(ARCHIVE) // len(engines) + 1
    asked = [e.send("ask", numbers=ARCHIVE[n * share : (n + 1) * share]) for n, e in enumerate(engines)]
    for engine, number in zip(engines, asked, strict=True):
        judge.check(engine.answer(number))
    for engine in engines:
        ask_until_found(engine, ARCHIVE, judge)


def check_all(trial: Trial, lookup_s: float, call_s: float) -> None:
    """Every request of the load, and every block that was loaded. lookup_s, call_s: the longest that may be."""
    requests = [answer for engine in trial.engines for answer in engine.requests()]
    trial.judge.check(requests)
    assert trial.judge.n_unsure < len(requests) / 10
    # A step passes before an answer is asked for again; steps themselves wait for nothing, as the next line says.
    assert max(answer["lookup_s"] - 2 * answer["longest_step_s"] for answer in requests) < lookup_s
    assert max(answer["longest_call_s"] for answer in requests) < call_s
    facts = [engine.ask("facts") for engine in trial.engines]
    assert_loads_equal_saves(facts)
    assert sum(found["counters"].get("checksum_failures", 0) for found in facts) == 0
    assert all(found["counters"].get("index_pauses", 0) for found in facts), "Redis was away, and nobody saw it"


def restart_empty(server: Server) -> None:
    """Looked at before it starts: the engines write to it as soon as it listens."""
    kept = [path.name for path in server.folder.iterdir() if path.name != "log"]
    assert not kept, "it would not begin empty"
    server.start()


def rebuild_by_command(config: Path, server: Server) -> None:
    """With nobody else there: the index is lost, and the command alone fills it."""
    server.cli("flushall")
    rebuilt = kvtier("index", "rebuild", "--config", str(config), "--json")
    assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr
    assert json.loads(rebuilt.stdout)["records"] > 100
    checked = kvtier("index", "check", "--config", str(config), "--json")
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_engines_share_what_they_compute_and_outlive_their_redis(lab: Any, tmp_path: Path) -> None:
    """In short: two engines; what they compute without the tier is what answers are held against."""
    with standalone(tmp_path / "redis") as server:
        with fleet(tmp_path / "fleet", lab.model("llama"), server.url, n_engines=2, has_alone=False) as engines:
            judge = Judge(engines[0])
            reuse_each_others(engines, judge)
            trial = Trial(engines, judge, server, window_s=SHORT_WINDOW_S)
            trial.begin_load()
            wait_until(lambda: trial.all_hit(0.0), "the pool", RECOVERY_TIMEOUT_S)
            trial.watch("before", 1.0)
            trial.fault("paused", server.pause, server.go_on)
            trial.fault("restarted empty", server.kill, lambda: restart_empty(server))
            trial.stop_load()
            print(trial.table())
            check_all(trial, SHORT_WINDOW_S, SHORT_WINDOW_S)
        assert engines[0].config is not None
        rebuild_by_command(engines[0].config, server)


@pytest.mark.soak
def test_three_engines_outlive_all_that_befalls_their_redis(lab: Any, tmp_path: Path) -> None:
    """Beside an engine without the tier."""
    with standalone(tmp_path / "redis") as server:
        with fleet(tmp_path / "fleet", lab.model("llama"), server.url, n_engines=3, has_alone=True) as members:
            *engines, alone = members
            judge = Judge(alone)
            reuse_each_others(engines, judge)
            trial = Trial(engines, judge, server, window_s=6.0, back_s=6.0)
            trial.begin_load()
            wait_until(lambda: trial.all_hit(0.0), "the pool", RECOVERY_TIMEOUT_S)
            trial.watch("before", 6.0)
            trial.fault("paused", server.pause, server.go_on)
            trial.fault("killed", server.kill, lambda: restart_empty(server))
            trial.fault("emptied", lambda: flush_often(server), lambda: None)
            trial.fault("paused, killed", lambda: pause_and_kill(server), lambda: restart_empty(server))
            trial.fault("full", lambda: memory(server, "1mb"), lambda: memory(server, "0"), costs_hits=False)
            trial.fault("writes forbidden", lambda: forbid(server), lambda: allow(server), costs_hits=False)
            trial.fault("emptied, rebuilt", lambda: server.cli("flushall"), lambda: rebuild_beside(engines[0]))
            trial.stop_load()
            print(trial.table())
            check_all(trial, LOOKUP_BOUND_S + QUIET_S, CALL_BOUND_S + QUIET_S)
            check_what_was_saved_meanwhile(trial)
        assert engines[0].config is not None
        rebuild_by_command(engines[0].config, server)
        again = Member(tmp_path / "fleet", "later", lab.model("llama"), engines[0].config, {})
        try:
            ask_until_found(again, ARCHIVE, judge)
        finally:
            again.end()


def flush_often(server: Server) -> None:
    for _ in range(3):
        server.cli("flushall")
        time.sleep(0.7)
    server.cli("flushall")


def pause_and_kill(server: Server) -> None:
    server.pause()
    time.sleep(2.0)
    server.kill()


def memory(server: Server, limit: str) -> None:
    server.cli("config", "set", "maxmemory", limit)


def forbid(server: Server) -> None:
    server.cli("acl", "setuser", "default", "-@write")


def allow(server: Server) -> None:
    server.cli("acl", "setuser", "default", "+@all")


def rebuild_beside(engine: Member) -> None:
    """The command and the engines' own rebuild: whoever comes first, the other waits for it."""
    rebuilt = kvtier("index", "rebuild", "--config", str(engine.config), "--json")
    assert rebuilt.returncode == 0, rebuilt.stdout + rebuilt.stderr


def check_what_was_saved_meanwhile(trial: Trial) -> None:
    """New prompts of all times of need, asked of an engine that did not compute them."""
    for place, engine in enumerate(trial.engines):
        seen = sorted({answer["number"] for answer in engine.requests()} - set(POOL))
        found = trial.engines[place - 1].ask("ask", numbers=seen[:: max(1, len(seen) // 60)])
        trial.judge.check(found)
        ratio = hit_ratio(answered(found))
        print(f"new prompts of {engine.name}: {ratio:.0%} of {len(seen)} are found by another engine")
        assert ratio > 0.8


class Refused(NamedTuple):
    """An engine that must not start. says: in its one message."""

    name: str
    index: dict[str, Any]
    says: str


@pytest.mark.soak
def test_engines_that_start_in_times_of_need(lab: Any, tmp_path: Path) -> None:
    """What waiting mends, an engine does not stop for; what it does not mend stops start-up with one message."""
    model, folder = lab.model("llama"), tmp_path / "fleet"
    folder.mkdir()
    late = free_port()
    with standalone(tmp_path / "redis", ["--requirepass", SECRET]) as server:
        for user, rights in (("reader", "+@read +@connection"), ("engine", "+@all")):
            server.cli(
                "--pass", SECRET, "--no-auth-warning", "acl", "setuser", user, "on", f">{SECRET}", "~*", *rights.split()
            )
        refused = [
            Refused("wrong", {"password": "not-" + SECRET}, "index.password = "),
            Refused("reader", {"username": "reader", "password": SECRET}, "index.username = 'reader'"),
        ]
        members = {each.name: member(folder, each.name, model, index_of(server.url, **each.index)) for each in refused}
        for name in ("red", "blue"):  # two deployments in one Redis
            own = {"username": "engine", "password": SECRET, "prefix": name}
            members[name] = member(folder, name, model, index_of(server.url, **own))
        members["early"] = member(folder, "early", model, index_of(f"redis://127.0.0.1:{late}/0"))
        try:
            for each in refused:
                members[each.name].process.wait(START_TIMEOUT_S)
                said = members[each.name].log()
                assert members[each.name].process.returncode != 0 and f"ConfigError: kvtier: {each.says}" in said, said
                assert SECRET not in said
            for name in ("red", "blue", "early"):
                members[name].answer(0, START_TIMEOUT_S)
            share_nothing(members["red"], members["blue"])
            begin_without_redis(members["early"], late, tmp_path)
        finally:
            for one in members.values():
                one.end()


def member(folder: Path, name: str, model: Path, index: dict[str, Any]) -> Member:
    config = settings_file(folder / f"{name}.yaml", folder / f"root-{name}", index, {})
    return Member(folder, name, model, config, {})


def share_nothing(red: Member, blue: Member) -> None:
    """Different folders, and different prefixes in one Redis."""
    judge = Judge(red)
    for engine in (red, blue):
        engine.ask("wait_for_set")
    apart = ARCHIVE[:3]  # at once, and with nothing in common: so no hits on what it has just saved itself
    judge.check(red.ask("ask", numbers=apart))
    answers = blue.ask("ask", numbers=apart)
    judge.check(answers)
    assert sum(answer["tier_tokens"] for answer in answers) == 0, "another deployment's"
    for engine in (red, blue):
        ask_until_found(engine, apart, judge)


def begin_without_redis(engine: Member, port: int, folder: Path) -> None:
    """It starts, computes, and saves from when Redis is there."""
    judge = Judge(engine)
    answers = engine.ask("ask", numbers=ARCHIVE)
    judge.check(answers)
    assert sum(answer["tier_tokens"] for answer in answers) == 0
    server = Server(folder / "late", port=port)
    try:
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        while hit_ratio(answers := engine.ask("ask", numbers=ARCHIVE)) < 1.0:
            assert time.monotonic() < deadline, "no hits"
            time.sleep(0.5)
        judge.check(answers)
    finally:
        server.kill()
