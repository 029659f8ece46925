"""Quotas, pins and the capacity against a model: whatever sets are made, filled, used, pinned and removed, no limit is
exceeded by a set that found room, and nothing goes that may stay."""

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Need, Quotas, Rules, namespace_note, quota_value, tenant_note
from kvtier.eviction.pins import Pin
from kvtier.index.base import SetInfo, Use
from kvtier.index.memory import MemoryIndex

CAPACITY_BYTES = 100
TENANTS = ["", "a", "b"]
SPACES = [bytes([number]) * 16 for number in (1, 2)]
SIZES = st.integers(1, 40)


class QuotasMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="kvtier-quotas-"))
        self.index = MemoryIndex()
        self.now_s = 0.0
        self.serial = 0
        self.tenants: dict[str, int | None] = {"a": 50}
        self.spaces: dict[bytes, int | None] = {}
        rules = Rules(quotas=Quotas(tenants={"a": 50}))
        self.evictor = Evictor(self.index, self.folder, "me", rules, lambda: self.now_s)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    def used(self, of: str | bytes | None = None) -> int:
        """By a tenant, a namespace, or in all."""
        return sum(info.n_bytes for info in self.index.sets() if of in (None, info.tenant, info.namespace))

    def excess(self, of: str | bytes) -> int:
        quota = self.tenants.get(of) if isinstance(of, str) else self.spaces.get(of)
        return 0 if quota is None else self.used(of) - quota

    @rule(tenant=st.sampled_from(TENANTS), space=st.sampled_from(SPACES), n_bytes=SIZES)
    def make_set(self, tenant: str, space: bytes, n_bytes: int) -> None:
        self.now_s += 1
        before = self.index.sets()
        protected = self.evictor.protected(before, CAPACITY_BYTES)
        freed = self.evictor.make_room(Need(n_bytes, space, tenant), CAPACITY_BYTES)
        gone = [info for info in before if info not in self.index.sets()]
        if freed is None:
            assert not gone, "evicted in vain"
            stay = [info for info in before if info.is_open or info.set_id in protected]

            def fits(of: str | bytes | None, limit: int | None) -> bool:
                stays = sum(info.n_bytes for info in stay if of in (None, info.tenant, info.namespace))
                return limit is None or n_bytes + stays <= limit

            limits = ((None, CAPACITY_BYTES), (tenant, self.tenants.get(tenant)), (space, self.spaces.get(space)))
            assert not all(fits(*limit) for limit in limits), "it was refused although there was room to be made"
            return
        self.serial += 1
        assert self.index.create_set(SetInfo(self.serial, space, "me", n_bytes, self.now_s, self.now_s, tenant=tenant))
        assert self.used() <= CAPACITY_BYTES
        assert self.excess(tenant) <= 0 and self.excess(space) <= 0

    @rule(choice=st.integers(0, 9))
    def close_set(self, choice: int) -> None:
        sets = self.index.sets()
        if sets:
            info = sets[choice % len(sets)]
            self.index.close_set(info.set_id, info.n_bytes)

    @rule(space=st.sampled_from(SPACES), pinned=st.booleans())
    def pin(self, space: bytes, pinned: bool) -> None:
        """Of sets that are closed only what is pinned stays for good."""
        pin = Pin(space.hex(), space, None, "", self.now_s, None)
        if pinned:
            self.index.put_note(pin.name, pin.pack(), None)
        else:
            self.index.drop_note(pin.name)

    @rule()
    def close_all(self) -> None:
        for info in self.index.sets():
            self.index.close_set(info.set_id, info.n_bytes)

    @rule(choice=st.integers(0, 9), uses=st.integers(1, 3))
    def use(self, choice: int, uses: int) -> None:
        self.now_s += 1
        sets = self.index.sets()
        if sets:
            self.index.touch({sets[choice % len(sets)].set_id: Use(self.now_s, uses)})

    @rule(tenant=st.sampled_from(TENANTS[1:]), quota=st.none() | st.integers(0, CAPACITY_BYTES))
    def set_tenant_quota(self, tenant: str, quota: int | None) -> None:
        self.index.put_note(tenant_note(tenant), quota_value(quota), None)
        self.tenants[tenant] = quota

    @rule(space=st.sampled_from(SPACES), quota=st.none() | st.integers(0, CAPACITY_BYTES))
    def set_namespace_quota(self, space: bytes, quota: int | None) -> None:
        self.index.put_note(namespace_note(space), quota_value(quota), None)
        self.spaces[space] = quota

    @rule(tenant=st.sampled_from(TENANTS[1:]))
    def drop_tenant_quota(self, tenant: str) -> None:
        """What the settings say counts again."""
        self.index.drop_note(tenant_note(tenant))
        self.tenants[tenant] = 50 if tenant == "a" else None

    @rule()
    def keep_limits(self) -> None:
        before = self.index.sets()
        protected = self.evictor.protected(before, CAPACITY_BYTES)
        over = {of for of in (*TENANTS, *SPACES) if self.excess(of) > 0}
        self.evictor.keep_limits(CAPACITY_BYTES)
        left = self.index.sets()
        for of in over:
            may_go = [info for info in left if of in (info.tenant, info.namespace)]
            assert self.excess(of) <= 0 or all(info.is_open or info.set_id in protected for info in may_go)
        for info in before:
            if info not in left:
                assert not info.is_open and info.set_id not in protected
                assert over & {info.tenant, info.namespace}, "it was above no quota"

    @invariant()
    def nothing_is_left_half_done(self) -> None:
        assert self.used() <= CAPACITY_BYTES
        assert not self.index.notes("evicting/", self.now_s)


TestQuotas = QuotasMachine.TestCase
TestQuotas.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
