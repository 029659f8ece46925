"""Cost of saving for the engine, and the rate at which it becomes durable.

    python -m benchmarks.gpu.save_cost --folder /mnt/disk/kv --out OUT/save_cost.json [--parts ttft,decode,burst]

Cold time to the first token with saving on against off, in turn, prompts that share nothing. Tokens a second of a batch
of 32 that decodes (by CUDA graphs) while a long prompt is computed and until it is durable, saved or not in turn, in
windows of one length. Durable bytes a second when more is offered than the storage takes, against direct writes.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks import report
from benchmarks.gpu.ceilings import direct_writes
from benchmarks.gpu.engine import NO_TIER, MeasuredEngine, parameters
from benchmarks.gpu.models import prompt
from benchmarks.gpu.setup import EngineSetup, add_timed_engine, parser
from benchmarks.report import ms

WINDOW_LIMIT_S = 24.0
# Steps that only decode run as one graph, or the pace of Python decides how many there are; a prefill runs eagerly, and
# nothing is compiled.
DECODE_GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32]}


def summary(result: dict[str, Any], write_bytes_s: float) -> dict[str, Any]:
    """Return the figures of the parts that ran; a loss is in percent of the value without saving."""
    found: dict[str, Any] = {"direct_write_bytes_s": write_bytes_s}
    if "saving_on_and_off" in result:
        on, off = ([row["ttft_s"] for row in result["saving_on_and_off"][kind]] for kind in ("on", "off"))
        counted = [row["counted"] for row in result["saving_on_and_off"]["on"]]
        found |= {
            "ttft_on_s": median(on),
            "ttft_off_s": median(off),
            "ttft_loss_percent": 100 * (median(on) / median(off) - 1),
            "ttft_all": {"on": on, "off": off},
            "skipped_chunks": sum(value for one in counted for name, value in one.items() if "skip" in name),
        }
    if "decode_windows" in result:
        found["decode"] = decode_summary(result["decode_windows"])
    if "write_burst" in result:
        durable = result["write_burst"]["bytes_s"]
        found |= {"durable_bytes_s": durable, "durable_percent_of_direct": 100 * durable / write_bytes_s}
    return found


def decode_summary(windows: dict[str, Any]) -> dict[str, Any]:
    """Compare the pairs of windows. off_spread_percent: of windows without saving, the noise.

    is_durable_within: in all windows with saving, the long prompt was stored whole before the end.
    """
    pairs = windows["pairs"]
    on, off = ([pair[kind]["tokens_s"] for pair in pairs] for kind in ("on", "off"))
    losses = [100 * (1 - a / b) for a, b in zip(on, off, strict=True)]
    return {
        "window_s": windows["window_s"],
        "on_tokens_s": median(on),
        "off_tokens_s": median(off),
        "loss_percent": median(losses),
        "all_loss_percent": losses,
        "on_all": on,
        "off_all": off,
        "off_spread_percent": 100 * (max(off) - min(off)) / median(off),
        "is_durable_within": all(have == of for have, of in (pair["on"]["stored_chunks"] for pair in pairs)),
    }


def table_rows(found: dict[str, Any]) -> report.Table:
    """Return columns and rows, one row a part that ran."""
    rows = []
    if "ttft_on_s" in found:
        values = f"{ms(found['ttft_on_s'])} / {ms(found['ttft_off_s'])} ms"
        rows.append(["cold TTFT, saving on / off", values, f"{found['ttft_loss_percent']:+.1f}%", "1.5%"])
    if "decode" in found:
        decode = found["decode"]
        values = f"{decode['on_tokens_s']:,.0f} / {decode['off_tokens_s']:,.0f}"
        loss = f"{-decode['loss_percent']:+.1f}%"
        rows.append(["decode batch, saving on / off, tokens/s", values, loss, "-3%"])
    if "durable_bytes_s" in found:
        values = f"{found['durable_bytes_s'] / 1e9:.2f} / {found['direct_write_bytes_s'] / 1e9:.2f}"
        rows.append(["durable / direct writes, GB/s", values, f"{found['durable_percent_of_direct']:.0f}%", "85%"])
    return ["measure", "values", "ratio", "goal"], rows


# --- steps, in the engine's process ---


PROMPT_TOKENS = 256
TOKENS_MAX = 6000  # most tokens of each answer
SETTLED_TOKENS = 4  # tokens of each answer before the long prompt is asked
POLL_S = 0.25  # interval between checks whether the long prompt is durable, seconds
LONGER = 1.5  # length of a window, in times of a save in the trial: a disk's rate varies


@dataclass(frozen=True)
class DecodeLoad:
    """batch: requests that decode; long_tokens: tokens of the long prompt; limit_s: longest window."""

    batch: int
    long_tokens: int
    limit_s: float


def decode_windows(engine: MeasuredEngine, batch: int, long_tokens: int, pairs: int, limit_s: float) -> dict[str, Any]:
    """Measure tokens a second of a batch while a long prompt is computed and until it is durable, saved and not saved
    in turn. A trial that is not counted sets the windows' length. Each pair goes in the other order."""
    load = DecodeLoad(batch, long_tokens, limit_s)
    trial = _Window(engine, load, "trial", True).run(None)
    length_s = min(limit_s, LONGER * trial["elapsed_s"])
    counted = []
    for number in range(pairs):
        kinds = ("on", "off") if number % 2 == 0 else ("off", "on")
        counted.append({kind: _Window(engine, load, f"{number}-{kind}", kind == "on").run(length_s) for kind in kinds})
    return {"trial": trial, "window_s": length_s, "pairs": counted}


class _Window:
    """One window, from the arrival of the long prompt; all its requests are saved, or none."""

    def __init__(self, engine: MeasuredEngine, load: DecodeLoad, name: str, is_saved: bool) -> None:
        self._engine, self._load, self._name, self._is_saved = engine, load, name, is_saved
        self._llm = engine.llm.llm_engine
        self._ids = [self._add(f"decode-{n}", PROMPT_TOKENS, TOKENS_MAX)[0] for n in range(load.batch)]
        self._counts = dict.fromkeys(self._ids, 0)

    def run(self, length_s: float | None) -> dict[str, Any]:
        """Run for so long; None: until the long prompt is durable, at most the load's limit. End all requests."""
        while min(self._counts.values()) < SETTLED_TOKENS:
            self._step()
        long_id, long_tokens = self._add("long", self._load.long_tokens, 1)
        started, first = time.perf_counter(), sum(self._counts.values())
        while long_id not in self._step():
            pass
        prefilled = time.perf_counter()
        end = started + (self._load.limit_s if length_s is None else length_s)
        next_poll = prefilled if length_s is None else end
        while time.perf_counter() < end:
            self._step()
            if time.perf_counter() >= next_poll:
                stored, wanted = self._engine.stored_chunks(long_tokens)
                if stored == wanted:
                    break
                next_poll += POLL_S
        elapsed_s, total = time.perf_counter() - started, sum(self._counts.values()) - first
        chunks = self._engine.stored_chunks(long_tokens) if self._is_saved else None
        self._llm.abort_request(self._ids)
        while self._llm.has_unfinished_requests():
            self._step()
        found = {"elapsed_s": elapsed_s, "long_ttft_s": prefilled - started, "tokens": total}
        found |= {"tokens_s": total / elapsed_s, "stored_chunks": chunks, "settle_s": self._engine.settle()}
        self._engine.forget()
        return found

    def _add(self, name: str, n_tokens: int, max_tokens: int) -> tuple[str, list[int]]:
        full = f"{self._name}-{name}"
        tokens = prompt(full, n_tokens, self._engine.vocabulary)
        switches = {"kvtier_load": False} if self._is_saved else NO_TIER
        self._llm.add_request(full, {"prompt_token_ids": tokens}, parameters(max_tokens, switches))
        return full, tokens

    def _step(self) -> set[str]:
        """Run a step and return the ids of the requests that ended in it."""
        ended = set()
        for output in self._llm.step():
            if output.request_id in self._counts:
                self._counts[output.request_id] = len(output.outputs[0].token_ids)
            if output.finished:
                ended.add(output.request_id)
        return ended


def main() -> int:
    made = parser("gpu.save_cost", __doc__, 385.0)
    add_timed_engine(made, 0.7)
    made.add_argument("--length", type=int, help="tokens of the long prompts")
    made.add_argument("--pairs", type=int, default=3, help="of cold prompts")
    made.add_argument("--decode-pairs", type=int, default=5, help="of windows of the decoding batch")
    made.add_argument("--parts", default="ttft,decode,burst", help="which of these, separated by commas")
    options = made.parse_args()
    setup, tiny = EngineSetup.timed(options), options.tiny
    length = options.length or (700 if tiny else 100_000)
    setup.clear()
    writes = direct_writes(setup.folder, (64 << 20) if tiny else (8 << 30))
    if not (tiny or options.eager):
        setup.llm.update(enforce_eager=False, compilation_config=DECODE_GRAPHS)
    # What is saved stays within a capacity that the disk has; it is evicted as the run goes on.
    extra = {} if tiny else {"capacity_bytes": shutil.disk_usage(setup.folder).free * 2 // 3}
    every: dict[str, list[Any]] = {
        "ttft": ["saving_on_and_off", length, options.pairs],
        "decode": ["decode_windows", 4 if tiny else 32, length, options.decode_pairs, WINDOW_LIMIT_S],
        "burst": ["write_burst", *((256, 4, 0.5) if tiny else (8192, 40, 4.0))],
    }
    steps = [["warm_up", 256 if tiny else 2048], *(every[part] for part in options.parts.split(","))]
    result = setup.run("save-cost", "kvtier", steps, extra)
    setup.clear()
    found = summary(result, writes["bytes_s"])
    content = {"folder": str(setup.folder), "length": length, "summary": found, "writes": writes, "results": result}
    report.write(options.out, "what saving costs, and how fast it is durable", content)
    report.table(*table_rows(found))
    if "skipped_chunks" in found:
        print(f"chunks skipped in cold prompts: {found['skipped_chunks']:.0f}")
    if "decode" in found:
        decode = found["decode"]
        losses = " ".join(f"{loss:.1f}" for loss in decode["all_loss_percent"])
        print(f"each pair's loss in decoding, %: {losses} (noise {decode['off_spread_percent']:.1f})")
        print(f"durable within the window: {'yes' if decode['is_durable_within'] else 'NO'}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
