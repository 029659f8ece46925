"""The test's side of a fleet: real vLLM engines, one process each, that share a root and an index in Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.engines import forked
from tests.engines.conftest import HERE
from tests.engines.fleet_prompts import whole_tokens

START_TIMEOUT_S = 900.0
ANSWER_TIMEOUT_S = 600.0
MARGIN = 1e-3  # below it, the next token is so near that sums in another order may choose it

Prompt = tuple[int, tuple[int, ...]]  # a prompt's number; of a second turn with the answer of the first
REFERENCES = 48  # asked for at once: so many are computed within ANSWER_TIMEOUT_S on any machine
CONNECT_MS, REPLY_MS = 300.0, 300.0
SETTINGS: dict[str, Any] = {
    "capacity_bytes": "6GiB",
    "chunk_tokens": 64,
    "min_load_tokens": 64,
    "segment_bytes": "8MiB",
    "host": {"arena_bytes": "64MiB"},
    "writer_lease_s": 20.0,
}
ENGINES: tuple[dict[str, Any], ...] = (
    {"settings": {}, "llm": {"async_scheduling": False}},
    {
        "settings": {"host": {"arena_bytes": "16MiB", "admit": "never"}, "segment_bytes": "4MiB"},
        "llm": {"async_scheduling": True, "enable_prefix_caching": False},
    },
    {
        "settings": {"host": {"arena_bytes": "32MiB"}, "queues": {"load_threads": 1, "save_threads": 1}},
        "llm": {"async_scheduling": True, "max_num_batched_tokens": 512, "max_num_seqs": 8},
    },
)
"""What is each engine's own. The blocks of all have 32 tokens: on the CPU, vLLM packs KV by the whole block."""


def index_of(url: str, **changes: Any) -> dict[str, Any]:
    own = {"kind": "redis", "url": url, "connect_timeout_ms": CONNECT_MS, "reply_timeout_ms": REPLY_MS}
    return {**own, "breaker": {"failures": 2, "pause_first_ms": 200, "pause_max_ms": 1000}, **changes}


def settings_file(path: Path, root: Path, index: Mapping[str, Any], settings: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"root": str(root), "index": dict(index), **SETTINGS, **settings}))
    return path


class Member:
    """One process. `config`: its settings file; None: an engine without the tier."""

    def __init__(self, folder: Path, name: str, model: Path, config: Path | None, llm: Mapping[str, Any]) -> None:
        spec: dict[str, Any] = {"model": str(model), "llm": dict(llm), "root": str(folder), "name": name}
        spec["fleet"] = {"name": name, "folder": str(folder)}
        if config is not None:
            spec["config"] = str(config)
        (folder / f"{name}.spec").write_text(json.dumps(spec))
        self.name, self.config = name, config
        self._log = folder / f"{name}.log"
        self.blocks = folder / f"{name}.blocks"
        self._answers, self._requests = Lines(folder / f"{name}.answers"), Lines(folder / f"{name}.requests")
        self._n_asked = 0
        commands = folder / f"{name}.commands"
        os.mkfifo(commands)
        argv = [str(HERE / "fleet_engine.py"), str(folder / f"{name}.spec")]
        self.process = forked.start(argv, self._log, self._log, stdin=commands)
        self._commands = commands.open("w")

    def send(self, do: str, **more: Any) -> int:
        """The number of its answer."""
        self._commands.write(json.dumps({"do": do, **more}) + "\n")
        self._commands.flush()
        self._n_asked += 1
        return self._n_asked

    def answer(self, number: int, timeout_s: float = ANSWER_TIMEOUT_S) -> Any:
        """0: that it is ready."""
        deadline = time.monotonic() + timeout_s
        while len(lines := self._answers.read()) <= number:
            assert self.process.poll() is None, f"{self.name} ended:\n{self.log()[-6000:]}"
            assert time.monotonic() < deadline, f"{self.name} does not answer:\n{self.log()[-3000:]}"
            time.sleep(0.02)
        return lines[number]

    def ask(self, do: str, **more: Any) -> Any:
        return self.answer(self.send(do, **more))

    def requests(self) -> list[dict[str, Any]]:
        """Those of the load that have ended."""
        return self._requests.read()

    def log(self) -> str:
        return self._log.read_text()

    def end(self) -> None:
        self._commands.close()  # it ends at the end of its input
        try:
            self.process.wait(30.0)
        except TimeoutError:
            self.process.kill()


class Lines:
    """A file of JSON, a line each, while another process appends to it. Nothing is read twice."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._read: list[Any] = []

    def read(self) -> list[Any]:
        """All whole lines; not to be changed."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self._read += [json.loads(line) for line in whole.splitlines()]
        return self._read


@contextmanager
def fleet(folder: Path, model: Path, url: str, n_engines: int, has_alone: bool) -> Iterator[list[Member]]:
    """Engines over one root and one Redis, all ready; has_alone: behind them, one without the tier."""
    folder.mkdir(parents=True, exist_ok=True)
    members: list[Member] = []
    try:
        for number, own in enumerate(ENGINES[:n_engines]):
            config = settings_file(folder / f"{number}.yaml", folder / "root", index_of(url), own["settings"])
            members.append(Member(folder, f"engine-{number}", model, config, own["llm"]))
        if has_alone:
            members.append(Member(folder, "alone", model, None, {}))
        for member in members:
            member.answer(0, START_TIMEOUT_S)
        yield members
    finally:
        for member in members:
            member.end()


class Judge:
    """Holds answers against those of an engine that computes them without the tier."""

    def __init__(self, alone: Member) -> None:
        self.alone = alone
        self._tokens: dict[Prompt, list[int]] = {}
        self.n_unsure = 0

    def check(self, answers: Sequence[Mapping[str, Any]]) -> None:
        """No request failed, and none has a wrong token."""
        verdict = self.look(answers)
        assert not verdict.failed, verdict.failed[0]
        assert not verdict.wrong, (verdict.wrong[0], self._tokens[_prompt(verdict.wrong[0])])

    def look(self, answers: Sequence[Mapping[str, Any]]) -> Verdict:
        missing = sorted({_prompt(answer) for answer in answers} - self._tokens.keys())
        wanted = [[number, list(after)] if after else number for number, after in missing]
        for first in range(0, len(wanted), REFERENCES):
            for known in self.alone.ask("reference", numbers=wanted[first : first + REFERENCES]):
                self._tokens[_prompt(known)] = known["tokens"] if known["margin"] > MARGIN else []
        self.n_unsure += sum(not self._tokens[_prompt(answer)] for answer in answers)
        failed = [answer for answer in answers if answer.get("reason") != "length"]
        wrong = [answer for answer in answers if self._tokens[_prompt(answer)] not in ([], answer.get("tokens"))]
        return Verdict(failed, [answer for answer in wrong if answer not in failed])


class Verdict(NamedTuple):
    """Answers that were not given to their end, and those with a wrong token."""

    failed: list[Mapping[str, Any]]
    wrong: list[Mapping[str, Any]]


def _prompt(answer: Mapping[str, Any]) -> Prompt:
    return answer["number"], tuple(answer.get("after", ()))


def answered(answers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those whose lookup the index answered. On a machine that runs more than it can, Redis may get no processor for
    longer than an answer may take: what was asked then is a miss, whatever else is done to it."""
    return [answer for answer in answers if answer.get("is_answered", True)]


def hit_ratio(answers: Sequence[Mapping[str, Any]]) -> float:
    """Of the tokens in whole chunks, those that came from the tier (its own cache, an engine has emptied before)."""
    whole = sum(whole_tokens(answer["number"]) for answer in answers)
    return sum(min(answer["cached"], whole_tokens(answer["number"])) for answer in answers) / max(1, whole)


def tier_ratio(answers: Sequence[Mapping[str, Any]]) -> float:
    """Of the tokens that an engine had not itself (of requests beside it), those that the tier offered."""
    tier = sum(answer["tier_tokens"] for answer in answers)
    own = sum(answer["cached"] for answer in answers) - tier
    return tier / max(1, sum(whole_tokens(answer["number"]) for answer in answers) - own)


def kvtier(*words: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    command = [str(Path(sys.executable).parent / "kvtier"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
