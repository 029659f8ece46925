"""What an inference engine does with the two bridges: requests wait, load what is offered, compute the rest a few
chunks a step, end, and their blocks go to others at once. It knows what each block must hold, and looks."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from kvtier.connectors import tracked_request
from kvtier.connectors.bridge import Step
from kvtier.connectors.tracked_request import RequestView
from kvtier.format.namespace import salt_extra
from kvtier.plan import LoadDone, LoadPlan, SaveDone, SaveOutcome, SavePlan
from tests.simulation.engine import N_BLOCKS, TIMEOUT_S, EngineProcess
from tests.simulation.runtime import Process
from tests.simulation.truth import BLOCK_TOKENS, CHUNK_BLOCKS, CHUNK_TOKENS, Bytes, Identity

ANSWER_SLACK_S = 0.75
"""A load is answered so long after its deadline at the latest (I10): there are polls of other ranks before."""
TAIL = 0x5A  # what blocks behind the last whole chunk hold


class State(Enum):
    WAITING = "waiting"
    LOADING = "loading"
    RUNNING = "running"


@dataclass(frozen=True)
class Prompt:
    """local_blocks: of its first ones, those that the engine's own cache has."""

    tokens: tuple[int, ...]
    salt: str = ""
    local_blocks: int = 0


@dataclass(eq=False)
class Request:
    """computed: tokens whose KV is in its blocks. unanswered: ranks that owe an answer to its load; failed: blocks, by
    those that gave one. has_failed: a load of it did. is_old: its local blocks hold KV of weights before. is_shown:
    they hold it by now. late: ranks that did not answer in time, when they were asked first."""

    name: str
    prompt: Prompt
    weights: str
    keys: list[bytes]
    computed: int
    state: State = State.WAITING
    blocks: tuple[int, ...] = ()
    plan: LoadPlan | None = None
    asked_s: float = 0.0
    unanswered: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    late: set[int] = field(default_factory=set)
    has_failed: bool = False
    is_old: bool = False
    is_shown: bool = False

    def identity(self, chunk: int) -> Identity:
        return self.weights, self.prompt.salt, self.prompt.tokens[: (chunk + 1) * CHUNK_TOKENS]

    @property
    def n_chunks(self) -> int:
        return len(self.prompt.tokens) // CHUNK_TOKENS


class Serving:
    """One engine at work. Its methods are called on tasks of the engine's process, one at a time."""

    def __init__(self, engine: EngineProcess) -> None:
        self.engine = engine
        self.weights = engine.build.weights
        self.requests: dict[str, Request] = {}
        self.arrived: deque[Prompt] = deque()
        self.free = list(range(N_BLOCKS))
        self.told: Counter[str] = Counter()
        self.saved: dict[tuple[bytes, int, int], list[SaveOutcome]] = {}
        self._handed_on: list[int] = []
        self._place = engine.place
        self._violate = engine.place.runtime.violate
        self._n_requests = 0
        self._has_old_blocks = False

    # --- a step ---

    def step(self) -> None:
        """One step of the engine: schedules, lets the workers work, computes, and takes what came."""
        self._track_arrived()
        for request in list(self.requests.values()):
            if request.state is State.WAITING:
                self._schedule(request)
        running = [request for request in self.requests.values() if request.state is State.RUNNING]
        frontiers = {request.name: self._advance(request) for request in running}
        step = self.engine.scheduler.take_step(is_idle=not running, decodes=bool(running))
        self._work(step, running, frontiers)
        self._take_answers()
        for request in running:
            if request.computed == len(request.prompt.tokens):
                self._finish(request)

    def reset(self) -> None:
        """New weights in place. What runs goes on with KV of both."""
        in_use = any(request.blocks for request in self.requests.values())
        self.engine.scheduler.reset(in_use)
        self._has_old_blocks = in_use
        self.weights = f"{self.engine.process.name}.{self.told['resets']}"
        self.told["resets"] += 1
        self.saved.clear()

    @property
    def is_idle(self) -> bool:
        return not self.requests and not self.arrived

    def check(self) -> None:
        """Blocks that are nobody's, or not computed yet, hold what they were blanked with (I10)."""
        nobodys = sorted(set(self.free) - set(self._handed_on))
        ahead = [b for r in self.requests.values() if r.state is State.RUNNING for b in self._uncomputed(r)]
        blank = sorted(set(nobodys + ahead) - set(self._handed_on))
        if any(not pages.are_blank(blank) for pages in self.engine.pages):
            self._violate(f"{self.engine.process.name}: something was written into blocks that were given back (I10)")

    # --- its parts ---

    def _track_arrived(self) -> None:
        while self.arrived and len(self.requests) < 6:
            prompt = self.arrived.popleft()
            self._n_requests += 1
            name = f"{self.engine.process.name}-{self._n_requests}"
            extras = {0: salt_extra(prompt.salt)} if prompt.salt else {}
            view = RequestView(name, prompt.tokens, extras, True, True, prompt.salt)
            keys = tracked_request.chunk_keys(self.engine.store.namespace_id, prompt.tokens, CHUNK_TOKENS, extras)
            fault = self._place.truth.learn(keys, self.weights, prompt.salt, prompt.tokens)
            if fault is not None:
                self._violate(fault)
            self.engine.scheduler.track(view)
            request = Request(name, prompt, self.weights, keys, prompt.local_blocks * BLOCK_TOKENS)
            request.is_old = self._has_old_blocks and prompt.local_blocks > 0
            self.requests[name] = request
            self.told["requests"] += 1

    def _schedule(self, request: Request) -> None:
        tokens = request.prompt.tokens
        n_hit = self.engine.scheduler.hit_tokens(request.name, request.computed)
        if n_hit is None:
            self.told["asked again"] += 1
            return
        if n_hit and request.has_failed:
            self._violate(f"{request.name}: a load was offered again after one failed (I11)")
        if request.computed + n_hit > len(tokens) or (request.computed + n_hit) % CHUNK_TOKENS and n_hit:
            self._violate(f"{request.name}: a hit of {n_hit} tokens past {request.computed} of {len(tokens)}")
        if not request.blocks:
            n_blocks = -(-len(tokens) // BLOCK_TOKENS)
            if n_blocks > len(self.free):
                return
            request.blocks = tuple(self.free[:n_blocks])
            del self.free[:n_blocks]
        if n_hit:
            request.state, request.unanswered = State.LOADING, set(range(len(self.engine.ranks)))
            request.failed, request.late = set(), set()
            self.engine.scheduler.begin_load(request.name, request.blocks, n_hit)
        else:
            self._begin(request)

    def _begin(self, request: Request) -> None:
        request.state = State.RUNNING
        self.engine.scheduler.begin(request.name, request.computed)

    def _advance(self, request: Request) -> int:
        """What is computed of it in this step; the tier is told how far it is then."""
        n_tokens = self._place.runtime.rng.choice([1, 1, 2]) * CHUNK_TOKENS
        frontier = min(request.computed + n_tokens, len(request.prompt.tokens))
        if self.engine.scheduler.chunks_pending(request.name, frontier):
            self.engine.scheduler.advance(request.name, frontier, request.blocks)
        return frontier

    def _work(self, step: Step, running: Sequence[Request], frontiers: dict[str, int]) -> None:
        ranks, pages = self.engine.ranks, self.engine.pages
        self._note_plans(step)
        for rank in ranks:
            rank.before_forward(step)
        for of_rank in pages:
            of_rank.blank(self._handed_on)
        self._handed_on = []
        for plan in step.loads:
            request = self.requests[plan.request_id]
            request.plan, request.asked_s = plan, self._place.runtime.now_s
        for rank in ranks:
            rank.start_loads(step)
        for request in running:
            self._compute(request, frontiers[request.name])
        for rank in ranks:
            rank.after_forward(step)

    def _compute(self, request: Request, frontier: int) -> None:
        """The forward. Its own first blocks hold its KV, as they did all along: until now they only showed whether
        somebody writes into them."""
        numbers = list(range(request.computed // BLOCK_TOKENS, -(-frontier // BLOCK_TOKENS)))
        if not request.is_old and not request.is_shown:
            numbers += range(request.prompt.local_blocks)
        request.is_shown = True
        for number in numbers:
            chunk, part = divmod(number, CHUNK_BLOCKS)
            for pages in self.engine.pages:
                if chunk < request.n_chunks:
                    pages.put([request.blocks[number]], self._value(request, chunk), part)
                else:
                    pages.content[:, :, request.blocks[number]] = TAIL
        request.computed = frontier

    def _value(self, request: Request, chunk: int) -> Bytes:
        return self._place.truth.of(request.identity(chunk))

    def _uncomputed(self, request: Request) -> tuple[int, ...]:
        return request.blocks[-(-request.computed // BLOCK_TOKENS) :]

    def _finish(self, request: Request) -> None:
        """It ends well, whatever befell the tier (I9), and what it holds is what was computed or loaded."""
        for chunk in range(request.n_chunks):
            blocks = request.blocks[chunk * CHUNK_BLOCKS : (chunk + 1) * CHUNK_BLOCKS]
            is_old = request.is_old and chunk * CHUNK_BLOCKS < request.prompt.local_blocks
            if not is_old and any(not pages.holds(blocks, self._value(request, chunk)) for pages in self.engine.pages):
                self._violate(f"{request.name}: chunk {chunk} is not what was computed or loaded (I2, I10)")
        self.engine.scheduler.finish(request.name, request.computed, request.blocks)
        self.free += request.blocks
        self._handed_on += request.blocks
        del self.requests[request.name]
        self.told["finished"] += 1

    # --- answers ---

    def _take_answers(self) -> None:
        scheduler = self.engine.scheduler
        saves: list[SaveDone] = []
        for number, rank in enumerate(self.engine.ranks):
            for done in rank.poll():
                self._take_load(number, done)
            saves += rank.take_saves()
            for request in self.requests.values():
                if request.state is State.LOADING and number in request.unanswered and request.plan is not None:
                    self._look_for_answer(number, request)
        for request in [r for r in self.requests.values() if r.state is State.LOADING and not r.unanswered]:
            scheduler.loads_ended([request.name], request.failed)
            self._end_load(request)
        scheduler.saved(saves)
        self._note_saves(saves)

    def _take_load(self, rank: int, done: LoadDone) -> None:
        request = self.requests.get(done.request_id)
        if request is None or request.state is not State.LOADING or rank not in request.unanswered:
            self._violate(f"{done.request_id}: rank {rank} answered its load twice, or one that there is none of (I10)")
            return
        request.unanswered.discard(rank)
        request.failed |= done.failed_blocks
        if request.plan is not None:
            self._look_at_load(rank, request, request.plan, done)

    def _look_for_answer(self, rank: int, request: Request) -> None:
        """Who looked once too soon, while the answer was just being given, has it with the next look."""
        if self._place.runtime.now_s <= request.asked_s + TIMEOUT_S + ANSWER_SLACK_S:
            return
        if rank in request.late:
            self._violate(f"{request.name}: rank {rank} did not answer its load in time (I10)")
        request.late.add(rank)

    def _look_at_load(self, rank: int, request: Request, plan: LoadPlan, done: LoadDone) -> None:
        """No block is said to be loaded that does not hold what was saved (I2), none is touched that the engine had."""
        pages, has_failed = self.engine.pages[rank], False
        first_chunk = request.keys.index(plan.chunks[0].key) if plan.chunks[0].key in request.keys else -1
        for number, chunk in enumerate(plan.chunks, first_chunk):
            skipped = chunk.first_token // BLOCK_TOKENS
            own, asked = chunk.block_ids[:skipped], chunk.block_ids[skipped:]
            failed = done.failed_blocks & set(asked)
            value = self._value(request, number)
            if own and not pages.are_blank(own):
                self._violate(f"{request.name}: a block that the engine had was written")
            if failed not in (set(), set(asked)) or (has_failed and not failed):
                self._violate(f"{request.name}: what was loaded is no prefix")
            has_failed = bool(failed)
            is_loaded = pages.holds(asked, value, skipped)
            if not failed and not is_loaded:
                self._violate(f"{request.name}: chunk {number} was loaded, and is not what was saved (I2)")
            if not failed and chunk.key not in self._place.planned:
                self._violate(f"{request.name}: chunk {number} was loaded, and nobody ever saved it (I2)")
            if failed and not is_loaded and not pages.are_blank(asked):
                self._violate(f"{request.name}: chunk {number} is neither loaded nor left alone (I2)")
            self.told["chunks failed" if failed else "chunks loaded"] += 1

    def _end_load(self, request: Request) -> None:
        """Goes on behind what was loaded; asks again, as engines do, and must not be offered another."""
        loaded = request.prompt.local_blocks
        if request.plan is not None:
            end = request.keys.index(request.plan.chunks[-1].key) + 1
            while loaded < end * CHUNK_BLOCKS and request.blocks[loaded] not in request.failed:
                loaded += 1
        request.has_failed |= bool(request.failed)
        request.computed = loaded * BLOCK_TOKENS
        request.plan = None
        for pages in self.engine.pages:
            pages.blank(self._uncomputed(request))
        request.state = State.WAITING
        if not request.has_failed:
            self._begin(request)

    def _note_plans(self, step: Step) -> None:
        for plan in (step.before, step.after):
            if plan is not None:
                self._note_plan(plan)

    def _note_plan(self, plan: SavePlan) -> None:
        for chunk in plan.chunks:
            self._place.planned.add(chunk.key)
            self.saved[chunk.key, chunk.set_id, chunk.slot] = []
            self.told["planned"] += 1

    def _note_saves(self, saves: Sequence[SaveDone]) -> None:
        """A claim: all ranks that write it said that the chunk is saved, and it is visible. (Not of weights that are
        only this engine's: those go when it goes on to others.)"""
        for done in saves:
            self.told[done.outcome.value] += 1
            answers = self.saved.get((done.key, done.set_id, done.slot))
            if answers is None:
                continue
            answers.append(done.outcome)
            if len(answers) > self.engine.n_writers:
                self._violate(f"chunk {done.key.hex()} was answered more often than it was saved")
            is_all = answers == [SaveOutcome.SAVED] * self.engine.n_writers
            if is_all and not self._place.index.is_remote and done.key not in self._place.published:
                self._violate(f"chunk {done.key.hex()} was answered saved, and never became visible")
            is_lasting = self.weights == self.engine.build.weights
            if is_all and is_lasting and self._place.index.real.resolve([done.key]):
                self._place.claims.add(done.key)


@dataclass(eq=False)
class Seat:
    """An engine's place: its process, and what it serves with once it has started. looked_at: when nothing of it went
    on since then, it is as it was."""

    process: Process
    serving: Serving | None = None
    is_busy: bool = True
    is_leaving: bool = False
    looked_at: int = -1
