"""A worker whose own settings are not those of its scheduler: it stores nothing and loads nothing, and says why."""

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from kvtier.build import make_codec, open_transfer
from kvtier.format.namespace import CodecId
from kvtier.plan import SaveOutcome
from kvtier.worker.transfer import Transfer
from tests.support.rig import Engine, geometry, settings

SHAPE = geometry(layers=4, kv_heads=2, k_head_size=64, v_head_size=64, dtype="bfloat16", element_bytes=2)
TOKENS = list(range(1000, 1128))
BLOCKS, TARGET = list(range(8)), list(range(20, 28))


class DriftedEngine(Engine):
    """Its scheduler's codec is `raw`, its worker's another: an environment variable on one node, say."""

    worker_codec = "k4v4"

    def __post_init__(self) -> None:
        super().__post_init__()
        for transfer in self.transfers:
            transfer.close()
        own = settings(self.root, chunk_tokens=64, codec=self.worker_codec)
        codec = make_codec(own)
        named = replace(self.namespace, codec=CodecId(codec.name, codec.version, codec.seed), **self.differing)
        self.transfers: list[Transfer] = [open_transfer(own, named, self.shares[0], self.pages[0])]

    @property
    def differing(self) -> dict[str, str]:
        return {}


class OtherWeights(DriftedEngine):
    worker_codec = "raw"

    @property
    def differing(self) -> dict[str, str]:
        return {"weights": "those of another checkpoint"}


class OtherEpoch(DriftedEngine):
    worker_codec = "raw"

    @property
    def differing(self) -> dict[str, str]:
        return {"epoch": "7"}


@pytest.mark.parametrize(("kind", "what"), [(DriftedEngine, "codec"), (OtherWeights, "weights")])
def test_a_worker_of_other_settings_moves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: type[Engine], what: str
) -> None:
    sound = Engine(tmp_path, SHAPE)
    assert {done.outcome for done in sound.save(TOKENS, BLOCKS)} == {SaveOutcome.SAVED}
    drifted = kind(tmp_path, SHAPE)
    with caplog.at_level(logging.WARNING, "kvtier"):
        n, done = drifted.load(TOKENS, TARGET)
        assert n == 2 and [answer.failed_blocks for answer in done] == [frozenset(TARGET)]
        other = [token + 5000 for token in TOKENS]
        assert SaveOutcome.SAVED not in {answer.outcome for answer in drifted.save(other, BLOCKS)}
    assert f"is of another {what}: " in caplog.text and "give all processes of an engine the same" in caplog.text
    assert sound.load(TOKENS, TARGET)[0] == 2, "what is sound was taken out of the index"
    drifted.close()


def test_another_epoch_is_no_difference(tmp_path: Path) -> None:
    """A scheduler begins epochs that its workers learn of by its plans alone."""
    engine = OtherEpoch(tmp_path, SHAPE)
    assert {done.outcome for done in engine.save(TOKENS, BLOCKS)} == {SaveOutcome.SAVED}
    n, done = engine.load(TOKENS, TARGET)
    assert n == 2 and [answer.failed_blocks for answer in done] == [frozenset()]
    engine.close()
