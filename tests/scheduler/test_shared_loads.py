"""Who waits for another request's load of the same chunks, for how long, and who loads by itself."""

from collections.abc import Sequence

import pytest

from kvtier.connectors.bridge import SchedulerBridge
from kvtier.connectors.faults import Faults
from kvtier.connectors.tracked_request import BlockShape, RequestView
from kvtier.format.namespace import chunk_keys, salt_extra
from kvtier.runtime import metrics as names
from kvtier.scheduler.load_threshold import FixedThreshold
from kvtier.scheduler.shared_loads import LENGTH_RATIO, WAITS_MAX, SharedLoads
from tests.engines.fakes import FakeStore

CHUNK, BLOCK = 64, 16
WAIT_S = 5.0
PREFIX = list(range(512))


class Scene:
    """A bridge over a fake store in which all prompts are stored as far as `stored` says."""

    def __init__(self, wait_s: float = WAIT_S) -> None:
        self.now_s = 0.0
        self.store = FakeStore()
        limit = FixedThreshold(CHUNK)
        self.bridge = SchedulerBridge(self.store, BlockShape(CHUNK, BLOCK), limit, 2.0, Faults(), lambda: self.now_s)  # type: ignore[arg-type]
        self.shared.wait_s = wait_s
        self._n_blocks = 0

    @property
    def shared(self) -> SharedLoads:
        return self.bridge.active_loads.shared

    def request(self, name: str, tokens: Sequence[int], stored: int | None = None, salt: str = "") -> None:
        extras = {0: salt_extra(salt)} if salt else {}
        keys = chunk_keys(self.store.namespace_id, tokens, CHUNK, extras)
        self.store.stored.update(keys[:stored])
        self.bridge.track(RequestView(name, tokens, extras, may_load=True, may_save=True))

    def ask(self, name: str, computed: int = 0) -> int | None:
        """As the engine does: with a hit, its load begins at once. Blocks that the engine had are numbered the same."""
        hit = self.bridge.hit_tokens(name, computed)
        if hit:
            blocks = list(range(1000 + self._n_blocks, 1000 + self._n_blocks + 200))
            self._n_blocks += 200
            self.bridge.begin_load(name, blocks, hit)
        return hit

    def ends(self, name: str, failed: Sequence[int] = ()) -> None:
        self.bridge.take_step()
        self.bridge.loads_ended([name], frozenset(failed))

    def counted(self, name: str) -> float:
        return self.store.metrics.total().get(name, 0)


@pytest.fixture
def scene() -> Scene:
    return Scene()


def crowd(scene: Scene, n: int = 4) -> list[str]:
    """Requests of one prefix and a tail of their own that is not stored."""
    found = [f"r{number}" for number in range(n)]
    for number, name in enumerate(found):
        scene.request(name, PREFIX + [10_000 + number] * 80, stored=8)
    return found


def test_one_loads_and_the_others_hit_the_engines_cache(scene: Scene) -> None:
    first, *others = crowd(scene)
    assert scene.ask(first) == 512
    for _ in range(3):
        assert [scene.ask(name) for name in others] == [None] * 3
    scene.ends(first)
    assert [scene.ask(name) for name in others] == [None] * 3, "the engine has not put the blocks into its cache yet"
    scene.bridge.landed(first)
    scene.now_s = 0.25
    for _ in range(2):
        assert [scene.ask(name, 512) for name in others] == [0] * 3
    assert scene.counted(names.SHARED_WAITS) == 3
    assert scene.counted(names.SHARED_TOKENS) == 3 * 512
    assert scene.counted(names.SHARED_WAIT_SECONDS) == 0.75


def test_waiting_is_cheap(scene: Scene) -> None:
    """Each step asks again: neither is the index asked, nor the prompt hashed."""
    first, second = crowd(scene, 2)
    scene.ask(first)
    scene.ask(second)
    asked = scene.store.n_lookups
    for _ in range(100):
        scene.now_s += WAIT_S / 101  # longer than an answer of the index is used
        assert scene.ask(second) is None
    assert scene.store.n_lookups == asked


def test_without_a_wait_each_loads_by_itself() -> None:
    scene = Scene(wait_s=0.0)
    assert [scene.ask(name) for name in crowd(scene)] == [512] * 4


@pytest.mark.parametrize("end", ["failed", "aborted", "reset"])
def test_a_load_that_brings_nothing_frees_all_at_once_and_the_next_one_loads(scene: Scene, end: str) -> None:
    first, second, third = crowd(scene, 3)
    scene.ask(first)
    assert scene.ask(second) is scene.ask(third) is None
    if end == "failed":
        scene.ends(first, [1000])
    elif end == "aborted":
        scene.bridge.finish(first, 0, [])
    else:
        scene.shared.clear()
    assert scene.ask(second) == 512
    assert scene.ask(third) is None, "for the second one's load now"
    scene.ends(second)
    scene.bridge.landed(second)
    assert scene.ask(third, 512) == 0


def test_a_block_that_fails_before_its_request_is_reported_frees_them(scene: Scene) -> None:
    first, second = crowd(scene, 2)
    scene.ask(first)
    assert scene.ask(second) is None
    scene.bridge.loads_ended((), frozenset([1000]))
    assert scene.ask(second) == 512


def test_an_overdue_load_is_replaced_by_one_other_not_by_all(scene: Scene) -> None:
    first, second, third = crowd(scene, 3)
    scene.ask(first)
    assert scene.ask(second) is scene.ask(third) is None
    scene.now_s = WAIT_S - 0.01
    assert scene.ask(second) is scene.ask(third) is None
    scene.now_s = WAIT_S
    assert scene.ask(second) == 512
    assert scene.ask(third) is None
    scene.now_s = 2 * WAIT_S
    assert scene.ask(third) == 512


def test_no_request_waits_for_ever_for_one_load_after_the_other(scene: Scene) -> None:
    *leaders, last = crowd(scene, 10)
    began_s, hit = scene.now_s, None
    for name in leaders:
        assert scene.ask(name) == 512
        hit = scene.ask(last)
        if hit is not None:
            break
        scene.now_s += 0.9 * WAIT_S
        scene.bridge.finish(name, 0, [])
    assert hit == 512 and 2 * WAIT_S < scene.now_s - began_s <= (WAITS_MAX + 1) * WAIT_S, "no wait was in vain"


def test_other_salts_are_other_prompts(scene: Scene) -> None:
    scene.request("red", PREFIX, salt="red")
    scene.request("blue", PREFIX, salt="blue")
    assert scene.ask("red") == 512 and scene.ask("blue") == 512


def test_what_is_not_shared_is_loaded_after_the_wait(scene: Scene) -> None:
    """Both are stored whole; the second one shares six chunks of eight with the first."""
    scene.request("first", PREFIX)
    scene.request("second", PREFIX[:384] + list(range(9000, 9256)))
    assert scene.ask("first") == 512
    assert scene.ask("second") is None
    scene.bridge.landed("first")
    assert scene.ask("second", 384) == 256


def test_a_follower_may_have_more_stored_than_the_first(scene: Scene) -> None:
    scene.request("first", PREFIX[:256])
    scene.request("second", PREFIX)
    assert scene.ask("first") == 256
    assert scene.ask("second") is None
    scene.bridge.landed("first")
    assert scene.ask("second", 256) == 256


def test_nobody_waits_for_a_load_much_longer_than_what_is_shared(scene: Scene) -> None:
    """The convoy: a short prompt behind the load of a document that begins like it."""
    document = list(range(int(LENGTH_RATIO * 128) + CHUNK))
    scene.request("document", document)
    scene.request("short", document[:128])
    scene.request("another", document[:128])
    assert scene.ask("document") == len(document)
    assert scene.ask("short") == 128
    assert scene.ask("another") is None, "for the short load, which has the same two chunks"


def test_short_of_kv_memory_they_wait_for_long_loads_too(scene: Scene) -> None:
    asked: list[int] = []

    def is_short(n_tokens: int) -> bool:
        asked.append(n_tokens)
        return True

    scene.shared.is_short = is_short
    scene.request("document", list(range(2048)))
    scene.request("short", list(range(128)))
    assert scene.ask("document") == 2048
    assert scene.ask("short") is None and asked == [128]
    scene.request("other", list(range(5000, 5128)))
    assert scene.ask("other") == 128, "it shares nothing"


def test_the_engines_own_hit_may_end_within_a_chunk(scene: Scene) -> None:
    first, second = crowd(scene, 2)
    assert scene.ask(first, 96) == 512 - 96
    assert scene.ask(second, 96) is None
    scene.bridge.landed(first)
    assert scene.ask(second, 512) == 0


def test_a_hit_that_was_evicted_at_once_is_waited_for_once_more_only(scene: Scene) -> None:
    """Or the engine's own key differs, as of two names of one adapter: the wait brings nothing."""
    names_of = crowd(scene, 5)
    last = names_of.pop()
    waits = 0
    for name in names_of:
        assert scene.ask(name) == 512
        if scene.ask(last) is not None:
            break
        waits += 1
        scene.ends(name)
        scene.bridge.landed(name)
    assert waits == 2


def test_an_aborted_follower_leaves_nothing(scene: Scene) -> None:
    first, second = crowd(scene, 2)
    scene.ask(first)
    scene.ask(second)
    scene.bridge.finish(second, 0, [])
    scene.bridge.finish(first, 0, [])
    shared = scene.shared
    assert not shared._loads and not shared._followers
    assert scene.bridge.take_step().before is None


def test_a_switch_of_the_request_is_kept(scene: Scene) -> None:
    """A request that may not load computes, at once."""
    first = crowd(scene, 1)[0]
    scene.ask(first)
    scene.bridge.track(RequestView("own", PREFIX, {}, may_load=False, may_save=True))
    assert scene.ask("own") == 0
