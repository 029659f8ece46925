"""`kvtier plan --model DIR --gpu-memory 141GB`: size, capacity and cost of a model's KV. Computed, nothing measured.

Sizes are as in settings ("141GB" counts in 1000s, "64GiB" in 1024s); rates are sizes a second ("2GB/s"), or bits
("16Gbit/s").
"""

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kvtier.cli.app import app
from kvtier.cli.place import JsonOption
from kvtier.cli.prompts import size_argument
from kvtier.cli.tables import print_table
from kvtier.codecs.measured_loss import KL_NATS, MODELS, losses_line
from kvtier.config.settings import CHUNK_TOKENS_UNIT
from kvtier.errors import ConfigError
from kvtier.planner.capacity import EngineSizes, TransferRates
from kvtier.planner.figures import CapacityPlan, CodecPlan, PlanRequest, PrefillRate, make_plan
from kvtier.runtime.exit_status import FOUND_BAD, MEANINGS, OK, print_json
from kvtier.runtime.units import counted, significant, size

_RATE = re.compile(r"(?P<size>[\d.]+\s*(?:[KMGT]i?)?)(?P<unit>B|bits?)?/s", re.IGNORECASE)

BYTES_MIN, BYTES_MAX = 1 << 20, 1 << 60  # accepted sizes, bytes; a bare 40, meant as 40 GiB, is refused
COUNT_MAX = 10**9  # largest accepted count; a larger one is a typing error

Column = tuple[str, Callable[[CodecPlan], str]]


def _size(text: str) -> int:
    n_bytes = size_argument(text)
    if not BYTES_MIN <= n_bytes <= BYTES_MAX:
        raise typer.BadParameter(f"{text!r:.40}: it must be 1MiB to {BYTES_MAX >> 40}TiB; give the unit too, as 64GiB")
    return n_bytes


def _positive(text: str, most: float = math.inf) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= most or value == math.inf:
        limit = f", {most:g} at most" if most < math.inf else ""
        raise typer.BadParameter(f"{text!r}: it must be a number above 0{limit}")
    return value


def _share(text: str) -> float:
    return _positive(text, most=1.0)


def _rate(text: str) -> float:
    """Read a rate, as bytes a second. Bits need their full name, because "Gb" is used for bits and for bytes."""
    found = _RATE.fullmatch(text.strip())
    if found is None:
        raise typer.BadParameter(f'{text!r}: it must be a size a second, such as "2GB/s", or in bits "16Gbit/s"')
    unit = found["unit"] or ""
    if unit == "b":
        raise typer.BadParameter(f'{text!r}: is that bytes or bits? write "GB/s" for bytes, "Gbit/s" for bits')
    n_bytes = size_argument(found["size"] + ("B" if unit else ""))
    if not 0 < n_bytes <= BYTES_MAX:
        raise typer.BadParameter(f"{text!r:.40}: it must be above 0, and {BYTES_MAX >> 40}TiB/s at most")
    return n_bytes / 8 if unit.lower().startswith("bit") else float(n_bytes)


def _rate_at(text: str) -> PrefillRate:
    rate, _, tokens = text.partition("@")
    if not tokens.isdecimal() or not 0 < int(tokens) <= COUNT_MAX:
        raise typer.BadParameter(f"{text!r}: name the length too, as 40000@8192: long prompts are slower a token")
    return PrefillRate(_positive(rate), int(tokens))


def _option(metavar: str, parser: Callable[[str], Any], text: str) -> Any:
    return typer.Option(metavar=metavar, parser=parser, help=text)


Count = Annotated[int, typer.Option(metavar="N", min=1, max=COUNT_MAX)]


@app.command("plan", epilog=MEANINGS)
def plan(
    model: Annotated[Path, typer.Option(metavar="DIR", help="Folder of a Hugging Face model: config.json is enough.")],
    gpu_memory: Annotated[int, _option("SIZE", _size, "Memory of one GPU, as 141GB.")],
    tensor_parallel: Count = 1,
    pipeline_parallel: Count = 1,
    gpu_memory_utilization: Annotated[float, _option("F", _share, "Share of that memory that the engine takes.")] = 0.9,
    reserve: int = typer.Option(
        "4GiB", metavar="SIZE", parser=_size, help="Part of the engine's share for activations and CUDA graphs."
    ),
    kv_dtype: Annotated[Literal["auto", "fp8"], typer.Option(help="Dtype in which the engine keeps KV.")] = "auto",
    chunk_tokens: Annotated[int, typer.Option(metavar="N", min=1, max=COUNT_MAX, help="Tokens of a chunk.")] = 256,
    max_num_batched_tokens: Annotated[
        int, typer.Option(metavar="N", min=1, max=COUNT_MAX, help="Most tokens of a step.")
    ] = 8192,
    hbm_staging: Annotated[
        int | None,
        _option("SIZE", _size, "hbm.staging_bytes of the settings; without it, derived from the tokens of a step."),
    ] = None,
    host_memory: Annotated[int | None, _option("SIZE", _size, "Host arena of each rank.")] = None,
    storage: Annotated[int | None, _option("SIZE", _size, "Storage of the root.")] = None,
    storage_rate: Annotated[
        float | None, _option("RATE", _rate, "Rate at which all ranks together read the root, as 2GB/s or 16Gbit/s.")
    ] = None,
    pcie_rate: Annotated[float | None, _option("RATE", _rate, "Rate from host memory to one GPU, as 55GB/s.")] = None,
    prefill_rate: Annotated[
        PrefillRate | None, _option("RATE@N", _rate_at, "Tokens a second of a prefill of N tokens, as 40000@8192.")
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, max=COUNT_MAX, help="Tokens to reload; without it, the model's longest context."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Compute what KV of a model takes, what fits, what a reload costs."""
    if chunk_tokens % CHUNK_TOKENS_UNIT:
        raise ConfigError("--chunk-tokens", chunk_tokens, f"it must be a multiple of {CHUNK_TOKENS_UNIT}")
    asked = PlanRequest(
        model=model,
        engine=EngineSizes(tensor_parallel, pipeline_parallel, gpu_memory, gpu_memory_utilization, reserve),
        kv_dtype=kv_dtype,
        chunk_tokens=chunk_tokens,
        step_tokens=max_num_batched_tokens,
        staging_bytes=hbm_staging,
        host_bytes=host_memory,
        storage_bytes=storage,
        rates=TransferRates(storage_rate, pcie_rate),
        prefill_rate=prefill_rate,
        context=context,
    )
    found = make_plan(asked)
    if as_json:
        print_json(_values(found))
    else:
        _print(found)
    return FOUND_BAD if all(codec.staging.fault for codec in found.codecs.values()) else OK


def _values(plan: CapacityPlan) -> dict[str, Any]:
    """Return the fields of a CapacityPlan, and figures derived from them, for JSON."""
    values = asdict(plan)
    del values["model"]["text"]
    experts = values["model"]["experts"]
    if experts is not None:
        experts["sparse"] = sorted(experts["sparse"])
    values["weights"] = plan.weights._asdict()
    values["hbm"]["tokens"] = plan.hbm.tokens
    values["geometry"]["token_bytes"] = plan.geometry.token_bytes
    for name, found in plan.codecs.items():
        values["codecs"][name]["chunk"]["token_bytes"] = found.chunk.token_bytes
        values["codecs"][name]["staging"] = found.staging._asdict()
        if name in KL_NATS:
            values["codecs"][name]["kl_nats"] = dict(zip(MODELS, KL_NATS[name], strict=True))
    return values


def _print(plan: CapacityPlan) -> None:
    for line in _facts(plan):
        print(line)
    for title, columns in (
        ("what KV takes, by codec", _sizes(plan)),
        (f"reload of {plan.context:,} tokens, by codec", _times(plan)),
    ):
        if columns:
            print(f"\n{title}:")
            rows = [(name, *(text(found) for _, text in columns)) for name, found in plan.codecs.items()]
            print_table([("codec", *(title for title, _ in columns)), *rows], right=range(1, len(columns) + 1))
    print(losses_line(plan.codecs))
    not_fitting = {name: found.staging.fault for name, found in plan.codecs.items() if found.staging.fault is not None}
    for names, reason in _together(plan.refused | not_fitting):
        print(f"not with {', '.join(names)}: {reason}")
    print()
    for text in plan.assumptions:
        print(f"assumed: {text}")


def _facts(plan: CapacityPlan) -> Iterator[str]:
    model, shape, engine, hbm = plan.model, plan.geometry, plan.engine, plan.hbm
    heads = f"{counted(shape.kv_heads, 'KV head')} of {shape.k_head_size} ({model.attention.heads} of queries)"
    if shape.attention == "mla":
        heads = f"one latent vector of {shape.k_head_size} (MLA)"
    yield f"model: {model.family}, {counted(shape.layers, 'layer')}, {heads}"
    yield f"KV: {shape.token_bytes:,} bytes a token, in {shape.dtype}"
    active = f", {plan.active_parameters / 1e9:.2f}e9 of layers for each token" if model.experts else ""
    yield f"weights: {size(plan.weights.n_bytes)} {plan.weights.source}"
    yield f"parameters: {plan.parameters / 1e9:.2f}e9{active}"
    if engine.ranks > 1:
        yield f"ranks: {engine.tensor_size} tensor x {engine.pipeline_size} pipeline; HBM is of the one with least room"
    yield (
        f"HBM: {size(engine.gpu_bytes)} x {engine.utilization:g} - {size(hbm.weights_bytes)} weights - "
        f"{size(engine.reserve_bytes)} reserve = {size(hbm.kv_bytes)}, at {hbm.token_bytes:,} bytes a token"
    )
    longest = model.max_tokens
    fits = f": {hbm.tokens / longest:.1f} requests of the model's longest context, {longest:,}" if longest else ""
    yield f"context: {hbm.tokens:,} tokens in HBM{fits}"
    yield f"outside of the engine's share: {size(hbm.outside_bytes)} of each GPU, {_staging(plan)}"
    rate = "give --prefill-rate for its time" if plan.prefill_s is None else f"{_seconds(plan.prefill_s)}"
    yield f"prefill of {counted(plan.context, 'token')}: {plan.prefill_flops / 1e12:,.0f} TFLOP, {rate}"


def _staging(plan: CapacityPlan) -> str:
    """Describe the memory left beside the staging of codec raw, which takes the most."""
    found = plan.codecs["raw"].staging
    left = plan.hbm.outside_bytes - found.n_bytes - found.spare_bytes
    rest = f"{size(left)} left" if left >= 0 else f"{size(-left)} too little"
    return f"less {size(found.n_bytes)} for kvtier's staging (raw) and {size(found.spare_bytes)} to spare: {rest}"


def _sizes(plan: CapacityPlan) -> list[Column]:
    columns: list[Column] = [
        ("bytes a token", lambda row: f"{row.chunk.token_bytes:,.0f}"),
        ("raw is", lambda row: f"{row.ratio:.2f}x"),
        ("tokens/GiB of files", lambda row: f"{row.per_gib_of_files:,}"),
        ("tokens/GiB of a rank's arena", lambda row: f"{row.per_gib_of_arena:,}"),
        ("staging", lambda row: size(row.staging.n_bytes)),
    ]
    raw = plan.codecs["raw"]
    if raw.tokens_in_storage is not None:
        columns.append(("tokens in --storage", lambda row: f"{row.tokens_in_storage:,}"))
    if raw.tokens_in_host is not None:
        columns.append(("in --host-memory", lambda row: f"{row.tokens_in_host:,}"))
    return columns


def _times(plan: CapacityPlan) -> list[Column]:
    """Return columns of times; none without a rate."""
    raw = plan.codecs["raw"]
    columns: list[Column] = []
    if raw.from_files_s is not None:
        columns.append(("from files", lambda row: _seconds(row.from_files_s)))
    if raw.from_host_s is not None:
        columns.append(("from host memory", lambda row: _seconds(row.from_host_s)))
    if columns:
        columns.append((f"{columns[0][0]}, tokens/s", lambda row: f"{row.reload_tokens_s:,.0f}"))
    if raw.break_even_tokens is not None:
        columns.append(("quicker than prefill from", lambda row: _break_even(row, plan.model.max_tokens)))
    return columns


def _break_even(row: CodecPlan, max_tokens: int) -> str:
    tokens = row.break_even_tokens or 0
    return f"{tokens:,} tokens" + (" (beyond the context)" if max_tokens and tokens > max_tokens else "")


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{significant(seconds)} s"


def _together(refused: dict[str, str]) -> list[tuple[list[str], str]]:
    """Group the codecs by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(name)
    return [(names, reason) for reason, names in reasons.items()]
