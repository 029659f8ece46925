"""Encoded KV through both walks: saved by ranks of one cut, loaded by those of another, refused where it must be."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from kvtier.codecs.base import Encoded, EncodeResult, slab_bytes
from kvtier.codecs.int8.codec import Int8Codec, Int8Coder
from kvtier.codecs.transform.codec import TransformCoder
from kvtier.codecs.transform.table import read_table
from kvtier.codecs.turboquant.codec import Turboquant, TurboquantCoder, rope_base_of
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.codecs.vectors import LayerCoder
from kvtier.errors import ConfigError
from kvtier.format.geometry import Extent, Geometry, share_of_rank
from kvtier.io.calibration import Calibration
from kvtier.io.engines import EngineChoice
from kvtier.kernels import host as host_kernels
from kvtier.kernels.paged import Move, PagedKV, SlabRun
from kvtier.plan import SaveOutcome
from kvtier.runtime import metrics as names
from kvtier.worker.io_setup import LOAD_FIXED_S, load_cost
from tests.codecs.transform_rig import make_table
from tests.support import lazy
from tests.support.ends import engines_end as engines_end  # a fixture
from tests.support.lazy import LazyCodec, LazyEngine, LazyOrder
from tests.support.rig import Engine, geometry, is_equal

CHUNK, N_CHUNKS = 64, 3
TOKENS = list(range(1000, 1000 + CHUNK * N_CHUNKS))
BLOCKS = list(range(3, 3 + CHUNK * N_CHUNKS // 16))
TARGET = [90, 50, 51, 52, 77, 78, 120, 119, 118, 117, 30, 31]
SHAPE = geometry(layers=5, kv_heads=4, k_head_size=64, v_head_size=64, dtype="bfloat16", element_bytes=2)
TABLE = Path(tempfile.mkdtemp()) / "table"  # of the transform codec
CUTS = [(1, None), (2, [range(2), range(2, 5)]), (4, None), (8, None), (1, [range(1), range(1, 2), range(2, 5)])]


def start(root: Path, codec: str, cut: Any = (1, None), **changes: object) -> Engine:
    if codec == "tc4":
        changes["codec_table"] = str(TABLE if TABLE.exists() else make_table(TABLE, SHAPE.layers, SHAPE.kv_heads, 64))
    return Engine(root, SHAPE, *cut, changes={"codec": codec, **changes})


def coder_of(codec: str, shape: Geometry = SHAPE) -> LayerCoder:
    if codec == "int8":
        return Int8Coder(shape.chunk_tokens, shape.k_head_size, shape.v_head_size)
    if codec == "tc4":
        return TransformCoder(read_table(TABLE, codec), shape.whole, shape.chunk_tokens, torch.device("cpu"))
    sizes = (shape.chunk_tokens, shape.k_head_size, shape.v_head_size)
    return TurboquantCoder(SlabFormat(*sizes, PRESETS[codec]), shape.whole, torch.device("cpu"))


def lossy(engine: Engine, coder: LayerCoder, blocks: Sequence[int]) -> list[torch.Tensor]:
    """What a codec makes of these blocks of an engine of one rank, chunk by chunk, in the form of Engine.blocks."""
    (pages,) = engine.pages
    index, found = torch.tensor(list(blocks)), []
    for number, layer in enumerate(pages.layers):
        planes = [plane[index].unflatten(0, (N_CHUNKS, -1)) for plane in layer.planes]  # chunks, blocks, tokens, H, D
        k, v = (plane.flatten(1, 2).transpose(1, 2) for plane in planes)  # chunks, heads, tokens, size
        cells = Extent(number, 1, 0, SHAPE.kv_heads)
        back = [
            coder.decode(coder.encode(a, b, cells, chunk * CHUNK).data, cells, a.dtype)
            for chunk, (a, b) in enumerate(zip(k, v, strict=True))
        ]
        for plane in (torch.stack([pair[which] for pair in back]) for which in (0, 1)):
            found.append(plane.transpose(1, 2).reshape(len(blocks), 16, SHAPE.kv_heads, -1))
    return found


@pytest.mark.parametrize(
    ("codec", "writer", "reader"),
    [
        *(("k4v4", writer, CUTS[0]) for writer in CUTS),
        ("k4v4", CUTS[3], CUTS[1]),
        ("int8", CUTS[1], CUTS[0]),
        ("tc4", CUTS[1], CUTS[0]),
        ("tc4", CUTS[0], CUTS[3]),
    ],
)
def test_any_cut_reads_what_any_other_wrote(tmp_path: Path, codec: str, writer: Any, reader: Any) -> None:
    """And it is what the codec makes of the whole model's KV, by the numbers of layers and heads there."""
    first = start(tmp_path, codec, writer)
    assert {done.outcome for done in first.save(TOKENS, BLOCKS)} == {SaveOutcome.SAVED}
    second = start(tmp_path, codec, reader)
    n_chunks, answers = second.load(TOKENS, TARGET)
    assert n_chunks == N_CHUNKS and all(not answer.failed_blocks for answer in answers)
    model = start(tmp_path / "model", "raw")
    model.prefill(TOKENS, BLOCKS)
    whole = Engine.blocks(model, BLOCKS)
    wanted = lossy(model, coder_of(codec), BLOCKS)
    assert not is_equal(wanted, whole), "it is lossy"
    planes = iter(second.blocks(TARGET))
    for share in second.shares:
        held = share.reads
        heads = slice(held.first_head, held.end_head)
        for layer in range(held.first_layer, held.end_layer):
            for which in (0, 1):
                assert torch.equal(next(planes), wanted[2 * layer + which][:, :, heads])


def test_a_load_leaves_computed_blocks_alone(tmp_path: Path) -> None:
    engine = start(tmp_path, "k4v4")
    engine.save(TOKENS, BLOCKS)
    engine.load(TOKENS, TARGET, computed=CHUNK + 32)
    wanted = lossy(engine, coder_of("k4v4"), BLOCKS)
    assert all(not tensor.any() for tensor in engine.blocks(TARGET[:6]))
    assert is_equal(engine.blocks(TARGET[6:]), [plane[6:] for plane in wanted])


def test_encoded_chunks_take_less_room(tmp_path: Path) -> None:
    slots = [start(tmp_path / codec, codec).transfers[0]._worker.arena.n_slots for codec in ("raw", "k4v4")]
    assert slots[1] > 1.9 * slots[0], "slabs of such small chunks are half padding"


# --- what is refused ---


def save_with(engine: Engine, spoil: float, block: int) -> dict[bytes, SaveOutcome]:
    """Saves with a bad element in one block; outcomes by key."""
    engine.wait_for_set()
    engine.prefill(TOKENS, BLOCKS)
    engine.pages[0].layers[2].planes[1][block, 7, 3, 11] = spoil
    return {answer.key: answer.outcome for answer in engine.run_save(engine.plan(TOKENS, BLOCKS))}


@pytest.mark.parametrize("codec", ("k4v4", "int8", "tc4"))
def test_a_chunk_that_cannot_be_kept_is_not_stored(tmp_path: Path, codec: str) -> None:
    engine = start(tmp_path, codec, host={"arena_bytes": 8 << 20, "admit": "never"})
    arena = engine.transfers[0]._worker.arena
    outcomes = save_with(engine, float("nan"), BLOCKS[5])
    assert list(outcomes.values()).count(SaveOutcome.REFUSED) == 1
    assert [outcomes[key] for key in engine.keys(TOKENS)] == [SaveOutcome.SAVED, SaveOutcome.REFUSED, SaveOutcome.SAVED]
    assert engine.transfers[0].metrics.total()[names.SKIPPED_REFUSED] == 1
    assert engine.load(TOKENS, TARGET)[0] == 1, "the prefix before it"
    assert all(arena.reserve() is not None for _ in range(arena.n_slots)), "no slot is lost"


def test_raw_keeps_anything(tmp_path: Path) -> None:
    engine = start(tmp_path, "raw")
    assert set(save_with(engine, float("nan"), BLOCKS[5]).values()) == {SaveOutcome.SAVED}
    assert engine.load(TOKENS, TARGET)[0] == N_CHUNKS
    assert engine.blocks(TARGET)[5].isnan().sum() == 1


# --- as on a GPU: encoded late, summed by the launch ---


class LateCodec(LazyCodec):
    """Its verdicts come with the stream, with the sums of the slabs; `wrong_sum` spoils one."""

    wrong_sum = False

    def encode(self, pages: PagedKV, moves: Sequence[Move]) -> Encoded:  # type: ignore[override]
        late = LateVerdicts()

        def run() -> None:
            found = self._inner.encode(pages, moves).wait()
            sums = host_kernels.checksums([SlabRun(move.slabs, move.key, 0, 0) for move in moves])
            if self.wrong_sum:
                sums[0] = (sums[0][0] ^ 1, *sums[0][1:])
            late.verdicts = [EncodeResult(one.is_refused, two) for one, two in zip(found, sums, strict=True)]

        self._order.launch(run)
        return late


class LateVerdicts:
    verdicts: list[EncodeResult] | None = None

    def wait(self) -> list[EncodeResult]:
        assert self.verdicts is not None, "asked before the stream got there"
        return self.verdicts


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LazyEngine:
    monkeypatch.setattr(lazy, "LazyCodec", LateCodec)
    monkeypatch.setattr(LateCodec, "wrong_sum", False)
    engine = LazyEngine(tmp_path, SHAPE, changes={"codec": "k4v4"})
    engine.lay_over()
    return engine


def save_late(engine: LazyEngine, spoil: float | None = None) -> dict[bytes, SaveOutcome]:
    engine.wait_for_set()

    def forward() -> None:
        engine.prefill(TOKENS, BLOCKS)
        if spoil is not None:
            engine.pages[0].layers[4].planes[0][BLOCKS[5], 3, 2, 1] = spoil

    engine.in_engine(forward)
    engine.transfers[0].save(engine.plan(TOKENS, BLOCKS))
    engine.overwrite(BLOCKS, 7)
    engine.run_all()
    done = engine.transfers[0].poll().saves
    engine.store.saved(done)
    return {answer.key: answer.outcome for answer in done}


def test_a_late_verdict_with_sums(late: LazyEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setitem(late.worker.__dict__, "sums", lambda runs: calls.append(len(runs)))
    outcomes = save_late(late, float("nan"))
    assert [outcomes[key] for key in late.keys(TOKENS)] == [SaveOutcome.SAVED, SaveOutcome.REFUSED, SaveOutcome.SAVED]
    assert calls == [], "the launch had summed already"
    assert all(late.staging.reserve() is not None for _ in range(late.staging.n_slots)), "no slot is lost"


def test_what_changes_after_the_launch_summed_it_is_not_published(late: LazyEngine) -> None:
    LateCodec.wrong_sum = True
    outcomes = save_late(late)
    assert [outcomes[key] for key in late.keys(TOKENS)] == [SaveOutcome.FAILED, SaveOutcome.SAVED, SaveOutcome.SAVED]
    assert late.transfers[0].metrics.total()[names.CHECKSUM_FAILURES] == 1


# --- settings and sizes ---


def refusal(tmp_path: Path, shape: Geometry, **changes: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Engine(tmp_path, shape, changes=changes)
    return caught.value


def test_models_that_a_codec_cannot_encode(tmp_path: Path) -> None:
    mla = geometry(kv_heads=1, k_head_size=576, v_head_size=0, attention="mla", dtype="bfloat16", element_bytes=2)
    error = refusal(tmp_path, mla, codec="k4v4")
    assert (error.key, error.value) == ("codec", "k4v4") and "MLA" in error.fix and "raw" in error.fix
    assert refusal(tmp_path, mla, codec="int8").key == "codec"
    fp8 = geometry(k_head_size=64, v_head_size=64, dtype="fp8_e4m3", element_bytes=1)
    error = refusal(tmp_path, fp8, codec="k4v4")
    assert error.key == "codec" and "fp8_e4m3" in error.fix and "raw" in error.fix
    error = refusal(tmp_path, geometry(k_head_size=112, v_head_size=112), codec="k6v5")
    assert error.key == "codec" and "112" in error.fix and "int8" in error.fix
    for sizes in ((66, 64), (64, 63)):
        error = refusal(tmp_path, geometry(k_head_size=sizes[0], v_head_size=sizes[1]), codec="int8")
        assert error.key == "codec" and f"{sizes[0]} and {sizes[1]}" in error.fix and "raw" in error.fix
    error = refusal(tmp_path, geometry(k_head_size=64, v_head_size=64, chunk_tokens=4096), codec="k6v5")
    assert (error.key, error.value) == ("chunk_tokens", 4096)


def test_what_is_part_of_the_identity() -> None:
    assert (Int8Codec.name, Int8Codec.version) == ("int8", 3)
    assert (Turboquant("k4v4").name, Turboquant("k4v4").version) == ("turboquant-k4v4", 3)
    turned = Turboquant("k4v4", 1e6)
    assert turned.name == "turboquant-k4v4+rope1000000.0" and rope_base_of(turned.name) == 1e6
    assert rope_base_of("turboquant-k4v4") == rope_base_of("raw") == 0


def test_bytes_of_layers_add_up() -> None:
    codec = Turboquant("k6v5")
    shape = geometry(layers=9, k_head_size=128, v_head_size=80)
    layer = 64 * (128 * 6 + 80 * 5) // 8 + 4 * 64 + 2 * 128 + 2 * (128 + 80)
    assert [codec.layers_bytes(shape, range(n, 9)) for n in range(9)] == [layer * (9 - n) for n in range(9)]


def test_a_load_costs_what_is_stored() -> None:
    shape = geometry(
        layers=32, kv_heads=8, k_head_size=128, v_head_size=128, dtype="bfloat16", element_bytes=2, chunk_tokens=256
    )
    share = share_of_rank(shape, 0, 1, 0, range(32))
    measured = Calibration(EngineChoice("ring", 1, 4096), 1e9, None, 0.5, 1.0, ())
    cost = load_cost(measured, Turboquant("k4v4"), shape, share)
    assert cost is not None and cost.fixed_s == 0.5 + LOAD_FIXED_S
    assert cost.token_s == pytest.approx(1e-9 * 8 * 270 * 4096 / 256)
    assert slab_bytes(Turboquant("k4v4"), shape, share.reads) == 270 * 4096


def test_order_is_used(late: LazyEngine) -> None:
    """The rig itself: verdicts asked for too early are an error."""
    assert isinstance(late.order, LazyOrder)
    with pytest.raises(AssertionError, match="before the stream"):
        late.worker.codec.encode(late.pages[0], []).wait()  # type: ignore[union-attr]
