"""Output of `kvtier plan`: text and JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from kvtier.cli.tables import print_table
from kvtier.codecs.measured_loss import KL_NATS, MODELS, losses_line
from kvtier.planner.figures import CapacityPlan, CodecPlan
from kvtier.runtime.units import size

Column = tuple[str, Callable[[CodecPlan], str]]


def plan_values(plan: CapacityPlan) -> dict[str, Any]:
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


def print_plan(plan: CapacityPlan) -> None:
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
    heads = f"{shape.kv_heads} KV heads of {shape.k_head_size} ({model.attention.heads} of queries)"
    if shape.attention == "mla":
        heads = f"one latent vector of {shape.k_head_size} (MLA)"
    yield f"model: {model.family}, {shape.layers} layers, {heads}"
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
    rate = "give --tflops or --prefill-rate for its time" if plan.prefill_s is None else f"{_seconds(plan.prefill_s)}"
    yield f"prefill of {plan.context:,} tokens: {plan.prefill_flops / 1e12:,.0f} TFLOP, {rate}"


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
    return "" if seconds is None else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def _together(refused: dict[str, str]) -> list[tuple[list[str], str]]:
    """Group the codecs by reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in refused.items():
        reasons.setdefault(reason, []).append(name)
    return [(names, reason) for reason, names in reasons.items()]
