"""Saved by one engine, loaded by another: equal bytes, whatever the ranks of either."""

from pathlib import Path

import pytest

from kvtier.format.geometry import LayerForm
from kvtier.plan import SaveOutcome
from tests.support.rig import Engine, geometry, is_equal

TOKENS = list(range(1000, 1000 + 64 * 5 + 7))
BLOCKS = list(range(3, 3 + 21))
ELSEWHERE = [90, 50, 51, 52, 77, 78, 120, 119, 118, 117, 30, 31, 32, 33, 34, 200, 201, 202, 203, 204, 205]

SHAPES = {
    "heads": geometry(),
    "mla": geometry(kv_heads=1, k_head_size=72, v_head_size=0, attention="mla", dtype="bfloat16", element_bytes=2),
    "uneven": geometry(k_head_size=80, v_head_size=48, dtype="float16", element_bytes=2),
    "one head": geometry(kv_heads=1),
    # Engines that quantize their KV, but for some layers: slots of opaque bytes, or fp8.
    "slots": geometry(
        dtype="turboquant_k3v4_nc",
        element_bytes=1,
        k_head_size=118,
        v_head_size=0,
        plain_layers=(0, 3),
        plain=LayerForm(128, 128, "bfloat16", 2),
    ),
    "fp8": geometry(
        dtype="fp8_e4m3",
        element_bytes=1,
        k_head_size=64,
        v_head_size=64,
        plain_layers=(1,),
        plain=LayerForm(64, 64, "float16", 2),
    ),
}
CUTS = [(1, None), (2, None), (4, None), (8, None), (1, [range(1), range(1, 4)]), (2, [range(2), range(2, 4)])]


STAGES = [range(1), range(1, 3), range(3, 4)]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("writer", CUTS)
@pytest.mark.parametrize("reader", CUTS[:1] + CUTS[1:2] + CUTS[4:5])
def test_any_cut_reads_what_any_other_wrote(tmp_path: Path, shape, writer, reader) -> None:  # type: ignore[no-untyped-def]
    first = Engine(tmp_path, shape, *writer)
    done = first.save(TOKENS, BLOCKS)
    assert {answer.outcome for answer in done} == {SaveOutcome.SAVED}
    first.close()
    second = Engine(tmp_path, shape, *reader)
    n_chunks, answers = second.load(TOKENS, ELSEWHERE)
    assert n_chunks == 5
    assert [answer.failed_blocks for answer in answers] == [frozenset()] * len(second.shares)
    assert all(not tensor.any() for tensor in second.blocks(ELSEWHERE[20:]))
    assert second.holds(TOKENS, ELSEWHERE[:20])


@pytest.mark.parametrize("shape", ["slots", "fp8"])
@pytest.mark.parametrize(("writer", "reader"), [((1, None), (2, STAGES)), ((2, STAGES), (1, None))])
def test_stages_of_layers_that_are_alike_among_others(tmp_path: Path, shape, writer, reader) -> None:  # type: ignore[no-untyped-def]
    """A stage's own layers are alike, but those before them in the record that it reads of are not."""
    test_any_cut_reads_what_any_other_wrote(tmp_path, SHAPES[shape], writer, reader)


def test_a_load_leaves_computed_blocks_alone(tmp_path: Path) -> None:
    engine = Engine(tmp_path)
    engine.save(TOKENS, BLOCKS)
    n_chunks, _ = engine.load(TOKENS, ELSEWHERE, computed=64 + 32)
    assert n_chunks == 4
    assert all(not tensor.any() for tensor in engine.blocks(ELSEWHERE[:6]))
    assert is_equal(engine.blocks(ELSEWHERE[6:20]), engine.blocks(BLOCKS[6:20]))


def test_what_is_stored_is_not_written_again(tmp_path: Path) -> None:
    first, second = Engine(tmp_path), Engine(tmp_path)
    assert len(first.save(TOKENS, BLOCKS)) == 5
    assert first.save(TOKENS, BLOCKS) == []
    assert {answer.outcome for answer in second.save(TOKENS, BLOCKS)} == {SaveOutcome.PRESENT}
