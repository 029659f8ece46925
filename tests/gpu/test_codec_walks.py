"""Encoded KV through both walks on a real GPU: what it writes and what the CPU writes is the same KV to either."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from tests.codecs.transform_rig import check_transform, make_table
from tests.support.rig import BLOCKS, TOKENS, Engine, geometry

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

SHAPE = geometry(k_head_size=64, v_head_size=128, dtype="bfloat16", element_bytes=2)
TARGET = list(range(119, 99, -1))
SIZES = {"host": {"arena_bytes": "16MiB"}, "hbm": {"staging_bytes": "16MiB"}}


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    made: list[Engine] = []
    yield made
    for engine in made:
        engine.close()


def start(root: Path, made: list[Engine], codec: str, device: str) -> Engine:
    sizes: dict[str, object] = dict(SIZES) if device == "cuda" else {}
    if codec in ("tc4", "tc3"):
        table = root.parent / "table"
        sizes["codec_table"] = str(
            table if table.exists() else make_table(table, SHAPE.layers, SHAPE.kv_heads, 64, 128)
        )
    made.append(Engine(root, SHAPE, device=device, changes={"codec": codec, **sizes}))
    return made[-1]


def loaded(engine: Engine) -> list[torch.Tensor]:
    n_chunks, answers = engine.load(TOKENS, TARGET)
    assert n_chunks == 5 and not any(answer.failed_blocks for answer in answers)
    assert names.CHECKSUM_FAILURES not in engine.transfers[0].metrics.total()
    return [plane.cpu() for plane in engine.blocks(TARGET)]


@pytest.mark.parametrize("codec", ["int8", "k6v5", "k4v4", "tc4", "tc3"])
def test_a_gpu_and_the_cpu_read_what_the_other_wrote(tmp_path: Path, engines: list[Engine], codec: str) -> None:
    found = []
    for number, writer in enumerate(("cuda", "cpu")):
        root = tmp_path / str(number)
        saved = start(root, engines, codec, writer).save(TOKENS, BLOCKS)
        assert [done.outcome for done in saved] == 5 * [SaveOutcome.SAVED]
        found += [loaded(start(root, engines, codec, reader)) for reader in ("cuda", "cpu")]
    exact = [plane.cpu() for plane in engines[0].blocks(BLOCKS)]
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if codec in ("tc4", "tc3") else {"rtol": 0, "atol": 0}  # a rounding
    for other in found[1:]:
        assert all(torch.allclose(a, b, **tolerance) for a, b in zip(found[0], other, strict=True))
    errors = [float((a - b).float().square().mean()) for a, b in zip(found[0], exact, strict=True)]
    if not codec.startswith("tc"):  # its table is of other KV
        assert min(errors) > 0 and max(errors) < 0.05, "it is lossy, and it is this KV"


@pytest.mark.parametrize("preset", ["tc4", "tc3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256])
def test_transform_bytes_of_a_gpu_are_those_of_the_cpu(
    tmp_path: Path, size: int, dtype: torch.dtype, preset: str
) -> None:
    check_transform(tmp_path, (size, size), dtype, "cuda", preset)


@pytest.mark.parametrize("codec", ["int8", "k4v4", "tc4"])
def test_a_chunk_that_cannot_be_kept_is_not_stored(tmp_path: Path, engines: list[Engine], codec: str) -> None:
    engine = start(tmp_path, engines, codec, "cuda")
    prefill = engine.prefill

    def spoilt(tokens: list[int], blocks: list[int]) -> None:
        prefill(tokens, blocks)
        engine.pages[0].layers[2].planes[1][BLOCKS[9], 7, 3, 11] = float("nan")

    engine.prefill = spoilt  # type: ignore[method-assign,assignment]
    outcomes = [done.outcome for done in engine.save(TOKENS, BLOCKS)]
    assert outcomes.count(SaveOutcome.REFUSED) == 1 and outcomes.count(SaveOutcome.SAVED) == 4
    assert engine.load(TOKENS, TARGET)[0] == 2, "the prefix before it"
