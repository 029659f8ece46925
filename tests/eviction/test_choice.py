"""Sets chosen for eviction: order, pins, quotas, watermarks. Pure."""

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtier.config.capacity import CapacitySettings, TenantSettings
from kvtier.eviction.choice import EvictionChoice, Selection
from kvtier.eviction.limits import Need, Quotas, Rules, Used, namespace_note, quota_value, tenant_note
from kvtier.eviction.pins import Pin, protected_sets, read_pins
from kvtier.index.base import SetInfo

A, B = b"a" * 16, b"b" * 16
DEEP = b"[" * 100_000  # JSON that Python's parser refuses with RecursionError


def info(set_id: int, used_s: float = 0.0, **changes: object) -> SetInfo:
    return replace(SetInfo(set_id, A, "x", 10, float(set_id), used_s, is_open=False), **changes)  # type: ignore[arg-type]


@st.composite
def some_sets(draw: st.DrawFn) -> list[SetInfo]:
    n = draw(st.integers(0, 12))
    return [
        SetInfo(
            set_id,
            draw(st.sampled_from([A, B])),
            "x",
            draw(st.integers(1, 30)),
            draw(st.floats(0, 100)),
            draw(st.floats(0, 100)),
            draw(st.booleans()),
            draw(st.sampled_from(["", "t", "u"])),
            draw(st.integers(0, 9)),
        )
        for set_id in range(n)
    ]


sizes = st.integers(0, 200)
quotas = st.builds(
    Quotas,
    st.none() | sizes,
    st.dictionaries(st.sampled_from([A, B]), st.none() | sizes),
    st.dictionaries(st.sampled_from(["t", "u"]), st.none() | sizes),
)


def ids(sets: Sequence[SetInfo]) -> list[int]:
    return [one.set_id for one in sets]


# --- what is chosen ---


@given(some_sets(), quotas, st.integers(0, 60), sizes, st.sampled_from(["", "t", "u"]))
def test_room_is_made_within_quotas_and_nothing_protected_goes(
    sets: list[SetInfo], limits: Quotas, n_bytes: int, capacity_bytes: int, tenant: str
) -> None:
    need = Need(n_bytes, A, tenant)
    protected = {one.set_id for one in sets if one.set_id % 3 == 0}
    choice = EvictionChoice(sets, protected)
    fits = choice.make_room(need, limits, capacity_bytes)
    gone = set(ids(choice.victims))
    assert len(gone) == len(choice.victims)
    assert not any(one.is_open or one.set_id in protected for one in choice.victims)
    left = Used.of([one for one in sets if one.set_id not in gone])
    tenant_bytes, namespace_bytes = limits.of_tenant(tenant), limits.of_namespace(A)
    if fits:
        assert left.n_bytes + n_bytes <= capacity_bytes
        assert tenant_bytes is None or left.tenants.get(tenant, 0) + n_bytes <= tenant_bytes
        assert namespace_bytes is None or left.namespaces.get(A, 0) + n_bytes <= namespace_bytes
    before = Used.of(sets)
    if before.n_bytes + n_bytes <= capacity_bytes and tenant_bytes is None and namespace_bytes is None:
        assert fits and not gone, "what fits needs no room"


@given(some_sets(), st.integers(1, 60), sizes)
def test_a_tenant_at_its_quota_costs_nobody_else_a_set(sets: list[SetInfo], n_bytes: int, quota_bytes: int) -> None:
    choice = EvictionChoice(sets, ())
    fits = choice.make_room(Need(n_bytes, A, "t"), Quotas(None, {}, {"t": quota_bytes}), 1 << 40)
    assert {one.tenant for one in choice.victims} <= {"t"}
    may_go = sum(one.n_bytes for one in sets if one.tenant == "t" and not one.is_open)
    has = sum(one.n_bytes for one in sets if one.tenant == "t")
    assert fits == (has - may_go + n_bytes <= quota_bytes)


@given(some_sets(), quotas, sizes, sizes)
def test_limits_are_kept_as_far_as_sets_may_go(sets: list[SetInfo], limits: Quotas, one: int, two: int) -> None:
    low, high = sorted((one, two))
    choice = EvictionChoice(sets, ())
    choice.keep_quotas(limits)
    choice.keep_watermarks(high, low)
    used = choice.used
    left = [info for info in sets if info.set_id not in set(ids(choice.victims))]
    may_go = [info for info in left if not info.is_open]
    assert used.n_bytes <= high or not may_go
    for tenant in ("t", "u"):
        quota_bytes = limits.of_tenant(tenant)
        if quota_bytes is not None and used.tenants.get(tenant, 0) > quota_bytes:
            assert not any(info.tenant == tenant for info in may_go)


def test_what_an_administrator_means() -> None:
    sets = [
        info(1, 10.0, tenant="t"),
        info(2, 20.0, namespace=B),
        info(3, 90.0, tenant="t"),
        info(4, 95.0),
        info(5, 5.0, is_open=True),
    ]

    def chosen(selection: Selection) -> list[int]:
        choice = EvictionChoice(sets, ())
        choice.select(selection, now_s=100.0)
        return ids(choice.victims)

    assert chosen(Selection()) == [1, 2, 3, 4]
    assert chosen(Selection(n_bytes=15)) == [1, 2]
    assert chosen(Selection(unused_s=80.0)) == [1, 2]
    assert chosen(Selection(namespace=B)) == [2]
    assert chosen(Selection(tenant="t")) == [1, 3]
    assert chosen(Selection(tenant="t", unused_s=50.0)) == [1]
    assert chosen(Selection(set_ids=frozenset({3, 4, 9}))) == [3, 4]
    assert chosen(Selection(n_bytes=10, set_ids=frozenset({3, 4}))) == [3]
    assert chosen(Selection(tenant="")) == [2, 4]
    choice = EvictionChoice(sets, {1, 2})
    choice.select(Selection(tenant="t"), now_s=100.0)
    assert ids(choice.victims) == [3] and [(kept.info.set_id, kept.why) for kept in choice.kept] == [(1, "pinned")]


# --- notes ---


def test_quotas_set_at_run_time_win(caplog: pytest.LogCaptureFixture) -> None:
    limits = Quotas(100, {}, {"t": 50, "u": 60})
    assert limits.with_notes({}) == limits and not limits.are_none
    changed = limits.with_notes(
        {
            tenant_note("t"): quota_value(70),
            tenant_note("new"): quota_value(0),
            tenant_note("u"): quota_value(None),
            namespace_note(B): quota_value(None),
            "quota/tenant/bad": b"{}",
            "quota/namespace/xyz": quota_value(1),
            "quota/tenant/worse": b'{"bytes": true}',
            **{f"quota/tenant/{text[:14]!r}": text for text in (b'{"bytes": 7.5}', b'{"bytes": -1}', b"[]", DEEP)},
        }
    )
    assert limits == Quotas(100, {}, {"t": 50, "u": 60}), "else a quota that was reset would stay"
    assert [changed.of_tenant(name) for name in ("t", "new", "u", "bad", "worse", "")] == [70, 0] + [None] * 4
    assert changed.of_namespace(A) == 100 and changed.of_namespace(B) is None
    assert sum("is not a quota" in message for message in caplog.messages) == 7
    assert (
        Quotas().are_none and Quotas(None, {A: None}, {"t": None}).are_none and not Quotas(None, {}, {"t": 0}).are_none
    )


def test_pins_are_read_the_oldest_first_and_not_when_they_expired(caplog: pytest.LogCaptureFixture) -> None:
    pins = [
        Pin("late", A, None, "", 20.0, None),
        Pin("early", B, (b"k" * 16,), "ü", 10.0, 100.0),
        Pin("over", A, None, "", 5.0, 50.0),
    ]
    notes = {pin.name: pin.pack() for pin in pins}
    notes |= {"pin/bad": b"x", "pin/list": b"[]", "pin/short": json.dumps({"namespace": 5}).encode()}
    times: list[dict[str, object]] = [{"expires_s": 10**400}, {"expires_s": "x"}, {"created_s": "x"}]
    wrong = [{}, {"namespace": "ab"}, *({"namespace": A.hex()} | one for one in times)]
    notes |= {f"pin/{n}": text for n, text in enumerate([DEEP, *(json.dumps(one).encode() for one in wrong)])}
    assert read_pins(notes, 50.0) == [pins[1], pins[0]]
    assert sum("is not a pin" in message for message in caplog.messages) == 9


def test_pins_protect_up_to_their_cap_older_ones_first() -> None:
    sets = [info(1), info(2, namespace=B), info(3, namespace=B), info(4), info(5)]
    whole_b, key = Pin("b", B, None, "", 1.0, None), Pin("k", A, (b"k" * 16,), "", 2.0, None)
    held = {"k": {4, 2}}
    assert protected_sets(sets, [whole_b, key], held, 1000) == {2, 3, 4}
    assert protected_sets(sets, [whole_b, key], held, 30) == {2, 3, 4}
    assert protected_sets(sets, [whole_b, key], held, 20) == {2, 3}
    assert protected_sets(sets, [key, whole_b], held, 20) == {4, 2}
    assert protected_sets(sets, [key], {}, 1000) == frozenset(), "what is pinned is not stored"
    assert protected_sets(sets, [whole_b, replace(whole_b, pin_id="again"), key], held, 30) == {2, 3, 4}
    assert protected_sets(sets[::-1], [whole_b], held, 10) == {2}, "the older of two sets"


@given(
    some_sets(),
    st.lists(
        st.builds(
            Pin,
            st.text(max_size=2),
            st.sampled_from([A, B]),
            st.none() | st.just((A,)),
            st.just(""),
            st.floats(0, 9),
            st.none(),
        ),
        max_size=4,
    ),
    sizes,
)
def test_pins_never_protect_more_than_their_cap(sets: list[SetInfo], pins: list[Pin], max_bytes: int) -> None:
    held = {pin.pin_id: range(0, 12, 2) for pin in pins}
    protected = protected_sets(sets, pins, held, max_bytes)
    assert sum(one.n_bytes for one in sets if one.set_id in protected) <= max_bytes


def test_rules_come_from_the_settings() -> None:
    tenants = (
        TenantSettings(name="t", cache_salts=("s",), quota_bytes=5),
        TenantSettings(name="u", cache_salts=("v",)),
    )
    settings = CapacitySettings(ttl_s=60, reserve_bytes=7, namespace_quota_bytes=9, tenants=tenants)
    assert Rules.of(settings) == Rules(0.95, 0.9, 7, 60.0, 0.5, Quotas(9, {}, {"t": 5}))
