"""Several engines start side by side; then one after another does its work, alone on the machine.

Most of an engine's process is its start, and starts share nothing that is measured. An engine that has had its turn has
ended before the next one gets its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.processes import EngineFailed, EngineProcess
from benchmarks.versus.lmcache_server import LMCacheServer

POLL_S = 0.05


@dataclass(frozen=True)
class Member:
    """One engine's process. job: without its steps. before: steps that it does while others start. steps: those of its
    turn. server: arguments of LMCache's server, for an engine that needs one."""

    name: str
    job: dict[str, Any]
    before: list[list[Any]]
    steps: list[list[Any]]
    server: Sequence[str] | None = None


@dataclass(frozen=True)
class _Started:
    process: EngineProcess
    ready: Path
    go: Path
    server: LMCacheServer | None

    @property
    def is_settled(self) -> bool:
        """Return whether it is ready, or will never be."""
        return self.ready.exists() or self.process.is_over or (self.server is not None and self.server.is_over)


def in_turns(members: Sequence[Member], logs: Path, start_s: float, turn_s: float) -> list[dict[str, Any]]:
    """Return what each member's steps returned, or {"failed": why}.

    start_s, turn_s: what a process may take until it is ready, and from its turn to its end.
    """
    found: list[dict[str, Any]] = []
    with ExitStack() as ends:
        engines = [_start(member, logs, start_s + len(members) * turn_s, ends) for member in members]
        deadline = time.monotonic() + start_s
        while not all(one.is_settled for one in engines) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        for one in engines:
            if not one.ready.exists():
                one.process.stop()
        for one in engines:
            one.go.touch()
            try:
                found.append(one.process.results(turn_s))
            except EngineFailed as failure:
                print(f"FAILED {failure}", flush=True)
                found.append({"failed": str(failure)})
    return found


def _start(member: Member, logs: Path, timeout_s: float, ends: ExitStack) -> _Started:
    logs.mkdir(parents=True, exist_ok=True)
    ready, go = (logs / f"{member.name}.{end}" for end in ("ready", "go"))
    for path in (ready, go):
        path.unlink(missing_ok=True)
    job = member.job | {"steps": [*member.before, ["take_turn", str(ready), str(go), timeout_s], *member.steps]}
    server = None
    if member.server is not None:
        server = LMCacheServer(member.server, logs / f"{member.name}-server.log")
        ends.callback(server.stop)
        job["extra"] = job["extra"] | server.settings
    process = EngineProcess(member.name, job, logs, timeout_s)
    ends.callback(process.stop)
    return _Started(process, ready, go, server)
