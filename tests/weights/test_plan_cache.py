"""Stored plans: the same plan comes back, and anything else is no plan."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from kvtier.errors import Corrupt
from kvtier.weights.copies import Copy, contiguous
from kvtier.weights.copies import pack as pack_copies
from kvtier.weights.plan import Conversion, Elements, Fill, Parameter, PlanMismatch, WeightPlan
from kvtier.weights.plan_cache import PlanCache, pack, plan_key, unpack

FILES = (Path("/a.safetensors"), Path("/b.safetensors"))
KEY = plan_key({"model": "tiny"})
PLAN = WeightPlan(
    files=FILES,
    targets=(Parameter("w", (4, 4), (4, 1), "bfloat16"), Parameter("b", (), (), "float32")),
    copies=pack_copies([contiguous(1, 8, 16, 0), Copy(0, 1 << 50, 2, 4, 9, 0, 16, 8)]),
    conversions=(Conversion(Elements(0, 64, (), (), "bfloat16"), Elements(1, 0, (), (), "float32")),),
    fills=(Fill(Elements(0, 24, (1, 4), (4, 1), "bfloat16"), 0.0),),
)


def test_a_plan_comes_back(tmp_path: Path) -> None:
    cache = PlanCache(tmp_path / "a" / "plans")
    assert cache.get(KEY, FILES) is None
    cache.put(KEY, PLAN)
    found = cache.get(KEY, FILES)
    assert found is not None and np.array_equal(found.copies, PLAN.copies)
    assert replace(found, copies=PLAN.copies) == PLAN
    other = plan_key({"model": "other"})
    assert cache.get(other, FILES) is None
    (tmp_path / "a" / "plans" / f"{KEY}.plan").rename(tmp_path / "a" / "plans" / f"{other}.plan")
    assert cache.get(other, FILES) is None, "the plan of another key"


def test_a_cut_plan_is_no_plan() -> None:
    whole = pack(PLAN, KEY)
    for length in range(0, len(whole), 7):
        with pytest.raises(Corrupt):
            unpack(whole[:length], KEY, FILES)


def test_a_body_of_another_form_is_no_plan() -> None:
    for body in (b"", b"\x05\0\0\0{}", struct.pack("<I", 2) + b"[]", struct.pack("<I", 2) + b"{}"):
        with pytest.raises(Corrupt, match="no plan of this kvtier"):
            unpack(body, KEY, FILES)


def test_a_plan_of_other_files_or_another_key_is_refused() -> None:
    for key, files in ((plan_key({}), FILES), (KEY, FILES[:1])):
        with pytest.raises(Corrupt, match="another load"):
            unpack(pack(PLAN, KEY), key, files)


@pytest.mark.parametrize(
    "w", [torch.empty(4, 4), torch.empty(4, 8, dtype=torch.bfloat16), torch.empty(4, 4, dtype=torch.bfloat16).t(), None]
)
def test_parameters_are_compared(w: torch.Tensor | None) -> None:
    b = torch.empty(())
    right = torch.empty(4, 4, dtype=torch.bfloat16)
    assert PLAN.bind([("b", b), ("w", right), ("more", b)])[0] is right
    with pytest.raises(PlanMismatch, match="parameter w"):
        PLAN.bind([("b", b)] if w is None else [("b", b), ("w", w)])
