"""Notes in the index that are no pins and no quotas, whoever wrote them: they protect and limit nothing, and end no
eviction."""

from __future__ import annotations

import json

import pytest

from kvtier.eviction import limits, pins
from kvtier.eviction.pins import Pin

SPACE = bytes(range(16))
GOOD = {"namespace": SPACE.hex(), "keys": None, "label": "", "created_s": 1.0, "expires_s": None}
DEEP = b"[" * 200_000
STRANGE_PINS = {
    "nothing": b"",
    "bytes": b"\xff\xfe",
    "a list": b"[]",
    "a number": b"7",
    "null": b"null",
    "deep": DEEP,
    "no namespace": b"{}",
    **{
        what: json.dumps({**GOOD, **changed}).encode()
        for what, changed in {
            "a time beyond any": {"created_s": 10**400},
            "an end beyond any": {"expires_s": 10**400},
            "a short namespace": {"namespace": "00"},
            "a namespace that is a number": {"namespace": 5},
            "an empty key": {"keys": [""]},
            "a long key": {"keys": ["00" * 17]},
            "a key that is no text": {"keys": [7]},
            "keys that are a number": {"keys": 7},
        }.items()
    },
}
STRANGE_QUOTAS = {
    "nothing": b"",
    "bytes": b"\xff\xfe",
    "a list": b"[]",
    "null": b"null",
    "deep": DEEP,
    "no bytes": b"{}",
    "text": b'{"bytes": "5"}',
    "below nothing": b'{"bytes": -1}',
    "a fraction": b'{"bytes": 1.5}',
    "a yes": b'{"bytes": true}',
}


@pytest.mark.parametrize("what", STRANGE_PINS)
def test_what_is_no_pin_protects_nothing(what: str) -> None:
    mine = Pin("mine", SPACE, (bytes(16),), "", 1.0, None)
    assert pins.read_pins({"pin/other": STRANGE_PINS[what], mine.name: mine.pack()}, 5.0) == [mine]


@pytest.mark.parametrize("what", STRANGE_QUOTAS)
def test_what_is_no_quota_limits_nothing(what: str) -> None:
    notes = {limits.tenant_note("other"): STRANGE_QUOTAS[what], limits.tenant_note("mine"): limits.quota_value(5)}
    assert limits.Quotas().with_notes(notes) == limits.Quotas(tenants={"mine": 5})
