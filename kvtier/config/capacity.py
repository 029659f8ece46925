"""Settings of how a root's capacity is shared and kept: watermarks, quotas and pins."""

from collections import Counter
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field, field_validator

from kvtier.config.types import FROZEN, Bytes, BytesOrZero, Seconds, no_bool
from kvtier.errors import HIDDEN, ConfigError
from kvtier.runtime.units import exact

HIGH_WATERMARK, LOW_WATERMARK = 0.95, 0.9  # defaults, as parts of capacity_bytes
FEW_SETS = 4  # that fit the capacity; with fewer a warning is given, for two are in use
TENANT_BYTES_MAX = 32  # longest tenant name in UTF-8, bytes: the field of the segment header

Fraction = Annotated[float, BeforeValidator(no_bool), Field(ge=0, le=1)]


class TenantSettings(BaseModel):
    """A tenant: requests with one of `cache_salts` (exact, or patterns with * ? [..]). Its chunks are in segment sets
    of its own, which together take at most `quota_bytes`; None: no quota."""

    model_config = FROZEN
    name: Annotated[str, Field(min_length=1)]
    cache_salts: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)]
    quota_bytes: Bytes | None = None

    @field_validator("name")
    @classmethod
    def _fits_a_header(cls, value: str) -> str:
        if len(value.encode()) > TENANT_BYTES_MAX:
            raise ValueError(f"must be at most {TENANT_BYTES_MAX} bytes long in UTF-8")
        if not value.isprintable() or "/" in value or value != value.strip():
            raise ValueError("must be printable, without a / and without blanks around it")
        return value


class CapacitySettings(BaseModel):
    """Rules of eviction, beside capacity_bytes, the limit of all segments of the root.

    high_watermark, low_watermark: fractions of capacity_bytes; above the first, sets are evicted in the background
        until usage is below the second.
    reserve_bytes: space of the disk that is left free for others. ttl_s: a set unused for so long is evicted.
    pinned_max_fraction: largest part of the capacity that pins protect.
    namespace_quota_bytes: limit of each namespace. tenants: groups of requests, recognised by their cache salt.
    """

    model_config = FROZEN
    high_watermark: Fraction = HIGH_WATERMARK
    low_watermark: Fraction = LOW_WATERMARK
    reserve_bytes: BytesOrZero = 0
    ttl_s: Seconds | None = None
    pinned_max_fraction: Fraction = 0.5
    namespace_quota_bytes: Bytes | None = None
    tenants: tuple[TenantSettings, ...] = ()

    def check(self, touch_interval_s: float) -> None:
        """Raises ConfigError for settings that contradict each other. touch_interval_s: interval between two writes of
        recency."""
        if self.ttl_s is not None and self.ttl_s < 2 * touch_interval_s:
            fix = (
                f"recency of use is written every {touch_interval_s:g} s (touch_interval_s), so sets in use would be "
                f"evicted: set it to at least {2 * touch_interval_s:g}, as a number of seconds or as 12h or 7d"
            )
            raise ConfigError("capacity.ttl_s", self.ttl_s, fix)
        if not 0 < self.low_watermark <= self.high_watermark:
            fix = f"must be more than 0 and at most capacity.high_watermark ({self.high_watermark})"
            raise ConfigError("capacity.low_watermark", self.low_watermark, fix)
        names = Counter(tenant.name for tenant in self.tenants)
        for name in (name for name, count in names.items() if count > 1):
            raise ConfigError("capacity.tenants", name, "two tenants have this name: give each its own")
        salts = Counter(salt for tenant in self.tenants for salt in tenant.cache_salts)
        whose = [tenant.name for tenant in self.tenants if any(salts[salt] > 1 for salt in tenant.cache_salts)]
        if whose:
            fix = f"a cache salt is listed twice (tenants: {', '.join(whose)}): list it once, with one tenant"
            raise ConfigError("capacity.tenants", HIDDEN, fix)

    def check_sets(self, set_bytes: int, capacity_bytes: int, slots: int | None) -> None:
        """Raises ConfigError for a quota, or a watermark, that not even one segment set (`set_bytes` over all ranks)
        fits into. slots: of the set, None where the model is not known."""
        for name, usual in (("high_watermark", HIGH_WATERMARK), ("low_watermark", LOW_WATERMARK)):
            fraction = getattr(self, name)
            if fraction < usual and fraction * capacity_bytes < set_bytes:
                fix = (
                    f"that part of capacity_bytes ({exact(capacity_bytes)}) is less than one segment set "
                    f"({exact(set_bytes)}), so nothing would stay: raise it, or lower {smaller_set(slots)}"
                )
                raise ConfigError(f"capacity.{name}", fraction, fix)
        quotas = [("capacity.namespace_quota_bytes", self.namespace_quota_bytes)] + [
            (f"capacity.tenants.{tenant.name}.quota_bytes", tenant.quota_bytes) for tenant in self.tenants
        ]
        for key, quota_bytes in quotas:
            if quota_bytes is not None and quota_bytes < set_bytes:
                fix = (
                    f"one segment set takes {exact(set_bytes)}, so nothing would ever be stored: raise it to several "
                    f"times that, or lower {smaller_set(slots)}"
                )
                raise ConfigError(key, quota_bytes, fix)


def smaller_set(slots: int | None) -> str:
    """Return the setting to lower for smaller segment sets. slots: of a set, None where the model is not known."""
    return "chunk_tokens, for a set is one chunk" if slots == 1 else "segment_bytes"


def few_sets(capacity_bytes: int, set_bytes: int, slots: int | None, ranks: str = "") -> str:
    """Return a warning if open and spare segment sets take most of the capacity; "" otherwise.

    slots: of the set, None where the model is not known. ranks: those that set_bytes are of, if not all.
    """
    if capacity_bytes >= FEW_SETS * set_bytes:
        return ""
    return (
        f"capacity_bytes ({exact(capacity_bytes)}) is less than {FEW_SETS} times a segment set ({exact(set_bytes)}"
        f"{ranks}): one is filled and one kept ready, so little is left to be found again, and a start may evict all "
        f"of it; raise capacity_bytes, or lower {smaller_set(slots)}"
    )
