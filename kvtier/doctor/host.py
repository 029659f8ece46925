"""Host: access of the probes to kernel files and to commands, which have a deadline."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

PROBE_TIMEOUT_S = 20.0  # deadline of a command, seconds


class Diagnosis(NamedTuple):
    """One line of the report. fix: advice, "" where there is nothing to do."""

    level: Literal["ok", "warn", "bad"]
    what: str
    value: str
    fix: str = ""


class Ran(NamedTuple):
    """Result of a command. status None: no answer in time, or no such command."""

    status: int | None
    output: str
    error: str


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
            return Ran(None, "", f"{command[0]}: {fault.strerror}")
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
            raise ProbeFailed(lines[-1] if lines else f"exit status {ran.status}")
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
