"""Model of an engine that serves prompts from the tier: which waits for others' loads pay. Uses the real SharedLoads.

    python -m tests.scheduler.serving_model          prints the table of policies

An H100 with Llama-3.1-8B in bf16: loads share a link, prefill and decode take turns in steps, loaded blocks become
common when their load has ended, and free blocks stay cached until others need them.
"""

import random
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from unittest.mock import patch

from kvtier.runtime import metrics as names
from kvtier.runtime.metrics import Metrics
from kvtier.scheduler import shared_loads
from kvtier.scheduler.shared_loads import SharedLoads

CHUNK = 256
LINK = 52e9 / 131_072  # tokens a second that all loads together bring
PREFILL = 39_000  # tokens a second
STEP_S, STEP_TOKENS = 0.007, 8192  # shortest step; most tokens of one
LOAD_S = 0.003  # fixed cost of a load
MIN_LOAD = 256
WAIT_S = 5.0

Key = tuple[object, int]


@dataclass(eq=False)
class Request:
    """keys: of its whole chunks, of which the first `stored` are in the tier. own: chunks that are common blocks."""

    name: str
    arrives_s: float
    keys: list[Key]
    stored: int
    tokens: int
    answer: int
    computed: int = 0
    own: int = 0
    left: float = 0.0
    delay_s: float = 0.0
    is_loading: bool = False
    is_loaded: bool = False
    n_out: int = 0


@dataclass
class Result:
    mean_ms: float
    p99_ms: float
    end_s: float
    loaded: int
    peak: int
    waits: int


def prompt(name: str, arrives_s: float, parts: Sequence[tuple[object, int]], tail: int, answer: int = 32) -> Request:
    """A prompt of stored parts, each (name, tokens), and a tail that is not stored."""
    keys = [
        (tuple(part for part, _ in parts[: n + 1]), i)
        for n, (_, size) in enumerate(parts)
        for i in range(size // CHUNK)
    ]
    return Request(name, arrives_s, keys, len(keys), len(keys) * CHUNK + tail, answer)


@dataclass
class Model:
    """memory: tokens of KV. one: the largest share of the link that one load can use."""

    requests: list[Request]
    wait_s: float
    memory: int = 2_000_000
    link: float = LINK
    one: float = 1.0
    now_s: float = 0.0
    loaded: int = 0
    peak: int = 0
    ttft: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shared = SharedLoads(Metrics(), lambda: self.now_s)
        self.shared.wait_s = self.wait_s
        self.shared.is_short = lambda n_tokens: self.free - n_tokens < 0.1 * self.memory
        self.free = self.memory
        self.cache: dict[Key, int] = {}  # common blocks -> requests that use them
        self.todo = deque(sorted(self.requests, key=lambda r: r.arrives_s))
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.loads: list[Request] = []

    def run(self) -> Result:
        while self.todo or self.waiting or self.running:
            self.step()
        ttft = sorted(self.ttft)
        p99, waits = ttft[int(len(ttft) * 0.99)], self.shared._metrics.total().get(names.SHARED_WAITS, 0)
        mean = statistics.mean(ttft)
        return Result(mean * 1e3, p99 * 1e3, self.now_s, self.loaded, self.peak, int(waits))

    def step(self) -> None:
        while self.todo and self.todo[0].arrives_s <= self.now_s:
            self.waiting.append(self.todo.popleft())
        budget = STEP_TOKENS
        new = {}
        for request in self.running:
            new[request] = min(budget, max(1, request.tokens - request.computed))
            budget -= new[request]
        for request in list(self.waiting):
            if budget <= 0 or not self._admit(request):
                break
            if request in self.running:
                new[request] = min(budget, max(1, request.tokens - request.computed))
                budget -= new[request]
        took_s = max(STEP_S if self.running else 0.002, sum(new.values()) / PREFILL)
        self._load(took_s)
        self.now_s += took_s
        for request, count in new.items():
            self._compute(request, count)

    def _admit(self, request: Request) -> bool:
        """As vLLM's scheduler does with the next waiting request; False: without blocks for it, none behind it is."""
        if request.is_loading:
            return True
        if request.is_loaded:
            self._share(request)
            self.shared.end(request.name)
        else:
            own = next((n for n, key in enumerate(request.keys) if key not in self.cache), len(request.keys))
            hit = request.keys[own : request.stored]
            is_hit = len(hit) * CHUNK >= MIN_LOAD
            keys = [repr(key).encode() for key in hit]
            if self.shared.is_waiting(request.name, own * CHUNK):
                return True
            if is_hit and self.shared.must_wait(request.name, keys, CHUNK, own * CHUNK):
                return True
            if not self._allocate(request, own):
                return False
            request.computed = min(own * CHUNK, request.tokens - 1)
            if is_hit:
                self.shared.begin(request.name, keys, len(hit) * CHUNK)
                request.is_loading, request.left, request.delay_s = True, len(hit) * CHUNK, LOAD_S
                self.loaded += len(hit) * CHUNK
                self.loads.append(request)
                return True
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _allocate(self, request: Request, own: int) -> bool:
        for key in request.keys[:own]:
            self.cache[key] += 1
        needed = request.tokens + request.answer - own * CHUNK
        idle = iter([key for key, users in self.cache.items() if not users]) if self.free < needed else iter(())
        while self.free < needed:
            key = next(idle, None)
            if key is None:
                for used in request.keys[:own]:
                    self.cache[used] -= 1
                return False
            del self.cache[key]
            self.free += CHUNK
        self.free -= needed
        self.peak = max(self.peak, self.memory - self.free)
        request.own = own
        return True

    def _share(self, request: Request) -> None:
        """Make the whole chunks that it has by now common blocks, as far as none has the key yet."""
        for key in request.keys[request.own : request.computed // CHUNK]:
            if key in self.cache:
                return
            self.cache[key] = 1
            request.own += 1

    def _load(self, took_s: float) -> None:
        while took_s > 1e-9 and self.loads:
            moving = [request for request in self.loads if request.delay_s <= 0]
            rate = min(self.link / max(1, len(moving)), self.link * self.one)
            part_s = min([took_s, *(r.left / rate if r.delay_s <= 0 else r.delay_s for r in self.loads)])
            for request in self.loads:
                if request.delay_s > 0:
                    request.delay_s -= part_s
                else:
                    request.left -= rate * part_s
            took_s -= part_s
            for request in [r for r in moving if r.left <= 1e-6]:
                self.loads.remove(request)
                request.is_loading, request.is_loaded = False, True
                request.computed = request.stored * CHUNK

    def _compute(self, request: Request, count: int) -> None:
        request.computed += count
        if request.computed < request.tokens:
            self._share(request)
            return
        if not request.n_out:
            self._share(request)
            self.ttft.append(self.now_s - request.arrives_s)
        request.n_out += 1
        if request.n_out >= request.answer:
            self.running.remove(request)
            self.shared.forget(request.name)
            for key in request.keys[: request.own]:
                self.cache[key] -= 1
            self.free += request.tokens + request.answer - request.own * CHUNK


def burst(n: int = 64) -> list[Request]:
    """One stored prefix of 8,192 tokens."""
    return [prompt(f"r{i}", 0.0, [("prefix", 8192)], 100) for i in range(n)]


def documents(n: int = 64) -> list[Request]:
    """A common system prompt of 1,024 tokens, and 20,480 stored tokens of their own."""
    return [prompt(f"r{i}", 0.0, [("system", 1024), (i, 20_480)], 100) for i in range(n)]


def tree(n: int = 64) -> list[Request]:
    """2,048 tokens in common, 6,144 in common with seven others, 2,048 of their own."""
    return [prompt(f"r{i}", 0.002 * i, [("system", 2048), (i % 8, 6144), (i, 2048)], 100) for i in range(n)]


def long_first(n: int = 300) -> list[Request]:
    """Groups of four: the first has a document behind the common 2,048 tokens, the others come within 0.1 s."""
    rng = random.Random(7)
    found: list[Request] = []
    arrives_s = 0.0
    for group in range(n // 4):
        arrives_s += rng.expovariate(3)
        size = rng.choice([6, 14, 30, 98]) * 1024
        found.append(prompt(f"r{group}", arrives_s, [(group, 2048), ("document", size)], 100))
        found += [prompt(f"r{group}-{i}", arrives_s + 0.1 * rng.random(), [(group, 2048)], 100) for i in range(3)]
    return found


def chat(n: int = 400) -> list[Request]:
    """A common system prompt of 1,536 tokens, and histories of 2,048 to 12,288 tokens of 60 users."""
    rng = random.Random(5)
    arrives_s, found = 0.0, []
    sizes = [rng.randrange(2, 13) * 1024 for _ in range(60)]
    for i in range(n):
        arrives_s += rng.expovariate(60)
        user = rng.randrange(60)
        found.append(prompt(f"r{i}", arrives_s, [("system", 1536), (user, sizes[user])], 200, 64))
    return found


# name: (wait, ratio)
POLICIES = {"never": (0.0, 1.0), "2": (WAIT_S, 2.0), "4": (WAIT_S, 4.0), "8": (WAIT_S, 8.0), "always": (WAIT_S, 1e9)}


def results(
    make: Callable[[], list[Request]], link: float = LINK, one: float = 1.0, policies: Sequence[str] = tuple(POLICIES)
) -> Iterator[tuple[str, Result]]:
    """Each policy with the same prompts."""
    for name in policies:
        wait_s, ratio = POLICIES[name]
        with patch.object(shared_loads, "LENGTH_RATIO", ratio):
            yield name, Model(make(), wait_s, link=link, one=one).run()


def main() -> None:
    print("prompts, GB/s, share of one load | policy | mean ms | p99 ms | end s | loaded tokens | peak tokens | waits")
    for make in (burst, documents, tree, long_first, chat):
        for link, one in ((LINK, 1.0), (LINK, 0.125), (LINK / 8, 1.0)):
            for name, found in results(make, link, one):
                place = f"{make.__name__}, {link * 131_072 / 1e9:.1f}, {one}"
                print(
                    f"{place} | {name} | {found.mean_ms:.0f} | {found.p99_ms:.0f} | {found.end_s:.2f} | "
                    f"{found.loaded} | {found.peak} | {found.waits}"
                )


if __name__ == "__main__":
    main()
