"""One engine of a fleet: real vLLM that answers requests, and goes on with a load of them between commands.

    python fleet_engine.py SPEC.json

SPEC is engine.py's, with "fleet": {"name", "folder"}; without "config" it is an engine without the tier. Commands come
as lines of JSON on standard input; each is answered by a line in FOLDER/NAME.answers. A number in a command is a
prompt's, or [number, tokens]: a second turn after that answer. Requests of the load are noted in FOLDER/NAME.requests,
what was saved and loaded in FOLDER/NAME.blocks (a line each, as engine.Watch has it). Times are of time.monotonic(),
which all processes of a machine share.
"""

import json
import queue
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import engine as single
from fleet_prompts import TURNS, prompt, second_turn
from lookup_watch import LookupWatch
from vllm import LLM, SamplingParams

MAX_TOKENS = 6
WAVE = 4  # requests of the load at once
Asked = int | tuple[int, list[int]]  # a prompt's number; of a second turn with the answer of the first


class Member:
    """An engine, asked step by step so that times of requests and steps are seen."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.has_tier = "config" in spec
        self._engine = single.Engine(spec) if self.has_tier else None
        self.llm = self._engine.llm if self._engine else LLM(model=spec["model"], **single.LLM_ARGUMENTS)
        self._lookups = LookupWatch(self._engine.scheduler_half) if self._engine else None
        self._count = 0

    def ask(self, numbers: Sequence[Asked], is_reference: bool = False, saves: bool = True) -> list[dict[str, Any]]:
        """The answer to each prompt, all asked at once, with what it took.

        is_reference: without the tier, and with how sure each token is. saves: what it computes is stored.
        """
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=0, detokenize=False, ignore_eos=True)
        if not saves:
            sampling.extra_args = {"kv_transfer_params": {"kvtier_save": False}}
        if is_reference:
            sampling.logprobs = 2
            sampling.extra_args = {"kv_transfer_params": {"kvtier_load": False, "kvtier_save": False}}
        self._forget()
        found: dict[str, dict[str, Any]] = {}
        for asked in numbers:
            number, after = (asked, None) if isinstance(asked, int) else asked
            self._count += 1
            name = f"{self._count}x{number}"
            found[name] = {"number": number, "began_s": time.monotonic(), "longest_step_s": 0.0}
            if after is not None:
                found[name]["after"] = after
            tokens = prompt(number) if after is None else second_turn(number, after)
            self.llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
        while self.llm.llm_engine.has_unfinished_requests():
            began = time.monotonic()
            outputs = self.llm.llm_engine.step()
            now = time.monotonic()
            for output in outputs:
                self._note(found[output.request_id.split("-")[0]], output, now)
            for answer in found.values():
                if "ended_s" not in answer or answer["ended_s"] == now:
                    answer["longest_step_s"] = max(answer["longest_step_s"], now - began)
        if self._lookups is not None:
            self._lookups.note(found)
        return list(found.values())

    def _note(self, answer: dict[str, Any], output: Any, now: float) -> None:
        tokens = list(output.outputs[0].token_ids)
        if tokens:
            answer.setdefault("ttft_s", now - answer["began_s"])
        answer |= {"tokens": tokens, "cached": output.num_cached_tokens or 0}
        if output.finished:
            answer["ended_s"] = now
            answer["reason"] = str(output.outputs[0].finish_reason)
            if output.outputs[0].logprobs:
                answer["margin"] = min(_margin(step) for step in output.outputs[0].logprobs)

    def _forget(self) -> None:
        if self._engine is not None:
            self._engine.forget()
            self._engine.watch.at_end.clear()
        else:
            assert self.llm.reset_prefix_cache()

    def settle(self) -> None:
        if self._engine is not None:
            self._engine.settle()

    def wait_for_set(self) -> None:
        if self._engine is not None:
            self._engine.wait_for_set()

    def log_blocks(self, path: Path) -> None:
        if self._engine is not None:
            self._engine.watch.log = path.open("w")

    def facts(self) -> dict[str, Any]:
        assert self._engine is not None
        watch = self._engine.watch
        return {"saved": watch.saved, "loaded": watch.loaded, "counters": self._engine.counters()}


def _margin(candidates: dict[int, Any]) -> float:
    """How far the chosen token is ahead of the next one."""
    first, second, *_ = sorted((one.logprob for one in candidates.values()), reverse=True)
    return float(first - second)


class Load:
    """Waves of requests: some of a pool, again and again, and a new one in every other wave; with "turns", then a
    second turn after that one."""

    def __init__(self, member: Member, notes: TextIO, command: dict[str, Any]) -> None:
        self._member = member
        self._notes = notes
        self._pool: list[int] = command["pool"]
        self._fresh: int = command["fresh"]
        self.pause_s: float = command.get("pause_s", 0.0)
        self._rng = random.Random(self._fresh)
        self._waves = 0
        self._has_turns: bool = command.get("turns", False)
        self._turn: Asked | None = None

    def wave(self) -> None:
        numbers: list[Asked] = [*self._rng.sample(self._pool, WAVE)]
        self._waves += 1
        if self._waves % 2:
            numbers[-1] = self._fresh
            self._fresh += 1
        elif self._turn is not None:
            numbers[-1] = self._turn
        answers = self._member.ask(numbers)
        if self._has_turns and self._waves % 2:
            self._turn = (TURNS + answers[-1]["number"], answers[-1]["tokens"])
        for answer in answers:
            self._notes.write(json.dumps(answer) + "\n")
        self._notes.flush()


def commands() -> queue.Queue[dict[str, Any]]:
    """Those that come on standard input, read beside the engine; at its end, "end"."""
    found: queue.Queue[dict[str, Any]] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            found.put(json.loads(line))
        found.put({"do": "end"})

    threading.Thread(target=read, daemon=True).start()
    return found


def carry_out(member: Member, command: dict[str, Any]) -> Any:
    if command["do"] == "ask":
        saves = command.get("saves", True)
        answers = [answer for numbers in _in_waves(command["numbers"]) for answer in member.ask(numbers, saves=saves)]
        member.settle()
        return answers
    if command["do"] == "reference":
        return [
            answer for numbers in _in_waves(command["numbers"]) for answer in member.ask(numbers, is_reference=True)
        ]
    if command["do"] == "wait_for_set":
        member.wait_for_set()
    if command["do"] == "counters":
        return member.facts()["counters"]
    if command["do"] == "facts":
        member.settle()
        return member.facts()
    return None  # load, stop, end


def _in_waves(numbers: list[Asked]) -> list[list[Asked]]:
    return [numbers[first : first + WAVE] for first in range(0, len(numbers), WAVE)]


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    folder, name = Path(spec["fleet"]["folder"]), spec["fleet"]["name"]
    asked = commands()
    member = Member(spec)
    member.log_blocks(folder / f"{name}.blocks")
    load: Load | None = None
    with (folder / f"{name}.answers").open("w") as answers, (folder / f"{name}.requests").open("w") as notes:
        answers.write(json.dumps("ready") + "\n")
        answers.flush()
        while True:
            try:
                command = asked.get(timeout=load.pause_s) if load else asked.get()
            except queue.Empty:
                assert load is not None
                load.wave()
                continue
            answer = carry_out(member, command)
            if command["do"] in ("load", "stop"):
                load = Load(member, notes, command) if command["do"] == "load" else None
            answers.write(json.dumps(answer) + "\n")
            answers.flush()
            if command["do"] == "end":
                return


if __name__ == "__main__":
    main()
