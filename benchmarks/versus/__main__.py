"""kvtier, vLLM's own tiering, LMCache in two ways, KvikIO alone and the ceilings: same prompts, same machine, in turn.

    python -m benchmarks.versus --place tmpfs --folder /dev/shm/kv --out VERSUS.json [--systems none,kvtier,native]
    python -m benchmarks.versus --place disk --folder /mnt/kv --systems kvtier-k4v4,native --out VERSUS.json
    python -m benchmarks.versus --merge A.json B.json --out VERSUS.json

Each system stores one prompt of each length, which share nothing. Then, --repetitions times, each is asked for all of
them by a fresh process, the systems in turn, in another order each time. --together of the processes start side by
side (turns.py). Entries stand in --out as soon as they are measured: the same command again does what is missing, on
the same machine without storing again. --seconds: nothing is begun for which there is no time. What is stored is
removed when all repetitions are done.
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

from benchmarks.gpu import options as shared
from benchmarks.gpu.ceilings import direct_writes
from benchmarks.gpu.models import DIMENSIONS
from benchmarks.gpu.systems import stored_bytes
from benchmarks.gpu.ttft import check_room, setup_of
from benchmarks.serving.arguments import at_least, numbers
from benchmarks.versus import show
from benchmarks.versus.alone import probe
from benchmarks.versus.contestants import CONTESTANTS, Place
from benchmarks.versus.judge import Entries
from benchmarks.versus.record import Records, Run, merged, short
from benchmarks.versus.turns import in_turns

PROBE_BYTES, TINY_PROBE_BYTES = 2 << 30, 64 << 20
"""Of the file that is read around each round."""
FIRST_ROUND_S = 60.0
"""A round's length as long as none was seen."""
ENCODED_SHARE = 0.3
"""At most so much of the KV's bytes does k4v4 store."""


class Piece:
    """One call: what is asked, what is known already, and how much time is left."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        setup = setup_of(options)
        setup.llm.update({} if options.tiny else room_of(options))
        self.place = Place(options.place, setup, options.start_seconds, options.turn_seconds)
        self.systems = [name for name in options.systems.split(",") if name]
        self.token_bytes = DIMENSIONS[setup.kind].token_bytes(4 if options.tiny else 2)
        settings = {f"{options.place}: {name}": self.place.settings(name) for name in self.systems}
        self.records = Records(
            options.out, settings | {"llm": setup.llm, "lengths": options.lengths, "token_bytes": self.token_bytes}
        )
        print(json.dumps(settings, indent=1), flush=True)
        self._deadline = time.monotonic() + options.seconds
        self._longest_s = {"store": FIRST_ROUND_S, "repetition": 0.0}
        self._probed = setup.folder / "ceiling.bin"
        self.left_out: list[str] = []

    def run(self) -> None:
        self.place.setup.folder.mkdir(parents=True, exist_ok=True)
        self.alone()
        self.bare_and_store()
        done = [self.repetition(number) for number in range(1, self._options.repetitions + 1)]
        if all(done) and not self._options.keep:
            for name in self.systems:
                self.place.forget(name)
            self._probed.unlink(missing_ok=True)

    @property
    def tiered(self) -> list[str]:
        return [name for name in self.systems if name != "none"]

    def in_time(self, kind: str, what: str, do: Callable[[], None]) -> bool:
        """Does it, unless it might not end in time; whether it was done. Before the first repetition, storing is what
        is known of how long a round takes: engines compile in that, and take longer."""
        started = time.monotonic()
        if started + (self._longest_s[kind] or self._longest_s["store"]) > self._deadline:
            self.left_out.append(f"{kind} {what}")
            return False
        do()
        self._longest_s[kind] = max(self._longest_s[kind], time.monotonic() - started)
        return True

    def alone(self) -> None:
        run = Run("alone", self.place.name, "none")
        if self.records.find(run) or self._options.no_alone:
            return
        lengths = self._options.lengths if self.place.name == "tmpfs" else self._options.lengths[:1]
        out = self.place.setup.logs / "alone.json"
        out.parent.mkdir(parents=True, exist_ok=True)
        words = [
            "--folder",
            str(self.place.setup.folder),
            "--out",
            str(out),
            "--bytes",
            ",".join(str(n_tokens * self.token_bytes) for n_tokens in lengths),
        ]
        words += ["--no-gpu"] if self._options.tiny else []
        try:
            command = [sys.executable, "-m", "benchmarks.versus.alone", *words]
            subprocess.run(command, timeout=self.place.turn_s, check=True)
        except subprocess.SubprocessError as failure:
            print(f"FAILED {failure}", flush=True)
            self.records.add(run, {"failed": str(failure)})
            return
        self.records.add(run, json.loads(out.read_text()))

    def bare_and_store(self) -> None:
        missing = [name for name in self.systems if not self._is_stored(name)]
        for name in missing:
            self.place.forget(name)
        check_room(self.place.setup.folder, self._bytes_of(missing))
        for group in groups(missing, self._options.together):
            self.in_time("store", ", ".join(group), lambda group=group: self._store(group))  # type: ignore[misc]

    def repetition(self, number: int) -> bool:
        """Whether all that was asked of it is there."""
        missing = [name for name in self.tiered if not self.records.find(self._reload(name, number))]
        missing = [name for name in missing if self._is_stored(name)]
        turned = [*missing[number % len(missing) :], *missing[: number % len(missing)]] if missing else []
        done = [
            self.in_time("repetition", f"{number} of {', '.join(group)}", lambda group=group: self._ask(group, number))  # type: ignore[misc]
            for group in groups(turned, self._options.together)
        ]
        return all(done)

    def _store(self, group: Sequence[str]) -> None:
        lengths, options = self._options.lengths, self._options
        steps = {name: ["store", lengths, 1] for name in group} | {"none": ["computed_and_own", lengths, options.bare]}
        members = [self.place.member(name, "store", [steps[name]], lengths[0]) for name in group]
        for name, found in zip(group, self._in_turns(members), strict=True):
            shown: dict[str, Any]
            if name == "none":
                run, kinds = Run("bare", "", name), found.get("computed_and_own", {})
                shown = {kind: short(rows) for kind, rows in kinds.items()}
            else:
                run, shown = Run("store", self.place.name, name), {"rows": short(found.get("store", []))}
                shown["stored_bytes"] = stored_bytes(self.place.data(name) / CONTESTANTS[name].system)
            self.records.add(run, shown | about(found))

    def _ask(self, group: Sequence[str], number: int) -> None:
        steps: list[list[Any]] = [["first_tokens", self._options.lengths, 1]]
        members = [self.place.member(name, f"reload-{number}", steps, self._options.lengths[0]) for name in group]
        before = self._probe()
        found = self._in_turns(members)
        reads = [before, self._probe()]
        for place, (name, result) in enumerate(zip(group, found, strict=True)):
            shown = {"rows": short(result.get("first_tokens", [])), "read_bytes_s": reads, "turn": place}
            self.records.add(self._reload(name, number), shown | about(result))

    def _in_turns(self, members: list[Any]) -> list[dict[str, Any]]:
        return in_turns(members, self.place.setup.logs, self.place.start_s, self.place.turn_s)

    def _probe(self) -> float:
        """Direct reads of a file that stays, so that a disk's state is known around each round."""
        if not self._probed.exists():
            direct_writes(self._probed.parent, TINY_PROBE_BYTES if self._options.tiny else PROBE_BYTES, keep=True)
        return probe(self._probed)

    def _reload(self, name: str, number: int) -> Run:
        return Run("reload", self.place.name, name, number)

    def _is_stored(self, name: str) -> bool:
        if name == "none":
            return self.records.find(Run("bare", "", name)) is not None
        is_known = self.records.find(Run("store", self.place.name, name)) is not None
        return is_known and self.place.data(name).exists()

    def _bytes_of(self, names: Sequence[str]) -> int:
        whole = sum(self._options.lengths) * self.token_bytes
        shares = [ENCODED_SHARE if "k4v4" in name else 1.0 for name in names if name != "none"]
        return int(whole * sum(shares))


def about(found: dict[str, Any]) -> dict[str, Any]:
    """Of a process: how long its start and the whole took, or why it failed."""
    return {name: found[name] for name in ("start_s", "process_s", "failed") if name in found}


def room_of(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments that let several engines lie in one GPU's memory: KV for the largest prompt, and not more."""
    return {"kv_cache_memory_bytes": int(options.kv_gib * (1 << 30)), "max_model_len": max(options.lengths) + 256}


def groups(names: Sequence[str], size: int) -> list[list[str]]:
    return [list(names[first : first + size]) for first in range(0, len(names), size)]


def parse(text: Sequence[str] | None = None) -> argparse.Namespace:
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.versus", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    shared.of_scripts(made)
    shared.of_kvtier(made)
    shared.of_timed_engines(made, gpu_memory=0.2)
    add = made.add_argument
    add("--out", type=Path, required=True, help="the JSON file, which is gone on with")
    add("--merge", type=Path, nargs="+", help="puts these together into --out, and runs nothing")
    add("--place", choices=("tmpfs", "disk"), default="tmpfs", help="what --folder lies on")
    add("--folder", type=Path, default=Path("/dev/shm/kv"), help="where the systems store")
    add("--systems", default=",".join(CONTESTANTS), help="in the order of the first turn")
    add("--lengths", type=numbers, help="tokens, divided by commas")
    add("--repetitions", type=at_least(1), default=3, help="fresh processes of each system that reload all lengths")
    add("--bare", type=at_least(1), default=2, help="prompts of each length that are computed without a tier")
    add("--together", type=at_least(1), default=3, help="processes that start side by side; 1: each alone")
    add("--kv-gib", type=float, default=15.0, help="of each engine's KV cache")
    add("--seconds", type=float, default=540.0, help="nothing is begun that might end later")
    add("--start-seconds", type=float, default=150.0, help="until a process must be ready")
    add("--turn-seconds", type=float, default=150.0, help="of one process's turn")
    add("--no-alone", action="store_true", help="no ceilings, no KvikIO")
    add("--keep", action="store_true", help="what is stored stays")
    options = made.parse_args(text)
    options.lengths = options.lengths or numbers("300,600" if options.tiny else "8192,32768,65536,100000")
    options.timeout = options.turn_seconds
    for name in options.systems.split(","):
        if name and name not in CONTESTANTS:
            made.error(f"--systems: there is no {name!r}; there are {', '.join(CONTESTANTS)}")
    if not os.access(options.out.parent, os.W_OK | os.X_OK):
        made.error(f"--out: {options.out.parent} is no folder that can be written to")
    return options


def main() -> int:
    options = parse()
    if options.merge:
        try:
            settings, entries = merged(options.merge)
        except (OSError, ValueError, KeyError, TypeError) as fault:
            print(f"--merge: no result of this benchmark: {type(fault).__name__}: {fault}", file=sys.stderr)
            return 2
        records = Records(options.out, settings)
        records.entries = entries
        records.write()
        print("\n".join(show.lines(entries, settings["token_bytes"])))
        return 0
    piece = Piece(options)
    piece.run()
    print("\n".join(show.lines(piece.records.entries, piece.token_bytes)))
    for what in piece.left_out:
        print(f"LEFT OUT for want of time: {what}")
    mine = [piece.records.find(piece._reload(name, options.repetitions)) for name in piece.tiered]
    cells = Entries(piece.records.entries, piece.token_bytes).cells().values()
    are_loaded = all(cell.is_whole and cell.has_loaded for cell in cells)
    return int(bool(piece.left_out) or not all(mine) or not are_loaded)


if __name__ == "__main__":
    raise SystemExit(main())
