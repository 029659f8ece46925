"""Comparison of kvtier, vLLM's own tiering, LMCache in two ways, KvikIO alone and the ceilings, in turn on one machine.

    python -m benchmarks.versus --place tmpfs --folder /dev/shm/kv --out VERSUS.json [--systems none,kvtier,native]
    python -m benchmarks.versus --place disk --folder /mnt/kv --systems kvtier-k4v4,native --out VERSUS.json

Each system stores one prompt of each length, which share nothing. Then, --repetitions times, a new process of each
system asks for all of them, the systems in turn, in another order each time. --together of the processes start side by
side (turns.py). On tmpfs, whose pages are slow at their first read, what was stored is read once before. --out is
written after each process: the same command again does what is missing, on the same machine without storing again.
--seconds: nothing is begun for which there is no time. What is stored is removed when all repetitions are done.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.gpu.ceilings import direct_writes, read_rate
from benchmarks.gpu.setup import EngineSetup, add_timed_engine, check_room, parser
from benchmarks.gpu.systems import stored_bytes
from benchmarks.gpu.under_load import read_once
from benchmarks.serving.arguments import at_least, numbers
from benchmarks.versus.contestants import CONTESTANTS, VersusFolder
from benchmarks.versus.judge import Entries, Runs, table_rows, verdict
from benchmarks.versus.turns import Member, in_turns

QUESTION = "kvtier, its peers and the machine's ceilings, side by side"
KEY = ("kind", "place", "system", "repetition", "boot")  # of these fields an entry has no second one
KEPT = ("tokens", "hit_tokens", "ttft_s", "token", "settle_s", "passes", "skipped")
COUNTED = ("load_bytes", "load_seconds", "load_tokens")
PROBE_BYTES, TINY_PROBE_BYTES = 2 << 30, 64 << 20  # of the file that is read around each round
FIRST_ROUND_S = 60.0  # a round's length until one was seen
ENCODED_SHARE = 0.3  # at most so much of the KV's bytes does k4v4 store


def key_of(entry: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(entry.get(name) for name in KEY)


def short(rows: Runs) -> Runs:
    """Return rows of an engine's requests with the fields that a table or a reader needs."""
    found = []
    for row in rows:
        counted = {name: row["counted"][name] for name in COUNTED if name in row.get("counted", {})}
        found.append({name: row[name] for name in KEPT if name in row} | counted)
    return found


class ResultFile:
    """The result file at `path`, whole after each entry. Of entries with the same key the last one stays."""

    def __init__(self, path: Path, settings: dict[str, Any]) -> None:
        self._path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.entries: Runs = known.get("runs", [])
        self._settings = known.get("settings", {}) | settings
        self._machine = report.machine()

    def find(self, kind: str, place: str, system: str, repetition: int = 0) -> dict[str, Any] | None:
        """Return the entry of this machine since its start, with these lengths or more; None also for a failure."""
        wanted = (kind, place, system, repetition, self._machine["boot"])
        lengths = set(self._settings.get("lengths") or ())
        for entry in self.entries:
            if key_of(entry) == wanted and "failed" not in entry and lengths <= set(entry.get("lengths") or ()):
                return entry
        return None

    def add(self, kind: str, place: str, system: str, repetition: int, shown: dict[str, Any]) -> None:
        head = dict(zip(KEY, (kind, place, system, repetition, self._machine["boot"]), strict=True)) | {
            "lengths": self._settings.get("lengths"),
            "commit": report.commit(),
            "date": time.strftime("%Y-%m-%d %H:%M:%S"),
            "gpus": self._machine["gpus"],
            "cores": self._machine["cores"],
        }
        self.entries = [*(one for one in self.entries if key_of(one) != key_of(head)), head | shown]
        self.write()

    def write(self) -> None:
        report.write(self._path, QUESTION, {"settings": self._settings, "runs": self.entries})


class Comparison:
    """One call: what to measure, what is known already, and how much time is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        setup = EngineSetup.timed(options)
        if not options.tiny:  # several engines share one GPU's memory: KV for the largest prompt, and no more
            size = int(options.kv_gib * (1 << 30))
            setup.llm.update(kv_cache_memory_bytes=size, max_model_len=max(options.lengths) + 256)
        self.folder = VersusFolder(options.place, setup)
        self.systems = [name for name in options.systems.split(",") if name]
        self.token_bytes = setup.token_bytes
        settings = {f"{options.place}: {name}": self.folder.settings(name) for name in self.systems}
        print(json.dumps(settings, indent=1), flush=True)
        settings |= {"llm": setup.llm, "lengths": options.lengths, "token_bytes": self.token_bytes}
        self.file = ResultFile(options.out, settings)
        self._deadline = time.monotonic() + options.seconds
        self._longest_s = {"store": FIRST_ROUND_S, "repetition": 0.0}
        self._probed = setup.folder / "ceiling.bin"
        self.left_out: list[str] = []

    def run(self) -> bool:
        """Measure what is missing; return whether all is there and every reload is whole."""
        self.folder.setup.folder.mkdir(parents=True, exist_ok=True)
        self._alone()
        missing = [name for name in self.systems if not self._is_stored(name)]
        for name in missing:
            self.folder.forget(name)
        check_room(self.folder.setup.folder, self._bytes_of(missing))
        for group in groups(missing, self._options.together):
            self.in_time("store", ", ".join(group), lambda group=group: self._store(group))  # type: ignore[misc]
        repetitions = range(1, self._options.repetitions + 1)
        done = [self._repetition(number) for number in repetitions]
        if all(done):
            for name in self.systems:
                self.folder.forget(name)
            self._probed.unlink(missing_ok=True)
        tiered = [name for name in self.systems if name != "none"]
        asked = [self.file.find("reload", self.folder.storage, name, repetitions[-1]) for name in tiered]
        cells = Entries(self.file.entries, self.token_bytes).cells().values()
        return all(asked) and not self.left_out and all(cell.is_whole and cell.has_loaded for cell in cells)

    def in_time(self, kind: str, what: str, do: Callable[[], None]) -> bool:
        """Do it unless it might not end in time; return whether it was done.

        Before the first repetition the longest storing is the estimate: engines compile in that, and take longer.
        """
        started = time.monotonic()
        if started + (self._longest_s[kind] or self._longest_s["store"]) > self._deadline:
            self.left_out.append(f"{kind} {what}")
            return False
        do()
        self._longest_s[kind] = max(self._longest_s[kind], time.monotonic() - started)
        return True

    def _alone(self) -> None:
        """Measure the ceilings in a process of its own, for it takes GPU memory that engines want."""
        storage, setup = self.folder.storage, self.folder.setup
        if self.file.find("alone", storage, "none") or self._options.no_alone:
            return
        lengths = self._options.lengths if storage == "tmpfs" else self._options.lengths[:1]
        out = setup.logs / "alone.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        sizes = ",".join(str(n_tokens * self.token_bytes) for n_tokens in lengths)
        words = ["--folders", str(setup.folder), "--out", str(out), "--bytes", sizes, "--gib", "0"]
        words += ["--no-gpu"] if self._options.tiny else []
        try:
            subprocess.run(
                [sys.executable, "-m", "benchmarks.gpu.ceilings", *words], timeout=setup.timeout_s, check=True
            )
            content = json.loads(out.read_text())
            found = {"copies": content["copies"]} | content["folders"][str(setup.folder)]
        except subprocess.SubprocessError as failure:
            print(f"FAILED {failure}", flush=True)
            found = {"failed": str(failure)}
        self.file.add("alone", storage, "none", 0, found)

    def _repetition(self, number: int) -> bool:
        """Reload in all systems of which this repetition is missing; return whether all were."""
        storage, stored = self.folder.storage, [name for name in self.systems if self._is_stored(name)]
        missing = [name for name in stored if name != "none" and not self.file.find("reload", storage, name, number)]
        first = number % len(missing) if missing else 0
        done = [
            self.in_time("repetition", f"{number} of {', '.join(group)}", lambda group=group: self._ask(group, number))  # type: ignore[misc]
            for group in groups([*missing[first:], *missing[:first]], self._options.together)
        ]
        return all(done)

    def _store(self, group: Sequence[str]) -> None:
        lengths, options, storage = self._options.lengths, self._options, self.folder.storage
        steps = {name: ["store", lengths] for name in group} | {"none": ["computed_and_own", lengths, options.bare]}
        members = [self.folder.member(name, "store", [steps[name]], lengths[0]) for name in group]
        for name, found in zip(group, self._in_turns(members), strict=True):
            if name == "none":
                kinds = found.get("computed_and_own", {})
                self.file.add("bare", "", name, 0, {kind: short(rows) for kind, rows in kinds.items()} | about(found))
            else:
                size = stored_bytes(self.folder.data(name) / CONTESTANTS[name].system)
                if storage == "tmpfs":
                    read_once(self.folder.data(name))
                shown = {"rows": short(found.get("store", [])), "stored_bytes": size}
                self.file.add("store", storage, name, 0, shown | about(found))

    def _ask(self, group: Sequence[str], number: int) -> None:
        lengths = self._options.lengths
        steps: list[list[Any]] = [["first_tokens", lengths]]
        members = [self.folder.member(name, f"reload-{number}", steps, lengths[0]) for name in group]
        before = self._probe()
        found = self._in_turns(members)
        reads = [before, self._probe()]
        for turn, (name, result) in enumerate(zip(group, found, strict=True)):
            shown = {"rows": short(result.get("first_tokens", [])), "read_bytes_s": reads, "turn": turn}
            self.file.add("reload", self.folder.storage, name, number, shown | about(result))

    def _in_turns(self, members: list[Member]) -> list[dict[str, Any]]:
        setup = self.folder.setup
        return in_turns(members, setup.logs, self._options.start_seconds, setup.timeout_s)

    def _probe(self) -> float:
        """Return the rate of direct reads of a file that stays, so that a disk's state is known around each round."""
        if not self._probed.exists():
            direct_writes(self._probed.parent, TINY_PROBE_BYTES if self._options.tiny else PROBE_BYTES, keep=True)
        return read_rate(self._probed)

    def _is_stored(self, name: str) -> bool:
        if name == "none":
            return self.file.find("bare", "", name) is not None
        return self.file.find("store", self.folder.storage, name) is not None and self.folder.data(name).exists()

    def _bytes_of(self, names: Sequence[str]) -> int:
        shares = [ENCODED_SHARE if "k4v4" in name else 1.0 for name in names if name != "none"]
        return int(sum(self._options.lengths) * self.token_bytes * sum(shares))


def about(found: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds of a process's start and of the whole, or why it failed."""
    return {name: found[name] for name in ("start_s", "process_s", "failed") if name in found}


def groups(names: Sequence[str], size: int) -> list[list[str]]:
    return [list(names[first : first + size]) for first in range(0, len(names), size)]


def parse(text: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser("versus", __doc__, 150.0)
    add_timed_engine(made, gpu_memory=0.2)
    add = made.add_argument
    add("--place", choices=("tmpfs", "disk"), default="tmpfs", help="the storage of --folder")
    add("--systems", default=",".join(CONTESTANTS), help="in the order of the first turn")
    add("--lengths", type=numbers, help="tokens, separated by commas")
    add("--repetitions", type=at_least(1), default=3, help="new processes of each system that reload all lengths")
    add("--bare", type=at_least(1), default=2, help="prompts of each length that are computed without a tier")
    add("--together", type=at_least(1), default=3, help="processes that start side by side; 1: each alone")
    add("--kv-gib", type=float, default=15.0, help="of each engine's KV cache")
    add("--seconds", type=float, default=540.0, help="nothing is begun that might end later")
    add("--start-seconds", type=float, default=150.0, help="until a process must be ready; --timeout is of its turn")
    add("--no-alone", action="store_true", help="no ceilings, no KvikIO")
    options = made.parse_args(text)
    options.lengths = options.lengths or numbers("300,600" if options.tiny else "8192,32768,65536,100000")
    for name in options.systems.split(","):
        if name and name not in CONTESTANTS:
            made.error(f"--systems: there is no {name!r}; there are {', '.join(CONTESTANTS)}")
    if not os.access(options.out.parent, os.W_OK | os.X_OK):
        made.error(f"--out: {options.out.parent} is no folder that can be written to")
    return options


def main() -> int:
    options = parse()
    comparison = Comparison(options)
    is_good = comparison.run()
    comparison.file.write()
    entries = Entries(comparison.file.entries, comparison.token_bytes)
    report.table(*table_rows(entries))
    print(verdict(entries.cells()))
    for run in comparison.file.entries:
        if "failed" in run:
            print(f"FAILED: {' '.join(str(run[name]) for name in KEY[:4])}")
    for what in comparison.left_out:
        print(f"LEFT OUT for want of time: {what}")
    return int(not is_good)


if __name__ == "__main__":
    raise SystemExit(main())
