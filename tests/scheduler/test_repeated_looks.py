"""The scheduler hashes no chunk of a long prompt twice, and does not look it up in each step."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvtier.connectors.bridge import ANSWER_GOOD_S, SchedulerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.tracked_request import BlockShape, RequestView
from kvtier.format import namespace
from kvtier.scheduler.load_threshold import FixedThreshold
from tests.engines.fakes import FakeStore

CHUNK, BLOCK = 256, 16
PROMPT = 32_768
STEPS = 100
STEP_S = 0.01
BLOCKS = range(PROMPT // BLOCK + 100)


class Scene:
    """A bridge and one long prompt; `hashed` counts chunks and `tokens` the tokens that were hashed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.hashed, self.tokens = 0.0, 0, list(range(PROMPT))
        self.hashed_tokens = 0
        self.store = FakeStore()
        shape = BlockShape(CHUNK, BLOCK)
        self.bridge = SchedulerBridge(self.store, shape, FixedThreshold(CHUNK), 2.0, Faults(), lambda: self.now_s)  # type: ignore[arg-type]
        self.bridge.track(RequestView("r", self.tokens, {}, may_load=True, may_save=True))
        blake3, token_bytes = namespace.blake3, namespace._token_bytes

        def counted(content: bytes) -> Any:
            self.hashed += 1
            return blake3(content)

        def converted(tokens: Sequence[int]) -> bytes:
            self.hashed_tokens += len(tokens)
            return token_bytes(tokens)

        monkeypatch.setattr(namespace, "blake3", counted)
        monkeypatch.setattr(namespace, "_token_bytes", converted)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


@pytest.mark.parametrize("stored", [0, PROMPT // CHUNK])
def test_a_request_that_waits_for_blocks_asks_the_index_once_a_second(scene: Scene, stored: int) -> None:
    """The engine asks for the hit in every step until it has blocks for the request."""
    scene.bridge.hit_tokens("r", 0)
    scene.store.stored.update(scene.bridge._requests["r"].keys[:stored])
    scene.now_s, scene.store.n_lookups = 10.0, 0
    for _ in range(STEPS):
        assert scene.bridge.hit_tokens("r", 0) == stored * CHUNK
        scene.now_s += STEP_S
    assert scene.store.n_lookups <= STEPS * STEP_S / ANSWER_GOOD_S + 1
    assert scene.hashed == PROMPT // CHUNK and scene.hashed_tokens == PROMPT


def test_each_chunk_is_hashed_once_from_the_lookup_to_the_last_generated_token(scene: Scene) -> None:
    scene.bridge.hit_tokens("r", 0)
    for step in range(STEPS):
        frontier = (step + 1) * PROMPT // STEPS
        if scene.bridge.chunks_pending("r", frontier):
            scene.bridge.advance("r", frontier, BLOCKS)
        scene.bridge.take_step()
    for generated in range(3 * CHUNK):
        scene.tokens.append(generated)
        if scene.bridge.chunks_pending("r", len(scene.tokens)):
            scene.bridge.advance("r", len(scene.tokens), BLOCKS)
        scene.bridge.take_step()
    scene.bridge.finish("r", len(scene.tokens), BLOCKS)
    assert scene.hashed == PROMPT // CHUNK + 3 and scene.hashed_tokens == PROMPT + 3 * CHUNK


def test_an_answer_is_not_used_again_after_a_load_failed(scene: Scene) -> None:
    """It may name the chunk that failed."""
    scene.bridge.track(RequestView("other", scene.tokens, {}, may_load=True, may_save=True))
    scene.bridge.hit_tokens("r", 0)
    scene.store.stored.update(scene.bridge._requests["r"].keys)
    scene.now_s = 10.0
    assert scene.bridge.hit_tokens("r", 0) == scene.bridge.hit_tokens("other", 0) == PROMPT
    scene.bridge.begin_load("r", BLOCKS, PROMPT)
    scene.store.stored.clear()
    scene.bridge.loads_ended(["r"], frozenset([5]))
    assert scene.bridge.hit_tokens("other", 0) == 0
