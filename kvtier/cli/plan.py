"""`kvtier plan --model DIR --gpu-memory 141GB`: what KV of a model takes, fits and costs. Computed, nothing measured.

Sizes are as in settings ("141GB" counts in 1000s, "64GiB" in 1024s); rates are sizes a second ("2GB/s"), or
bits ("16Gbit/s").
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from kvtier.cli.plan_text import plan_lines, plan_values
from kvtier.config.settings import CHUNK_TOKENS_UNIT
from kvtier.config.types import parse_bytes
from kvtier.errors import ConfigError
from kvtier.planner.capacity import Engine, Rates
from kvtier.planner.figures import Asked, make_plan
from kvtier.runtime.exit_status import FOUND_BAD, OK, print_json

T = TypeVar("T")
_RATE = re.compile(r"(?P<size>[\d.]+\s*(?:[KMGT]i?)?)(?P<unit>B|bits?)?/s", re.IGNORECASE)

# Seconds that a reload takes beside its bytes at the transfer's rate. On one H200 with Llama-3.1-8B's dimensions the
# reloads of benchmarks/results/gpu/versus.json take 18 ms more than that at 8,192 tokens and 84 ms at 100,000, most of
# it the floor that a hit in the engine's own cache has too.
LOAD_OVERHEAD_S = 0.02
GPU_BYTES_MIN = 1 << 30
PLAIN_BYTES_MIN = 1 << 20
"""Of a size without a unit: who writes 40 means 40 GiB, not that nothing fits."""
BYTES_MAX, DIGITS_MAX = 1 << 60, 15
"""Larger numbers are slips, and floats do not hold them all."""
STEP_TOKENS = 8192
"""vLLM's usual max_num_batched_tokens on a large GPU, when it serves."""


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="folder of a Hugging Face model: config.json is enough")
    add("--gpu-memory", required=True, metavar="SIZE", help="of one GPU, as 141GB")
    add("--tensor-parallel", default="1", metavar="N")
    add("--pipeline-parallel", default="1", metavar="N")
    add("--gpu-memory-utilization", default="0.9", metavar="F", help="the engine's share of it (default 0.9)")
    add("--reserve", default="4GiB", metavar="SIZE", help="of that, for activations and CUDA graphs (default 4GiB)")
    add("--kv-dtype", default="auto", choices=("auto", "fp8"), help="in which the engine keeps KV")
    add("--chunk-tokens", default="256", metavar="N", help="as in the settings (default 256)")
    add("--codec-boundary-layers", default="0", metavar="N", help="as in the settings (default 0)")
    usual_step = STEP_TOKENS
    add("--max-num-batched-tokens", default=str(usual_step), metavar="N", help=f"of a step (default {usual_step})")
    add("--hbm-staging", metavar="SIZE", help="hbm.staging_bytes of the settings (default: as there, by the step)")
    add("--host-memory", metavar="SIZE", help="of the host arena of each rank")
    add("--storage", metavar="SIZE", help="of the root")
    add("--storage-rate", metavar="RATE", help="at which all ranks together read it, as 2GB/s or 16Gbit/s")
    add("--pcie-rate", metavar="RATE", help="from host memory to one GPU, as 55GB/s")
    add("--tflops", metavar="F", help="what one GPU achieves in a prefill")
    add("--prefill-rate", metavar="RATE@N", help="instead: tokens a second of a prompt of N tokens, as 40000@8192")
    usual_s = LOAD_OVERHEAD_S
    add("--load-overhead", default=str(usual_s), metavar="S", help=f"seconds that any load takes (default {usual_s})")
    add("--context", metavar="N", help="tokens to reload (default: the longest context of the model)")


def run_plan(options: argparse.Namespace) -> int:
    plan = make_plan(_read(options))
    if options.json:
        print_json(plan_values(plan))
    else:
        print("\n".join(plan_lines(plan)))
    return FOUND_BAD if all(found.staging.fault for found in plan.codecs.values()) else OK


def _read(options: argparse.Namespace) -> Asked:
    """Raises ConfigError with the option, its value and the fix."""
    if options.tflops is not None and options.prefill_rate is not None:
        raise ConfigError("--prefill-rate", options.prefill_rate, "it stands for --tflops: give one of them")
    engine = Engine(
        tensor_size=_count("--tensor-parallel", options.tensor_parallel),
        pipeline_size=_count("--pipeline-parallel", options.pipeline_parallel),
        gpu_bytes=_gpu_bytes("--gpu-memory", options.gpu_memory),
        utilization=_number("--gpu-memory-utilization", options.gpu_memory_utilization, 1.0),
        reserve_bytes=_bytes("--reserve", options.reserve),
    )
    chunk_tokens = _count("--chunk-tokens", options.chunk_tokens)
    if chunk_tokens % CHUNK_TOKENS_UNIT:
        raise ConfigError("--chunk-tokens", chunk_tokens, f"it must be a multiple of {CHUNK_TOKENS_UNIT}")
    return Asked(
        model=Path(options.model),
        engine=engine,
        kv_dtype=options.kv_dtype,
        chunk_tokens=chunk_tokens,
        boundary_layers=_count("--codec-boundary-layers", options.codec_boundary_layers, least=0),
        step_tokens=_count("--max-num-batched-tokens", options.max_num_batched_tokens),
        staging_bytes=_given("--hbm-staging", options.hbm_staging, _bytes),
        host_bytes=_given("--host-memory", options.host_memory, _bytes),
        storage_bytes=_given("--storage", options.storage, _bytes),
        rates=Rates(
            _given("--storage-rate", options.storage_rate, _rate), _given("--pcie-rate", options.pcie_rate, _rate)
        ),
        tflops=_given("--tflops", options.tflops, _number),
        prefill_rate=_given("--prefill-rate", options.prefill_rate, _rate_at),
        load_overhead_s=_number("--load-overhead", options.load_overhead),
        context=_given("--context", options.context, _count),
    )


def _given(option: str, text: str | None, read: Callable[[str, str], T]) -> T | None:
    return None if text is None else read(option, text)


def _count(option: str, text: str, least: int = 1) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > DIGITS_MAX or int(text) < least:
        raise ConfigError(option, text, f"it must be a whole number, {least} or more, of {DIGITS_MAX} digits at most")
    return int(text)


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
    """Bytes a second; bits are said in full, for "Gb" is written for either."""
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
    """(tokens a second, of a prompt of so many tokens)"""
    rate, at, tokens = text.partition("@")
    if not at:
        raise ConfigError(option, text, "name the length too, as 40000@8192: long prompts are slower a token")
    return _number(option, rate), _count(option, tokens)
