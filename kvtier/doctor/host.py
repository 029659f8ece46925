"""Host: access of the probes to kernel files and to commands, which have a deadline."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

PROBE_TIMEOUT_S = 20.0  # deadline of a command, seconds
FAULT = 3  # exit status of a probe that met a fault in what it examines, and describes it on standard error


class Diagnosis(NamedTuple):
    """One line of the report. fix: advice, "" where there is nothing to do."""

    level: Literal["ok", "warn", "bad"]
    what: str
    value: str
    fix: str = ""


class Ran(NamedTuple):
    """Result of a command. status None: no answer in time, or, if not did_start, no such command."""

    status: int | None
    output: str
    error: str
    did_start: bool = True


@dataclass(frozen=True, slots=True)
class Host:
    """This machine. Tests pass folders of their own."""

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    timeout_s: float = PROBE_TIMEOUT_S

    def run(self, *command: str, timeout_s: float | None = None) -> Ran:
        """Run a command; never raises. One that hangs in the kernel is left running, for it cannot be killed."""
        limit_s = timeout_s or self.timeout_s
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as fault:
            return Ran(None, "", f"{command[0]}: {fault.strerror}", did_start=False)
        try:
            output, error = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return Ran(None, "", f"no answer in {limit_s:g} s")
        return Ran(process.returncode, output, error)

    def probe(self, module: str, *arguments: str, timeout_s: float | None = None) -> Any:
        """Return the JSON that `python -m module` prints. Raises ProbeFailed."""
        ran = self.run(sys.executable, "-m", module, *arguments, timeout_s=timeout_s)
        lines = [line for line in ran.error.splitlines() if line.strip()]
        if ran.status != 0:
            said = [line for line in lines if line.startswith("Fatal Python error")] or lines[-1:]
            why = said[0] if said else f"exit status {ran.status}"
            if ran.did_start and (ran.status is None or ran.status < 0 or ran.status == FAULT):
                raise ProbeFailed(why)
            raise ProbeNotRun(why, shlex.join([sys.executable, "-m", module, *arguments]))
        try:
            return json.loads(ran.output)
        except ValueError:
            raise ProbeFailed(f"not an answer: {ran.output[:80]!r}") from None

    def text(self, path: Path) -> str:
        """Return the content of a small kernel file; "" when it cannot be read."""
        try:
            return path.read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""


class ProbeFailed(Exception):
    """A probe gave no answer; the text says why. Never leaves kvtier.doctor."""


class ProbeNotRun(ProbeFailed):
    """This Python could not run a probe, so what it was to examine is not to blame. command: runs the probe."""

    def __init__(self, why: str, command: str) -> None:
        super().__init__(why)
        self.command = command

    def diagnosis(self, what: str) -> Diagnosis:
        fix = f"mend this Python environment, until `{self.command}` answers"
        return Diagnosis("bad", what, f"not looked at, because this Python cannot run the probe: {self}", fix)
