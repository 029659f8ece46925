"""Answers of the operations: the command line prints them, the admin service sends them, both as the same JSON.

Times are seconds since the epoch, sizes bytes, rates a second. null always means "not known" or "not measured", never
zero.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvtier.eviction.choice import KeptReason
from kvtier.scheduler.engine_report import BOUNDS_S, TopPrefix, WorkerReport

HexId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", description="16 bytes in hex")]
SetId = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$", description="number of a segment set in hex, as in file names")]


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class IndexState(Answer):
    """is_being_rebuilt: it knows nothing of the segments; an engine, or `kvtier index rebuild`, reads it back from the
    segments."""

    is_being_rebuilt: bool
    chunks: int
    records: int
    sets: int
    set_bytes: int = Field(
        description="what all segment sets reserve: open ones with their whole size, closed ones as they are on disk"
    )


class TierFill(Answer):
    """hbm and host: sums over all engines that report. filesystem: what segment sets reserve of the configured
    capacity."""

    tier: Literal["hbm", "host", "filesystem"]
    used_bytes: int
    size_bytes: int


class Capacity(Answer):
    """Capacity of the root. Watermarks are fractions of capacity_bytes. used_bytes: bytes that segment sets reserve, as
    set_bytes of the index; eviction goes by it. Less may be on disk while open sets are not full."""

    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    disk_free_bytes: int
    high_watermark: float
    low_watermark: float


class Rates(Answer):
    """Sums over the engines that report, each over its own last interval. hit_ratio: of the tokens looked up, those
    that were handed to a load, also where it failed later."""

    hit_ratio: float | None
    lookup_tokens_s: float
    hit_tokens_s: float
    load_bytes_s: float
    file_read_bytes_s: float
    save_bytes_s: float
    evicted_bytes_s: float
    skipped_chunks_s: float
    errors_s: float
    ttft_saved_s_per_s: float | None = Field(
        description="seconds of time to first token that were saved in each second; null: no prefill was timed yet"
    )


class Totals(Answer):
    """Sums over the engines that report, since each one's start. skipped_chunks: chunks that were not saved although no
    other engine had saved them."""

    hit_ratio: float | None
    lookup_tokens: float
    hit_tokens: float
    load_bytes: float
    file_read_bytes: float
    save_bytes: float
    evicted_bytes: float
    skipped_chunks: float
    errors: float
    ttft_saved_s: float | None = Field(description="null: no prefill was timed yet")


class LatencySummary(Answer):
    """Quantiles are estimated from the buckets (`counts`, with upper bounds `bounds_s` and one bucket without)."""

    count: int
    mean_s: float | None
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    bounds_s: list[float] = list(BOUNDS_S)
    counts: list[int]
    sum_s: float


class Latencies(Answer):
    """Latencies. lookup: of a prompt, in the index. load: of a request, from the plan's arrival in a worker to the last
    byte. save: of a chunk, from its gather in the worker to its publication, with the wait in the queue."""

    lookup: LatencySummary
    load: LatencySummary
    save: LatencySummary


class NamespaceRow(Answer):
    """model: the name under which an engine serves it, or first did; "": not known. hits: uses of its sets, as far as
    the engines have booked them."""

    id: str
    engine: str
    model: str
    kv: str = Field(description="layers x KV heads and type, such as 32x8 bfloat16")
    codec: str
    chunk_tokens: int
    sets: int
    open_sets: int
    pinned_sets: int
    n_bytes: int
    quota_bytes: int | None
    hits: int
    last_used_s: float | None
    is_readable: bool = Field(description="false: the owner of its KV is unknown; engines do not use it")


class TenantRow(Answer):
    """label: "" is everybody without one."""

    label: str
    sets: int
    n_bytes: int
    quota_bytes: int | None
    hits: int
    last_used_s: float | None


class Worker(Answer):
    """An engine that gives signs of life. age_s: of its last report."""

    age_s: float
    hit_ratio: float | None = Field(description="since its start")
    skipped_chunks: float = Field(description="chunks not saved since its start, nor by another engine")
    errors: float = Field(description="since its start: of loads, checksums and the index")
    report: WorkerReport


class Prefix(TopPrefix):
    """A prefix that is loaded often, over all engines that report."""

    namespace: str
    model: str
    workers: int
    is_pinned: bool


class Figures(Answer):
    """Fill, rates and latencies of the tier."""

    at_s: float
    index: IndexState
    capacity: Capacity
    tiers: list[TierFill]
    rates: Rates
    totals: Totals
    latencies: Latencies
    namespaces: list[NamespaceRow]
    tenants: list[TenantRow]


class Snapshot(Figures):
    """State of the tier. read_ceiling_bytes_s: sum over hosts of the best calibrated rate on each; null where no
    engine measured one (those without a GPU do not)."""

    read_ceiling_bytes_s: float | None
    workers: list[Worker]
    unreadable_reports: int = Field(description="notes in the index that are no reports")
    top_prefixes: list[Prefix]


class SetRow(Answer):
    """A segment set. owner: the engine that fills it or filled it; "" when it was read back from its files."""

    set_id: SetId
    namespace: HexId
    tenant: str
    owner: str
    n_bytes: int
    created_s: float
    used_s: float
    uses: int
    is_open: bool
    is_pinned: bool


class SegmentFile(Answer):
    name: str
    n_bytes: int


class SetDetails(SetRow):
    """records: that can be found in it now. files: of all ranks, on disk."""

    records: int
    files: list[SegmentFile]


class SetPage(Answer):
    """next_after: pass it as `after` for the next page; null: this was the last one."""

    sets: list[SetRow]
    next_after: SetId | None


class SetHit(Answer):
    """Chunks of a hit in one set. first_chunk: number of the first of them in the prompt."""

    set_id: SetId
    owner: str
    first_chunk: int
    chunks: int
    files: list[str]


class NamespaceHit(Answer):
    """Hit of a prompt in one namespace. last_key: key of the last stored chunk; a prefix is pinned by it. sets: segment
    sets of the chunks in the order of the prompt, the first SETS_SHOWN_MAX of them."""

    namespace: HexId
    model: str
    chunk_tokens: int
    chunks: int
    hit_chunks: int
    hit_tokens: int
    last_key: HexId | None
    sets: list[SetHit]


class LookupAnswer(Answer):
    """hits: of every namespace that was asked, the longest first. tokens: of the prompt."""

    tokens: int
    hits: list[NamespaceHit]


class KeptSets(Answer):
    """Sets that are meant by a request to evict and stay. why: `open`, an engine that lives fills them; `pinned`;
    `not reached`, another evictor took over. owners: the engines that fill them, the first KEPT_OWNERS_MAX."""

    why: KeptReason
    n_sets: int
    n_bytes: int
    owners: list[str]


class Evicted(Answer):
    """Result of an eviction, or with dry_run of a planned one. sets: the first SETS_SHOWN_MAX of n_sets. kept: selected
    sets that stay, and why. is_complete: false when the evictor stopped before the end: ask again for the rest.
    unlinked_bytes: bytes of the unlinked files; a process that has one open keeps its space, engines for some
    seconds."""

    dry_run: bool
    is_complete: bool
    n_sets: int
    n_bytes: int
    unlinked_bytes: int
    sets: list[SetRow]
    kept: list[KeptSets]


class PinRow(Answer):
    """keys: how many chunks it names; null: the whole namespace. n_bytes: of the sets that it protects at this time."""

    id: str
    namespace: str
    label: str
    keys: int | None
    created_s: float
    expires_s: float | None
    sets: int
    n_bytes: int


class Pins(Answer):
    """pinned_bytes: protected by all of them; max_bytes: what pins may protect in all."""

    pins: list[PinRow]
    pinned_bytes: int
    max_bytes: int


class QuotaRow(Answer):
    """of: a tenant's label, or a namespace's id. is_run_time: set here, not in the settings. quota_bytes null: none."""

    kind: Literal["tenant", "namespace"]
    of: str
    quota_bytes: int | None
    used_bytes: int
    is_run_time: bool


class QuotaList(Answer):
    default_namespace_bytes: int | None
    quotas: list[QuotaRow]


class BadRecord(Answer):
    namespace: str
    segment: str
    slot: int | None
    what: str


class VerifyJob(Answer):
    """Reading every record and checking every checksum, in the background. bad: the first BAD_SHOWN_MAX of n_bad.
    unfinished: slots whose writer died; nothing refers to them. unproved: signed records whose signatures were not
    checked, for want of the secret in the service's settings."""

    id: str
    state: Literal["waiting", "running", "done", "failed", "cancelled"]
    segments_done: int = 0
    segments_total: int | None = None
    started_s: float
    ended_s: float | None = None
    records: int | None = None
    n_bytes: int | None = None
    unfinished: int | None = None
    unproved: int | None = None
    n_bad: int | None = None
    bad: list[BadRecord] = []
    fault: str = ""


class VerifyJobs(Answer):
    jobs: list[VerifyJob]
