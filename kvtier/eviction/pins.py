"""Pins: sets that an administrator protects from eviction. Each is a note `pin/<id>` in the index:

    {"namespace": hex, "keys": [hex, ...] | null, "label": text, "created_s": number, "expires_s": number | null}

Its times are by the index's clock. Without keys all sets of the namespace are protected, with keys the sets that
contain their records.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvtier.index.base import Index, SetInfo
from kvtier.runtime.repeated_log import RepeatedLog

_repeated = RepeatedLog()  # pins are read each time room is made

PREFIX = "pin/"
ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class Pin:
    """Pin set by an administrator. keys: pinned chunks; None: the whole namespace. created_s, expires_s: seconds by the
    index's clock; None: never."""

    pin_id: str
    namespace: bytes
    keys: tuple[bytes, ...] | None
    label: str
    created_s: float
    expires_s: float | None

    @property
    def name(self) -> str:
        return PREFIX + self.pin_id

    def pack(self) -> bytes:
        keys = None if self.keys is None else [key.hex() for key in self.keys]
        return json.dumps(
            {
                "namespace": self.namespace.hex(),
                "keys": keys,
                "label": self.label,
                "created_s": self.created_s,
                "expires_s": self.expires_s,
            }
        ).encode()


def pins_in(index: Index, now_s: float) -> list[Pin]:
    """Return the pins that have not expired, the oldest first. now_s: by the caller's clock. May raise
    IndexUnavailable."""
    return read_pins(index.notes(PREFIX, now_s), index.shared_s(now_s))


def read_pins(notes: Mapping[str, bytes], now_s: float) -> list[Pin]:
    """Return the unexpired pins among the notes, the oldest first. now_s: by the index's clock."""
    found = [_pin(name.removeprefix(PREFIX), value) for name, value in notes.items()]
    pins = [pin for pin in found if pin is not None and (pin.expires_s is None or now_s < pin.expires_s)]
    return sorted(pins, key=lambda pin: (pin.created_s, pin.pin_id))


def _pin(pin_id: str, value: bytes) -> Pin | None:
    """Parse a pin. Return None, with a warning, for a malformed note."""
    try:
        found = json.loads(value)
        keys, expires_s = found.get("keys"), found.get("expires_s")
        return Pin(
            pin_id,
            _id(found["namespace"]),
            None if keys is None else tuple(map(_id, keys)),
            str(found.get("label", "")),
            float(found.get("created_s", 0)),
            None if expires_s is None else float(expires_s),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as fault:
        _repeated.warning(pin_id, "the note pin/%s is not a pin and protects nothing: %r", pin_id, fault)
        return None


def _id(text: str) -> bytes:
    """Parse the id of a namespace or a chunk. Raises ValueError, TypeError."""
    value = bytes.fromhex(text)
    if len(value) != ID_BYTES:
        raise ValueError(f"{len(value)} bytes")
    return value


def meant(pin: Pin, held: Mapping[str, Collection[int]], sets: Iterable[SetInfo]) -> list[SetInfo]:
    """Return those of `sets` that the pin names. held: see `protected_sets`."""
    mine = [info for info in sets if info.namespace == pin.namespace]
    return mine if pin.keys is None else [info for info in mine if info.set_id in held.get(pin.pin_id, ())]


def protected_sets(
    sets: Sequence[SetInfo], pins: Sequence[Pin], held: Mapping[str, Collection[int]], max_bytes: int
) -> frozenset[int]:
    """Return the ids of protected sets, at most `max_bytes` of them: older pins first, within a pin older sets first.

    held: id of a pin with keys -> sets that contain their records.
    """
    left = max_bytes
    protected: set[int] = set()
    by_age = sorted(sets, key=lambda info: (info.created_s, info.set_id))
    for pin in pins:
        for info in meant(pin, held, by_age):
            if info.set_id not in protected and info.n_bytes <= left:
                protected.add(info.set_id)
                left -= info.n_bytes
    return frozenset(protected)
