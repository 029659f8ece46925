"""Two engines, a GPU each, on one root and one index in Redis, while one of them is killed and started again.

    python -m benchmarks.gpu.two_engines --folder /dev/shm/kv --out OUT/two_engines.json [--redis FOLDER]
        [--systems kvtier,none,native] [--seconds 600] [--capacity-gib 100] [--records FOLDER] [--tiny]

Both engines take the next item of one list whenever one of their 16 requests has ended: a prefix of 2,000 to 12,000
tokens, private or one of 32 documents in use, and 200 tokens of its own; 32 tokens are generated. vLLM's own KV cache
has 20 GiB a GPU, so that documents leave it. In the middle of the time engine b is killed and started again, and first
answers what was lost. Every system gets the same list and the same seconds. vLLM's tiering deletes no files: this
script deletes the oldest above --capacity-gib, which is kvtier's capacity too. Each engine has 24 GiB of host memory
for KV (kvtier's default is 8).

Blocks of one chunk in 16 are compared bit for bit with what either engine saved (watch.py). The digests take time of
kvtier's engines: compare rates with --watch 0. Answers are compared with those of `none`; `none` itself answers 64
items twice, batched otherwise, as a control. Weights are random, so that answers hardly depend on the KV: the blocks
decide. unknown: of chunks that b saved in the two seconds before it was killed, whose digests it had not written yet.
Records stay in --records, and the table shows all systems in it: systems can be run in calls of their own.

--redis: a folder with the server and its libraries, and the client's wheel where it is not installed (15 MB):

    mkdir -p .redis && cp -L "$(command -v redis-server)" .redis/
    ldd .redis/redis-server | awk '/=> \\//{print $3}' | grep -vE '/(libc|libm)\\.so' | xargs -I{} cp -L {} .redis/
    pip download --no-deps -d .redis redis==8.1.0
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import random
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TextIO

from benchmarks import report
from benchmarks.gpu import inside
from benchmarks.gpu.engine import MeasuredEngine, parameters
from benchmarks.gpu.models import prompt
from benchmarks.gpu.sampler import Sampler
from benchmarks.gpu.setup import EngineSetup, add_timed_engine, parser
from benchmarks.gpu.steps import take_turn
from benchmarks.gpu.systems import NATIVE_CPU_BYTES, stored_bytes
from benchmarks.gpu.watch import compare
from benchmarks.gpu.weights_files import unpacked
from benchmarks.processes import EngineFailed, EngineProcess, redis_server

QUESTION = "what two engines on one tier have of each other, and whether one notices that the other is killed"
ENGINES = ("a", "b")
MIX = {"private_every": 8, "window": 32, "document_every": 16, "shortest": 2000, "longest": 12_000, "tail": 200}
TINY_MIX = {"private_every": 4, "window": 6, "document_every": 4, "shortest": 128, "longest": 512, "tail": 20}
ENGINE = {"max_model_len": 16_384, "max_num_seqs": 16, "kv_cache_memory_bytes": 20 << 30}
TINY_ENGINE = {"num_gpu_blocks_override": 96}
AGAIN = 64  # items that the control answers twice
DRAIN_S = 90.0  # for the requests under way at the end
TRIM_S = 0.5

Found = dict[str, Any]


def trim(folder: Path, capacity_bytes: int) -> None:
    """Delete the oldest files until no more than the capacity is left."""
    found = []
    for path in folder.rglob("*"):
        try:
            status = path.stat()
        except FileNotFoundError:
            continue
        if path.is_file():
            found.append((status.st_mtime, status.st_blocks * 512, path))
    more = sum(size for _, size, _ in found) - capacity_bytes
    for _, size, path in sorted(found):
        if more <= 0:
            break
        path.unlink(missing_ok=True)
        more -= size


class TwoEnginesTrial:
    """One system: both engines, from their start to the end."""

    def __init__(self, setup: EngineSetup, options: argparse.Namespace, system: str, url: str) -> None:
        self._setup, self._options, self._system, self._url = setup, options, system, url
        self.records = options.records / system
        shutil.rmtree(self.records, ignore_errors=True)
        self.records.mkdir(parents=True)
        (self.records / "counter").write_text("0")
        watch = options.watch if system == "kvtier" else 0
        self.facts: Found = {"seconds": options.seconds, "watch": watch, "failed_engines": []}
        self._limit_s = options.timeout + options.seconds + DRAIN_S
        self._engines: list[EngineProcess] = []

    def run(self) -> None:
        """Run it, and leave records and facts. An engine that fails is named in the facts."""
        first = {name: self._start(name, name, []) for name in ENGINES}
        began_s = self._wait_until_ready(first) + 1.0
        until_s = began_s + self._options.seconds
        (self.records / "part").write_text(str(until_s))
        (self.records / "part").rename(self.records / "go")
        time.sleep(max(0.0, (began_s + until_s) / 2 - time.monotonic()))
        first["b"].stop()
        killed_s = time.monotonic()
        lost = lost_items(read_rows(self.records / "b.jsonl"))
        again = self._start("b", "b2", lost)
        for engine in (first["a"], again):
            try:
                found = engine.results(self._limit_s)
                self.facts[engine.name] = {key: found[key] for key in ("start_s", "counters", "process_s")}
            except EngineFailed as error:
                self.facts["failed_engines"].append(str(error))
                print(error, flush=True)
        ready = self.records / "ready-b2"
        away_s = ready.stat().st_mtime - time.time() + time.monotonic() - killed_s if ready.exists() else None
        self.facts |= {
            "began_s": began_s,
            "until_s": until_s,
            "killed_s": killed_s,
            "away_s": away_s,
            "lost": len(lost),
        }
        (self.records / "facts.json").write_text(json.dumps(self.facts))

    def stop(self) -> None:
        for engine in self._engines:
            engine.stop()

    def _start(self, gpu: str, name: str, first: list[int]) -> EngineProcess:
        tiny, folder = self._options.tiny, self._setup.folder
        extra = self._setup.extra | {"index": {"kind": "redis", "url": self._url}} if self._url else {}
        job = self._setup.job(self._system, folder, extra)
        devices = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        job["environment"] |= {"CUDA_VISIBLE_DEVICES": devices[ENGINES.index(gpu)]}
        job["environment"] |= {"PYTHONPATH": os.pathsep.join([*unpacked(self._options.redis), *_python_path()])}
        plan: Found = {key: str(self.records / key) for key in ("go", "counter")}
        plan |= {"ready": str(self.records / f"ready-{name}"), "records": str(self.records / f"{name}.jsonl")}
        plan |= {"first": first, "mix": TINY_MIX if tiny else MIX, "in_flight": 3 if tiny else 16}
        plan["answer"] = 4 if tiny else 32
        steps = [["warm_up", 256 if tiny else 2048], ["serve", plan]]
        if self._system == "none" and name == "a":
            steps.append(["answer_again", plan, 4 if tiny else AGAIN])
        plan["is_watched"] = bool(self.facts["watch"])
        watch = {"watch": 2 if tiny else self.facts["watch"]} if plan["is_watched"] else {}
        process = EngineProcess(
            f"{self._system}-{name}", job | {"steps": steps} | watch, self._setup.logs, self._limit_s
        )
        self._engines.append(process)
        return process

    def _wait_until_ready(self, engines: dict[str, EngineProcess]) -> float:
        deadline = time.monotonic() + self._options.timeout
        while not all((self.records / f"ready-{name}").exists() for name in engines):
            for engine in engines.values():
                if engine.is_over:
                    engine.results(1.0)
            if time.monotonic() > deadline:
                raise EngineFailed(f"engines are not ready after {self._options.timeout:.0f} s: see {self._setup.logs}")
            time.sleep(0.05)
        return time.monotonic()


def _python_path() -> list[str]:
    return list(filter(None, [os.environ.get("PYTHONPATH", "")]))


def read_rows(path: Path) -> list[Found]:
    """Return the lines of an engine's records; the last one of a killed engine may be half a line."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def lost_items(rows: list[Found]) -> list[int]:
    """Return the items that were asked and not answered."""
    answered = {row["item"] for row in rows if "answer" in row}
    return [row["asked"] for row in rows if "asked" in row and row["asked"] not in answered]


def hits_of_the_other(rows: list[Found], chunk: int) -> int:
    """Return the hit tokens of requests on prefixes of which this engine had computed nothing, and the other one had.

    An engine has computed a prefix if a request on it had fewer hits than the prefix has in whole chunks.
    """
    computed: dict[tuple[str, str], float] = {}  # (engine, prefix): since when
    found = 0
    for row in sorted(rows, key=lambda row: row["first_s"]):
        own, other = ((engine, row["prefix"]) for engine in (row["engine"], *(set(ENGINES) - {row["engine"]})))
        hits = min(row["hit_tokens"], row["prefix_tokens"])
        if own not in computed and other in computed:
            found += hits
        if hits < row["prefix_tokens"] // chunk * chunk:
            computed.setdefault(own, row["first_s"])
    return found


def figures(records: Path, chunk: int) -> Found:
    """Return the figures of one system from its records."""
    facts = json.loads((records / "facts.json").read_text())
    logs = {name: read_rows(records / f"{name}.jsonl") for name in ("a", "b", "b2")}
    rows = [row | {"engine": name[0]} for name, log in logs.items() for row in log if "first_s" in row]
    ttft = sorted(row["first_s"] - row["began_s"] for row in rows)
    in_time = [row for row in rows if row["ended_s"] <= facts["until_s"]]
    asked, hits = (sum(row[key] for row in rows) for key in ("tokens", "hit_tokens"))
    blocks = [row["blocks"] for log in logs.values() for row in log if "blocks" in row]
    seen = {kind: [one for block in blocks for one in block[kind]] for kind in ("saved", "loaded")}
    bad = [row for row in rows if row["reason"] != "length"]
    return {
        "requests": len(rows), "requests_s": len(in_time) / facts["seconds"],
        "answer_tokens_s": sum(len(row["answer"]) for row in in_time) / facts["seconds"],
        "asked_tokens": asked, "hit_tokens": hits, "other_hit_tokens": hits_of_the_other(rows, chunk),
        "ttft_p50_s": ttft[len(ttft) // 2], "ttft_p95_s": ttft[int(len(ttft) * 0.95)],
        "failed": len(bad) + len(lost_items(logs["a"])) + len(lost_items(logs["b2"])),
        "after_kill_a": sum(row["began_s"] > facts["killed_s"] for row in rows if row["engine"] == "a"),
        "after_restart_b": sum("answer" in row for row in logs["b2"]),
        "failed_loads": sum(block["failed_loads"] for block in blocks),
        "blocks": compare(seen["saved"], seen["loaded"]), "facts": facts,
    }  # fmt: skip


def answers(path: Path) -> dict[int, list[int]]:
    """Return the answers by item of a file of records, or of all engines of a folder."""
    paths = [path] if path.is_file() else [path / f"{name}.jsonl" for name in ("a", "b", "b2")]
    return {row["item"]: row["answer"] for each in paths for row in read_rows(each) if "answer" in row}


def same_answers(mine: dict[int, list[int]], control: dict[int, list[int]]) -> list[int]:
    """Return (equal answers, items that both answered)."""
    both = mine.keys() & control.keys()
    return [sum(mine[item] == control[item] for item in both), len(both)]


def table_rows(systems: dict[str, Found]) -> report.Table:
    """Return columns and rows, one row a system."""
    columns = ["system", "seconds", "requests", "a second", "hits", "of them stored by the other", "TTFT p50 / p95, ms"]
    cells = []
    for system, found in systems.items():
        of_other = f"{found['other_hit_tokens'] / max(1, found['hit_tokens']):.0%}"
        ttft = f"{report.ms(found['ttft_p50_s'])} / {report.ms(found['ttft_p95_s'])}"
        hits = f"{found['hit_tokens'] / found['asked_tokens']:.0%}"
        counts = [str(found["requests"]), f"{found['requests_s']:.1f}", hits, of_other, ttft]
        blocks = found["blocks"]
        wrong = [report.bold(count) for count in (found["failed"], blocks["wrong"] + blocks["unknown"])]
        cells.append([system, f"{found['facts']['seconds']:.0f}", *counts, wrong[0], f"{blocks['equal']:,}", wrong[1]])
    return [*columns, "failed", "blocks equal", "not equal"], cells


def is_good(one: Found) -> bool:
    """Return whether no request failed, and whether loaded blocks were compared, where they are, and none differs."""
    blocks = one["blocks"]
    is_right = not one["facts"]["watch"] or (blocks["equal"] and not blocks["wrong"])
    return bool(is_right and not one["failed"] and not one["facts"]["failed_engines"])


def run_system(setup: EngineSetup, options: argparse.Namespace, system: str) -> None:
    setup.clear(system)
    with ExitStack() as stack:
        url = ""
        if system == "kvtier":
            port = stack.enter_context(redis_server(options.logs, program=options.redis))
            url = f"redis://127.0.0.1:{port}/0"
        if system == "native":
            data, capacity = setup.folder / system, int(options.capacity_gib * 2**30)
            stack.callback(Sampler(lambda: trim(data, capacity), TRIM_S).close)
        began = time.monotonic()
        trial = TwoEnginesTrial(setup, options, system, url)
        try:
            trial.run()
        except EngineFailed as error:
            print(f"{system}: {error}", flush=True)
        finally:
            trial.stop()
        stored = stored_bytes(setup.folder / system)
        print(f"{system}: {time.monotonic() - began:.0f} s, {stored / 1e9:.1f} GB are stored", flush=True)
    setup.clear(system)


# --- steps, in the engine's process ---


TAKE_S = 2.0  # interval between writes of digests, seconds; a killed engine loses the last
START_TIMEOUT_S = 300.0

Plan = dict[str, Any]
Row = dict[str, Any]


def prefix_of(item: int, mix: dict[str, int]) -> tuple[str, int]:
    """Return name and tokens of the prefix of an item of the list: private, or a document that others share.

    mix: private_every: one item of so many is private; window: documents in use at a time; document_every: items until
    the oldest of them is replaced; shortest, longest: tokens of a prefix; tail: tokens behind it.
    """
    dice = random.Random(f"item-{item}")
    name = f"private-{item}"
    if dice.randrange(mix["private_every"]):
        name = f"document-{item // mix['document_every'] + dice.randrange(mix['window'])}"
    return name, random.Random(name).randint(mix["shortest"], mix["longest"])


def serve(engine: MeasuredEngine, plan: Plan) -> None:
    """Answer items until the time that the file `go` names, and append a line of JSON for each to the records.

    plan: ready, go, counter, records: paths; first: items to answer whatever the time is; in_flight, answer, mix.
    """
    take_turn(engine, plan["ready"], plan["go"], START_TIMEOUT_S)
    until_s = float(Path(plan["go"]).read_text())
    with open(plan["records"], "a", buffering=1) as records:
        _answer(engine, _items(plan, until_s), plan, records)


def answer_again(engine: MeasuredEngine, plan: Plan, count: int) -> None:
    """Answer the first `count` items of the records again, batched otherwise. A control differs from itself, too."""
    done = [row for row in map(json.loads, Path(plan["records"]).read_text().splitlines()) if "answer" in row]
    engine.forget()
    with open(Path(plan["records"]).with_name("again.jsonl"), "w") as records:
        _answer(engine, reversed([row["item"] for row in done[:count]]), plan, records)


def _items(plan: Plan, until_s: float) -> Iterator[int]:
    """Yield the plan's first items and then, while there is time, those that no engine has taken."""
    yield from plan["first"]
    while time.monotonic() < until_s:
        with open(plan["counter"], "r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            item = int(file.read())
            file.seek(0)
            file.write(str(item + 1))
        yield item


def _answer(engine: MeasuredEngine, items: Iterable[int], plan: Plan, records: TextIO) -> None:
    llm, left, under_way = engine.llm.llm_engine, iter(items), dict[int, Row]()
    taken_s, is_watched = time.monotonic(), plan["is_watched"]
    while True:
        while len(under_way) < plan["in_flight"] and (item := next(left, None)) is not None:
            under_way[item] = _ask(engine, item, plan)
            print(json.dumps({"asked": item}), file=records, flush=True)
        if not under_way:
            break
        for output in llm.step():
            item = int(output.request_id.partition("-")[0])
            _note(under_way[item], output)
            if output.finished:
                print(json.dumps(under_way.pop(item)), file=records, flush=True)
        if is_watched and time.monotonic() > taken_s + TAKE_S:
            taken_s = _take(engine, records)
    if is_watched:
        _take(engine, records)


def _ask(engine: MeasuredEngine, item: int, plan: Plan) -> Row:
    name, n_tokens = prefix_of(item, plan["mix"])
    tokens = _prefix(name, n_tokens, engine.vocabulary)
    tokens = tokens + prompt(f"tail-{item}", plan["mix"]["tail"], engine.vocabulary)
    row = {"item": item, "prefix": name, "prefix_tokens": n_tokens, "tokens": len(tokens), "began_s": time.monotonic()}
    request = parameters(plan["answer"], None)
    engine.llm.llm_engine.add_request(str(item), {"prompt_token_ids": tokens}, request)
    return row


@lru_cache(64)
def _prefix(name: str, n_tokens: int, vocabulary: int) -> list[int]:
    return prompt(name, n_tokens, vocabulary)


def _note(row: Row, output: Any) -> None:
    best = output.outputs[0]
    if best.token_ids:
        row.setdefault("first_s", time.monotonic())
    if output.finished:
        row |= {"ended_s": time.monotonic(), "hit_tokens": output.num_cached_tokens or 0}
        row |= {"answer": list(best.token_ids), "reason": str(best.finish_reason)}


def _take(engine: MeasuredEngine, records: TextIO) -> float:
    """Append the digests of blocks that were saved and loaded; return the time."""
    for seen in engine.llm.collective_rpc(inside.take_watch):
        if seen["saved"] or seen["loaded"] or seen["failed_loads"]:
            print(json.dumps({"blocks": seen}), file=records, flush=True)
    return time.monotonic()


def main() -> int:
    made = parser("gpu.two_engines", __doc__, 240.0)
    add_timed_engine(made, 0.7)
    made.add_argument("--systems", default="kvtier,none,native", help="separated by commas")
    made.add_argument("--seconds", type=float, default=600.0, help="of each system, starts left out")
    made.add_argument(
        "--redis", type=lambda text: Path(text).resolve(), help="folder with redis-server, if it is not installed"
    )
    made.add_argument("--watch", type=int, default=16, help="of so many chunks one is compared; 0: none, to time it")
    made.add_argument("--capacity-gib", type=float, default=100.0, help="of the tier on --folder")
    made.add_argument("--records", type=Path, default=Path("/tmp/bench/two-engines"))
    options = made.parse_args()
    setup = EngineSetup.timed(options)
    setup = replace(setup, llm=setup.llm | (TINY_ENGINE if options.tiny else ENGINE))
    setup.extra["capacity_bytes"] = int(options.capacity_gib * 2**30)
    if not options.tiny:
        setup.extra.setdefault("host", {"arena_bytes": NATIVE_CPU_BYTES})  # both systems have as much host memory
    options.logs.mkdir(parents=True, exist_ok=True)
    for system in options.systems.split(","):
        run_system(setup, options, system)
    chunk = int(setup.extra.get("chunk_tokens", 256))
    folders = {path.parent.name: path.parent for path in sorted(options.records.glob("*/facts.json"))}
    found = {system: figures(folder, chunk) for system, folder in folders.items()}
    given = {system: answers(folder) for system, folder in folders.items()}
    for system, one in found.items():
        again = answers(folders["none"] / "again.jsonl") if system == "none" else given[system]
        one["same_answers"] = same_answers(again, given.get("none", {}))
    report.write(options.out, QUESTION, {"mix": TINY_MIX if options.tiny else MIX, "systems": found}, "redis")
    report.table(*table_rows(found))
    for system, one in found.items():
        facts, away = one["facts"], one["facts"]["away_s"]
        gone = "never" if away is None else f"{away:.0f} s later"
        print(
            f"{system}: b was killed with {facts['lost']} requests and back {gone}; after it a took "
            f"{one['after_kill_a']} requests, b {one['after_restart_b']}; {one['failed_loads']} loads failed; "
            "{} of {} answers as without a tier".format(*one["same_answers"])
        )
    ran = options.systems.split(",")
    good = all(system in found and is_good(found[system]) for system in ran)
    print("GOOD" if good else "NOT GOOD")
    return int(not good)


if __name__ == "__main__":
    raise SystemExit(main())
