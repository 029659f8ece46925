"""Recording of weight loaders: what they may do with a tensor, in small, against the same loader with real tensors."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

pytest.importorskip("vllm")

from vllm.model_executor.model_loader import weight_utils

from kvtier.connectors.vllm.weights_loader import _targets_of, everything
from kvtier.connectors.vllm.weights_trace import LoadTrace, TraceRefused
from kvtier.errors import WeightsDamaged
from kvtier.model.safetensors import read_header
from kvtier.weights import plan as plan_module
from kvtier.weights.copies import pack
from kvtier.weights.plan import WeightPlan
from kvtier.weights.reader import WeightReader

Loaded = Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], Any]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    w = torch.randn(8, 32).to(torch.bfloat16)
    save_file({"w": w, "scale": torch.tensor(3.0), "f32": torch.randn(8, 32), "many": torch.randn(4, 8, 16)}, path)
    return path


def parameters() -> dict[str, torch.Tensor]:
    """Parameters of a model whose memory begins as ones; `tied` is `a` by another name."""
    made = {"a": torch.ones(8, 32, dtype=torch.bfloat16), "b": torch.ones(16, 16, dtype=torch.bfloat16)}
    made |= {"f": torch.ones(8, 32), "s": torch.ones(2), "many": torch.ones(4, 16, 4)}
    return made | {"tied": made["a"]}


def recorded(checkpoint: Path, load: Loaded) -> tuple[WeightPlan, dict[str, torch.Tensor]]:
    """Returns the plan, and parameters filled by it alone."""
    found, again = parameters(), parameters()
    with WeightReader() as reader:
        with LoadTrace({checkpoint: read_header(checkpoint)}, found.items(), reader) as trace:
            load(found, dict(trace.checkpoint(checkpoint)))
        plan = trace.plan()
        plan.load(reader, trace.tensors)
        assert_equal(found, expected_of(checkpoint, load))
        if plan.is_replayable:
            plan.load(reader, plan.bind(again.items()))
            assert_equal(again, found)
    return plan, found


def expected_of(checkpoint: Path, load: Loaded) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    made = parameters()
    load(made, load_file(checkpoint))
    return made


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def slices(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["a"][:4].copy_(c["w"].narrow(0, 4, 4))
    p["a"].narrow(0, 4, 4)[:, 8:].copy_(c["w"][:4].narrow(1, 0, 24))
    p["b"].copy_(c["w"].view(16, 16))
    p["many"].copy_(c["many"].transpose(1, 2)[:, :, :4])


def scalars(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["s"][0] = c["scale"]
    p["s"].view(2, 1)[1].copy_(c["scale"].reshape(1))


def casts(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["f"].copy_(c["w"])
    p["a"][2:].copy_(c["f32"][2:])


def casts_to_columns(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    """Convert into columns, like the loaders of merged layers' scales in GPTQ and of transposed fused experts."""
    p["f"][:, :8].copy_(c["w"][:, :8])
    p["f"][:, 8:].copy_(c["w"][:, 8:])
    p["many"][:, 1::2].copy_(c["w"].view(4, 8, 8)[:, :, :4])


def padding(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["a"][:6].copy_(c["w"][:6])
    p["a"][6:].fill_(0)
    p["a"][8:].fill_(7)
    p["f"][1:] = 0.5
    p["f"][:1].copy_(c["f32"][:1])


def twice(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["a"].copy_(c["w"])
    p["tied"].copy_(c["w"].view(8, 32))


def expanded(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["s"].copy_(c["scale"])
    p["f"].copy_(c["f32"][3])


def clones(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    """Clone a tensor, as vLLM's embedding and reranking models clone the first tensors of a checkpoint."""
    p["a"].copy_(c["w"].clone())
    p["b"][:8].copy_(c["w"][4:].clone().view(8, 16))


@pytest.mark.parametrize("load", [slices, scalars, casts, casts_to_columns, padding, twice, expanded, clones])
def test_recorded_without_reading(load: Loaded, checkpoint: Path) -> None:
    plan, _ = recorded(checkpoint, load)
    assert plan.is_replayable and plan.materialized_bytes == 0
    if load is casts_to_columns:
        assert plan.n_bytes == 8 * 32 * 2 + 4 * 8 * 4 * 2
    assert len(plan.conversions) == {casts: 2, casts_to_columns: 3, expanded: 2}.get(load, 0)


def reads_back(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["f"].copy_(c["f32"])
    p["f"].copy_(-torch.exp(p["f"]))


def changes_the_source(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    view = c["w"][2:4]
    c["w"][3].zero_()
    p["a"].copy_(c["w"])
    p["b"][0, :].copy_(view[1, :16])


def changes_a_clone(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    clone = c["w"].clone()
    clone[3].zero_()
    p["b"].copy_(clone.clone().view(16, 16))
    p["a"].copy_(c["w"])


def computes(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    if c["scale"].item() > 2:
        p["f"].copy_(c["f32"] * c["scale"])
    p["many"].copy_(c["many"][:, :, 3:7].repeat(1, 2, 1).contiguous())


def changes_what_was_recorded(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["a"].copy_(c["w"])
    p["a"][2:4].zero_()
    p["a"][3].copy_(c["w"][0])


def fills_before_it_computes(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["f"].fill_(7.0)
    p["f"][0].copy_(c["f32"][1])
    p["f"].mul_(2.0)
    p["s"].zero_()
    p["s"][0].copy_(c["scale"] + 1)


def makes_tensors_like_it(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    buffer = torch.empty(c["w"].shape, dtype=c["w"].dtype, device=c["w"].device)
    buffer.copy_(c["w"])
    p["a"].copy_(torch.empty_like(c["w"]).copy_(buffer))


def reads_another_parameter(p: dict[str, torch.Tensor], c: dict[str, torch.Tensor]) -> None:
    p["f"].copy_(c["f32"])
    p["a"].copy_(p["f"])


COMPUTE = [reads_back, changes_the_source, changes_a_clone, computes, changes_what_was_recorded, makes_tensors_like_it]
COMPUTE += [fills_before_it_computes]


@pytest.mark.parametrize("load", [*COMPUTE, reads_another_parameter])
def test_loaders_that_compute_have_real_values(load: Loaded, checkpoint: Path) -> None:
    plan, _ = recorded(checkpoint, load)
    assert not plan.is_replayable and plan.materialized_bytes > 0


@pytest.mark.parametrize("load", [casts, reads_back, computes])
def test_what_is_read_on_the_host_is_compared_too(load: Loaded, checkpoint: Path) -> None:
    found = parameters()
    with WeightReader() as reader:
        damaged = {path: sums + 1 for path, sums in reader.sums([checkpoint]).items()}
        with pytest.raises(WeightsDamaged):
            with LoadTrace({checkpoint: read_header(checkpoint)}, found.items(), reader, damaged) as trace:
                load(found, dict(trace.checkpoint(checkpoint)))
            only_converted = dataclasses.replace(trace.plan(), copies=pack([]))
            only_converted.load(reader, trace.tensors, damaged)


def test_what_is_converted_is_read_together(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, found = recorded(checkpoint, casts)
    assert len(plan.conversions) == 2
    reads, read = [], WeightReader.read
    monkeypatch.setattr(WeightReader, "read", lambda *rest, **more: reads.append(1) or read(*rest, **more))
    with WeightReader() as reader:
        plan.load(reader, plan.bind(found.items()))
    assert len(reads) == 2, "copies, and all that is converted"


@pytest.mark.parametrize("limit", [1, 100, 200])
def test_large_conversions_are_read_in_slices(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """The slices bound the host's memory. Here they are rows of 128 bytes, and a scalar."""
    monkeypatch.setattr(plan_module, "CONVERTED_BYTES", limit)
    sizes, read = [], plan_module.read_views

    def watched(reader: Any, files: Any, views: Any, *rest: Any) -> Any:
        sizes.append(sum(view.n_bytes for view in views))
        return read(reader, files, views, *rest)

    monkeypatch.setattr(plan_module, "read_views", watched)
    for load in (casts, expanded):
        recorded(checkpoint, load)
    assert max(sizes) <= max(limit, 128) and len(sizes) > 10


def test_a_stored_plan_of_a_smaller_model_is_not_used(checkpoint: Path) -> None:
    """As of a model whose vision tower was left out: what the plan does not name would stay empty."""
    plan, found = recorded(checkpoint, slices)
    model = torch.nn.Module()
    for name, tensor in found.items():
        model.register_buffer(name, tensor)
    assert _targets_of(plan, list(everything(model)))
    model.register_buffer("tower", torch.ones(3))
    assert _targets_of(plan, list(everything(model))) is None


def test_tensors_come_in_the_order_of_vllm(tmp_path: Path) -> None:
    """The order is that of the names, not of the bytes: of two tensors for one parameter, the later one counts."""
    path = tmp_path / "model.safetensors"
    save_file({"b": torch.zeros(2), "a": torch.zeros(8, dtype=torch.uint8), "c": torch.zeros(2).double()}, path)
    with WeightReader() as reader:
        trace = LoadTrace({path: read_header(path)}, parameters().items(), reader)
    expected = [name for name, _ in weight_utils.safetensors_weights_iterator([str(path)], False)]
    assert [name for name, _ in trace.checkpoint(path)] == expected != list(read_header(path).tensors)


def test_a_list_of_all_tensors_costs_nothing(checkpoint: Path) -> None:
    """Some models take all tensors before they load one; those that no loader copies are never read."""
    plan, _ = recorded(checkpoint, lambda p, c: p["a"].copy_(list(c.values())[list(c).index("w")]))
    assert plan.n_bytes == 8 * 32 * 2 and plan.materialized_bytes == 0


def test_overlapping_parts_are_refused(checkpoint: Path) -> None:
    found = parameters()
    with WeightReader() as reader, LoadTrace({checkpoint: read_header(checkpoint)}, found.items(), reader) as trace:
        tensors = dict(trace.checkpoint(checkpoint))
        found["a"][:4].copy_(tensors["w"][:4])
        found["a"][3:6].copy_(tensors["w"][:3])
    with pytest.raises(TraceRefused, match="parts of a may overlap"):
        trace.plan()


def test_indexing_by_a_list_is_refused(checkpoint: Path) -> None:
    """torch makes the index beside the tensor, without its numbers."""
    found = parameters()
    with WeightReader() as reader, LoadTrace({checkpoint: read_header(checkpoint)}, found.items(), reader) as trace:
        w = dict(trace.checkpoint(checkpoint))["w"]
        with pytest.raises(TraceRefused, match="without data"):
            found["a"].copy_(w[[7, 6, 5, 4, 3, 2, 1, 0]])


def test_parameters_without_memory_are_refused(checkpoint: Path) -> None:
    with WeightReader() as reader, pytest.raises(TraceRefused, match="w has no memory"):
        LoadTrace({}, [("w", torch.empty(2, device="meta"))], reader)
