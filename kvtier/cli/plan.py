"""`kvtier plan --model DIR --gpu-memory 141GB`: size, capacity and cost of a model's KV. Computed, nothing measured.

Sizes are as in settings ("141GB" counts in 1000s, "64GiB" in 1024s); rates are sizes a second ("2GB/s"), or bits
("16Gbit/s").
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from kvtier.cli.app import app
from kvtier.cli.place import JsonOption
from kvtier.cli.plan_text import plan_values, print_plan
from kvtier.config.settings import CHUNK_TOKENS_UNIT
from kvtier.config.types import parse_bytes
from kvtier.errors import ConfigError
from kvtier.planner.capacity import EngineSizes, TransferRates
from kvtier.planner.figures import CapacityPlan, PlanRequest, make_plan
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json

T = TypeVar("T")
_RATE = re.compile(r"(?P<size>[\d.]+\s*(?:[KMGT]i?)?)(?P<unit>B|bits?)?/s", re.IGNORECASE)

# Seconds that a reload takes beside its bytes at the transfer's rate. On one H200 with Llama-3.1-8B's dimensions the
# reloads of benchmarks/results/gpu/versus.json take 18 ms more than that at 8,192 tokens and 84 ms at 100,000, most of
# it the floor that a hit in the engine's own cache has too.
LOAD_OVERHEAD = "0.02"
GPU_BYTES_MIN = 1 << 30  # least memory of a GPU, bytes
PLAIN_BYTES_MIN = 1 << 20  # least size without a unit, bytes: 40 is meant as 40 GiB
BYTES_MAX, DIGITS_MAX = 1 << 60, 15  # largest size, and digits of the largest count; more is a slip
STEP_TOKENS = 8192  # vLLM's usual max_num_batched_tokens of a server on a large GPU


@app.command("plan", epilog=MEANINGS)
def plan(
    model: Annotated[str, typer.Option(metavar="DIR", help="Folder of a Hugging Face model: config.json is enough.")],
    gpu_memory: Annotated[str, typer.Option(metavar="SIZE", help="Memory of one GPU, as 141GB.")],
    tensor_parallel: Annotated[str, typer.Option(metavar="N")] = "1",
    pipeline_parallel: Annotated[str, typer.Option(metavar="N")] = "1",
    gpu_memory_utilization: Annotated[str, typer.Option(metavar="F", help="The engine's share of it.")] = "0.9",
    reserve: Annotated[str, typer.Option(metavar="SIZE", help="Of that, for activations and CUDA graphs.")] = "4GiB",
    kv_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="In which the engine keeps KV.")] = "auto",
    chunk_tokens: Annotated[str, typer.Option(metavar="N", help="As in the settings.")] = "256",
    max_num_batched_tokens: Annotated[str, typer.Option(metavar="N", help="Of a step.")] = str(STEP_TOKENS),
    hbm_staging: Annotated[
        str | None, typer.Option(metavar="SIZE", help="hbm.staging_bytes of the settings; without it, by the step.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Of the host arena of each rank.")] = None,
    storage: Annotated[str | None, typer.Option(metavar="SIZE", help="Of the root.")] = None,
    storage_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="At which all ranks together read it, as 2GB/s or 16Gbit/s.")
    ] = None,
    pcie_rate: Annotated[
        str | None, typer.Option(metavar="RATE", help="From host memory to one GPU, as 55GB/s.")
    ] = None,
    tflops: Annotated[str | None, typer.Option(metavar="F", help="What one GPU achieves in a prefill.")] = None,
    prefill_rate: Annotated[
        str | None,
        typer.Option(metavar="RATE@N", help="Instead: tokens a second of a prompt of N tokens, as 40000@8192."),
    ] = None,
    load_overhead: Annotated[str, typer.Option(metavar="S", help="Seconds that any load takes.")] = LOAD_OVERHEAD,
    context: Annotated[
        str | None, typer.Option(metavar="N", help="Tokens to reload; without it, the model's longest context.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compute what KV of a model takes, what fits, what a reload costs."""
    if tflops is not None and prefill_rate is not None:
        raise ConfigError("--prefill-rate", prefill_rate, "it stands for --tflops: give one of them")
    engine = EngineSizes(
        tensor_size=_count("--tensor-parallel", tensor_parallel),
        pipeline_size=_count("--pipeline-parallel", pipeline_parallel),
        gpu_bytes=_gpu_bytes("--gpu-memory", gpu_memory),
        utilization=_number("--gpu-memory-utilization", gpu_memory_utilization, 1.0),
        reserve_bytes=_bytes("--reserve", reserve),
    )
    asked = PlanRequest(
        model=Path(model),
        engine=engine,
        kv_dtype=kv_dtype,
        chunk_tokens=_chunk_tokens("--chunk-tokens", chunk_tokens),
        step_tokens=_count("--max-num-batched-tokens", max_num_batched_tokens),
        staging_bytes=_given("--hbm-staging", hbm_staging, _bytes),
        host_bytes=_given("--host-memory", host_memory, _bytes),
        storage_bytes=_given("--storage", storage, _bytes),
        rates=TransferRates(_given("--storage-rate", storage_rate, _rate), _given("--pcie-rate", pcie_rate, _rate)),
        tflops=_given("--tflops", tflops, _number),
        prefill_rate=_given("--prefill-rate", prefill_rate, _rate_at),
        load_overhead_s=_number("--load-overhead", load_overhead),
        context=_given("--context", context, _count),
    )
    return _print(make_plan(asked), as_json)


def _print(found: CapacityPlan, as_json: bool) -> int:
    if as_json:
        print_json(plan_values(found))
    else:
        print_plan(found)
    return FOUND_BAD if all(codec.staging.fault for codec in found.codecs.values()) else OK


def _given(option: str, text: str | None, read: Callable[[str, str], T]) -> T | None:
    return None if text is None else read(option, text)


def _count(option: str, text: str, least: int = 1) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS_MAX or int(text) < least:
        raise ConfigError(option, text, f"it must be a whole number, {least} or more, of {DIGITS_MAX} digits at most")
    return int(text)


def _chunk_tokens(option: str, text: str) -> int:
    found = _count(option, text)
    if found % CHUNK_TOKENS_UNIT:
        raise ConfigError(option, found, f"it must be a multiple of {CHUNK_TOKENS_UNIT}")
    return found


def _number(option: str, text: str, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most or value == math.inf:
        raise ConfigError(
            option, text, "it must be a number above 0" + (f", {most:g} at most" if most < math.inf else "")
        )
    return value


def _bytes(option: str, text: str) -> int:
    try:
        n_bytes = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(option, text, str(error)) from None
    if n_bytes <= 0:
        raise ConfigError(option, text, "it must be above 0")
    if n_bytes > BYTES_MAX:
        raise ConfigError(option, text, f"it must be {BYTES_MAX >> 40}TiB at most")
    if n_bytes < PLAIN_BYTES_MIN and text.strip().isdigit():
        raise ConfigError(option, text, f"that is {n_bytes} bytes: give the unit too, as 64GiB")
    return n_bytes


def _gpu_bytes(option: str, text: str) -> int:
    n_bytes = _bytes(option, text)
    if n_bytes < GPU_BYTES_MIN:
        raise ConfigError(option, text, f"that is {n_bytes} bytes: give the unit too, as 141GB")
    return n_bytes


def _rate(option: str, text: str) -> float:
    """Read a rate, as bytes a second. Bits need their full name, because "Gb" is written for either."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise ConfigError(option, text, 'it must be a size a second, such as "2GB/s", or in bits "16Gbit/s"')
    unit = found["unit"] or ""
    if unit == "b":
        raise ConfigError(option, text, 'is that bytes or bits? write "GB/s" for bytes, "Gbit/s" for bits')
    try:
        rate = float(_bytes(option, found["size"] + ("B" if unit else "")))
    except ConfigError as fault:
        raise ConfigError(option, text, fault.fix) from None
    return rate / 8 if unit.lower().startswith("bit") else rate


def _rate_at(option: str, text: str) -> tuple[float, int]:
    """Read (tokens a second, length of the prompt in tokens)."""
    rate, at, tokens = text.partition("@")
    if not at:
        raise ConfigError(option, text, "name the length too, as 40000@8192: long prompts are slower a token")
    return _number(option, rate), _count(option, tokens)
