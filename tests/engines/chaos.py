"""Engines under load while one thing after another is done to their storage, their index and themselves."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.engines.disk import Disk
from tests.engines.flat import Watch
from tests.engines.fleet import Judge, Member, hit_ratio
from tests.engines.fleet_prompts import CHUNK_TOKENS, whole_tokens
from tests.engines.published import Chunks, Damage, Published
from tests.redis_server import Server
from tests.waiting import wait_until

POOL = list(range(16))
ARCHIVE = list(range(1000, 1008))  # asked for after each fault alone: what was published before it must be there
NEW = 2_000  # prompts that are asked for after each fault for the first time begin here: they must be saved
FRESH = 1_000_000
"""The load's new prompts: those of the n-th engine that was started begin at (n + 1) times this, up to nine."""
RECENT = 2
"""Of each engine's newest prompts of the load, so many must outlive the fault as well, where they were published."""
RECOVERY_TIMEOUT_S = 300.0
"""On a machine that runs more than it can. Who was killed may have held the sweep's lease: it lasts for a while, and an
index that was lost is not rebuilt before."""
WAVES_TIMEOUT_S = 600.0


class Harm(NamedTuple):
    """A fault: do() begins it and says what it took; undo() ends it. again() goes on while it lasts."""

    name: str
    do: Callable[[Chaos], Damage | None]
    undo: Callable[[Chaos], None] = lambda chaos: None
    again: Callable[[Chaos], None] = lambda chaos: None


@dataclass
class Tally:
    """What came of one kind of fault. kept: chunks that were published before it and not damaged by it; lost: those of
    them that were not there after it. met: loads and saves that failed meanwhile."""

    tried: int = 0
    requests: int = 0
    wrong: int = 0
    failed_requests: int = 0
    kept: int = 0
    lost: int = 0
    met: int = 0


MET = (
    "load_failures",
    "checksum_failures",
    "gone_chunks",
    "index_errors",
    "skipped_chunks_failed",
    "skipped_chunks_no_space",
    "skipped_chunks_resting",
)


@dataclass
class Chaos:
    """engines: those that run. begin: starts one in the place of another. ended: those that were killed."""

    engines: list[Member]
    begin: Callable[[int], Member]
    judge: Judge
    server: Server
    disk: Disk
    rng: random.Random
    pause_s: float
    watch: Watch = field(default_factory=Watch)
    ended: list[Member] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)
    damage: Damage = field(default_factory=Damage)
    """Since the beginning: what an engine has in memory it does not miss, so damage may be met late."""
    _judged: dict[str, int] = field(default_factory=dict)
    _news: Iterator[int] = field(default_factory=lambda: iter(range(NEW, FRESH)))

    @property
    def published(self) -> Published:
        config = self.engines[0].config
        assert config is not None
        return Published(config, self.disk.below)

    def fill(self) -> None:
        """All of the pool and of the archive is computed by one engine, and found by the others."""
        for numbers in (POOL, ARCHIVE):
            for engine in self.engines:
                self.judge.check(engine.ask("ask", numbers=numbers))
        wait_until(lambda: len(self.published.chunks(ARCHIVE)) == len(ARCHIVE), "the archive, whole")
        for engine in self.engines:
            self.load(engine)

    def load(self, engine: Member) -> None:
        place = len(self.ended) + self.engines.index(engine) + 1
        engine.ask("load", pool=POOL, fresh=FRESH * place, turns=True, pause_s=self.pause_s)

    def try_out(self, harm: Harm, seconds: float) -> None:
        """One fault under load, and what came of it."""
        before = self._worth_keeping()
        met = self._met()
        self.damage.add(harm.do(self) or Damage())
        self._let_go_on(harm, seconds)
        harm.undo(self)
        began = time.monotonic()
        wait_until(lambda: self._all_hit(began), f"hits after: {harm.name}", RECOVERY_TIMEOUT_S)
        hit_s = time.monotonic() - began
        tally = self.tallies.setdefault(harm.name, Tally())
        self._count_lost(before, tally)
        self._save_again()
        tally.tried += 1
        tally.met += max(0, self._met() - met)  # an engine that was killed takes its counters with it
        self._judge_all(harm.name, tally)
        for engine in {one.name: one for one in (*self.engines, self.judge.alone)}.values():
            self.watch.look(engine.name, engine.process.pid)
        whole_s = time.monotonic() - began
        print(f"{harm.name}: hits after {hit_s:.1f} s, all whole after {whole_s:.1f} s; {tally}", flush=True)

    def others(self) -> list[Member]:
        return self.engines[:-1]

    def _let_go_on(self, harm: Harm, seconds: float) -> None:
        """For so long, and for two waves of each engine at least: none waits for the fault's end."""
        engines = [engine for engine in self.engines if engine.process.poll() is None]
        before = [len(engine.requests()) for engine in engines]
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            harm.again(self)
            time.sleep(0.1)
        has_gone_on = lambda: all(len(e.requests()) >= n + 8 for e, n in zip(engines, before, strict=True))  # noqa: E731
        wait_until(has_gone_on, f"requests during: {harm.name}", WAVES_TIMEOUT_S)

    def _all_hit(self, since_s: float) -> bool:
        """Whether each engine's last requests of the pool were whole hits."""
        for engine in self.engines:
            assert engine.process.poll() is None, f"{engine.name} ended:\n{engine.log()[-6000:]}"
            lately = [a for a in engine.requests()[-24:] if a["number"] in POOL and a["began_s"] > since_s][-8:]
            if len(lately) < 8 or hit_ratio(lately) < 1.0:
                return False
        return True

    def _worth_keeping(self) -> dict[int, Chunks]:
        recent = [
            number
            for engine in self.engines
            for number in sorted({a["number"] for a in engine.requests()[-60:] if FRESH <= a["number"] < 10 * FRESH})
        ]
        found, deadline = self.published.chunks([*ARCHIVE, *recent]), time.monotonic() + RECOVERY_TIMEOUT_S
        # An engine retracts a bad record at its second look, which may come after all was saved again.
        while not all(number in found for number in ARCHIVE):
            assert time.monotonic() < deadline, "the archive is not whole"
            self._save_again()
            found = self.published.chunks([*ARCHIVE, *recent])
        kept = [number for number in recent if number in found][-RECENT * len(self.engines) :]
        before = {number: found[number] for number in [*ARCHIVE, *kept]}
        self.published.pin(before)  # a full disk has sets evicted: not these
        return before

    def _count_lost(self, before: Mapping[int, Chunks], tally: Tally) -> None:
        """Chunks missed of those that the fault left. An engine that got too little of a busy machine's time may leave
        the index alone for a second, and that a chunk is damaged is known when it was read once: so it may ask again.
        """
        engine = self.rng.choice(self.engines)
        wanted = {number: self.damage.left_of(chunks) for number, chunks in before.items()}
        tally.kept += sum(wanted.values())
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        while True:
            answers = engine.ask("ask", numbers=sorted(before), saves=False)
            self.judge.check(answers)
            missed = {a["number"]: wanted[a["number"]] - a["cached"] // CHUNK_TOKENS for a in answers}
            lost = sum(max(0, n) for n in missed.values())
            if lost == 0 or time.monotonic() > deadline:
                tally.lost += lost
                self.complaints += [f"lost: {missed} of {wanted}, asked {engine.name}"] * (lost > 0)
                self.complaints += [
                    trace
                    for number, n in missed.items()
                    if n > 0
                    for trace in self.published.traces(number, before[number])
                ]
                return
            time.sleep(0.5)

    def _save_again(self) -> None:
        """What was damaged is computed and saved again, and something new; another engine finds all of it."""
        numbers = [*ARCHIVE, next(self._news)]
        writer, reader = self.rng.sample(self.engines, 2)
        deadline = time.monotonic() + RECOVERY_TIMEOUT_S
        while True:
            self.judge.check(writer.ask("ask", numbers=numbers))
            answers = reader.ask("ask", numbers=numbers, saves=False)
            self.judge.check(answers)
            if hit_ratio(answers) == 1.0 and len(self.published.chunks(numbers)) == len(numbers):
                return
            missed = {a["number"]: whole_tokens(a["number"]) - a["cached"] for a in answers}
            assert time.monotonic() < deadline, f"what {writer.name} saves, {reader.name} does not find: {missed}"
            time.sleep(0.5)

    def _met(self) -> int:
        found = [engine.ask("counters") for engine in self.engines]
        return int(sum(counters.get(name, 0) for counters in found for name in MET))

    def _judge_all(self, name: str, tally: Tally) -> None:
        for engine in (*self.engines, *self.ended):
            answers = engine.requests()[self._judged.get(engine.name, 0) :]
            self._judged[engine.name] = self._judged.get(engine.name, 0) + len(answers)
            verdict = self.judge.look(answers)
            tally.requests += len(answers)
            tally.wrong += len(verdict.wrong)
            tally.failed_requests += len(verdict.failed)
            self.complaints += [f"{name}, {engine.name}: {a}" for a in (*verdict.wrong, *verdict.failed)]

    def facts(self) -> list[dict[str, Any]]:
        """What each engine saved and loaded, also the killed ones."""
        for engine in self.engines:
            engine.ask("facts")  # settles
        return [blocks(engine.blocks) for engine in (*self.engines, *self.ended)]


def blocks(path: Path) -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = {"saved": {}, "loaded": {}}
    for line in path.read_text().splitlines():
        what, key, digest = line.split()
        found[what].setdefault(key, []).append(digest)
    return found


def table(tallies: Mapping[str, Tally], left_out: Sequence[str]) -> str:
    names = list(vars(Tally()))
    lines = [f"{'fault':28}" + "".join(f"{name:>{len(name) + 2}}" for name in names)]
    for fault, one in tallies.items():
        lines.append(f"{fault:28}" + "".join(f"{value:>{len(name) + 2}}" for name, value in vars(one).items()))
    return "\n".join([*lines, *(f"{fault:28} not tried: this machine does not permit it" for fault in left_out)])


def to_json(chaos: Chaos, about: Mapping[str, Any], left_out: Sequence[str]) -> str:
    rows = [{"fault": name, **vars(one)} for name, one in chaos.tallies.items()]
    found = {
        **about,
        "requests": sum(one.requests for one in chaos.tallies.values()),
        "unsure": chaos.judge.n_unsure,
        "memory": chaos.watch.figures(),
        "faults": rows,
        "left_out": list(left_out),
    }
    return json.dumps(found, indent=1) + "\n"
