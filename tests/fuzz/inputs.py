"""Inputs that are nearly right: what a parser takes, with a few changes. As bytes, as JSON and as YAML."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

DEEP = 100_000
HEAD_BYTES = 160
_MARK = "the-place-of-a-strange-value"
_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
STRANGE_JSON = (
    "null", "true", "0", "-1", "1.5", "1e400", "-1e400", "NaN", "Infinity", "1" * 5000, str(2**63), str(2**64), "[]",
    "{}",
    "[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * 5000, '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\n"',
    '"' + "x" * 10_000 + '"',
    '"/"', '"/\\u0000"', '"\\u00e9"', '[{}]', '{"":""}', '[[1,2],[3]]', '"1e999"', '"nan"', "1e308", "5e-324",
    '["a","a"]',
)  # fmt: skip
STRANGE_YAML = (
    "2001-99-99", "2001-01-01t99:99:99", "!!timestamp x", "!!int x", "!!float x", "!!binary \u00e9", "!!bool x",
    "0b_", "0x_", "0o9",
    "&a [*a]", "*nobody", "!!python/object/apply:os.system [id]", "? [a]\n: b", "<<: 3", "{? {a: b} : c}", "~",
    ".nan", ".inf",
    "190:20:30", "1_000", "[" * 3000, "{" * 3000, "- " * 3000, "!!set {a}", "!!omap [a]", "!!pairs [a]", "!!str",
    "%YAML 9.9\n---\n",
    "\x00", "\ufeff", "\u2028", "---\n---\n", "|\n x", ">-\n x", "!<tag:yaml.org,2002:value> x", "=", "'", '"\\x"',
    '"\\ud800"',
    "&a [x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]\n"
    "d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d]\nf: &f [*e,*e,*e,*e,*e,*e,*e,*e,*e]\n"
    "g: &g [*f,*f,*f,*f,*f,*f,*f,*f,*f]\nroot: [*g,*g,*g,*g,*g,*g,*g,*g,*g]",
)  # fmt: skip

Change = Callable[[random.Random, bytes, Sequence[bytes]], bytes]  # of an input, with the others at hand


def _place(rng: random.Random, n_bytes: int) -> int:
    """Mostly near the start, where headers say what the rest is, and where numbers often begin."""
    near = min(n_bytes, HEAD_BYTES)
    at = rng.randrange(near + 1) if rng.random() < 0.8 else rng.randrange(n_bytes + 1)
    return at // 4 * 4 if rng.random() < 0.3 else at


def _flip(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 8)) if data else 0):
        changed[min(_place(rng, len(changed)), len(changed) - 1)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """A number of some width that is at a bound."""
    width = rng.choice((1, 2, 4, 8))
    at = _place(rng, len(data))
    number = rng.choice(_NUMBERS) & (256**width - 1)
    return data[:at] + number.to_bytes(width, "little") + data[at + width :]


def _cut(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    return data[: _place(rng, len(data))]


def _remove(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(rng, len(data))
    return data[:at] + data[at + rng.randrange(1, 40) :]


def _insert(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    at = _place(rng, len(data))
    return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]


def _repeat(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    first = _place(rng, len(data))
    part = data[first : first + rng.randrange(1, 200)]
    return data[:first] + part * rng.choice((2, 3, 50, 500)) + data[first + len(part) :]


def _splice(rng: random.Random, data: bytes, others: Sequence[bytes]) -> bytes:
    other = rng.choice(others)
    return data[: _place(rng, len(data))] + other[rng.randrange(len(other) + 1) :]


BYTES: tuple[Change, ...] = (_flip, _overwrite, _overwrite, _cut, _remove, _insert, _repeat, _splice)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    below = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in below:
        yield from _places(inner, (*path, name))


def _strange_json(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Another value at one of its places, or that place under another name, or gone."""
    try:
        value = json.loads(data)
        *above, last = rng.choice(list(_places(value)))
    except (ValueError, RecursionError):  # changed before, or its root
        return rng.choice(STRANGE_JSON).encode()
    place = value
    for name in above:
        place = place[name]
    kept = place.pop(last) if rng.random() < 0.2 else None
    if kept is None:
        place[last] = _MARK
    elif isinstance(place, dict) and rng.random() < 0.5:
        place[last + "x"] = kept
    return json.dumps(value).replace(json.dumps(_MARK), rng.choice(STRANGE_JSON)).encode("utf-8", "surrogatepass")


JSON: tuple[Change, ...] = (*[_strange_json] * 6, _flip, _cut, _remove, _splice)


def _strange_yaml(rng: random.Random, data: bytes, _: Sequence[bytes]) -> bytes:
    """Another value behind one of its keys, or a line more."""
    lines = data.decode("utf-8", "replace").splitlines() or [""]
    at, strange = rng.randrange(len(lines)), rng.choice(STRANGE_YAML)
    key, colon, _value = lines[at].partition(":")
    if colon and rng.random() < 0.8:
        lines[at] = f"{key}: {strange}"
    else:
        lines.insert(at, strange)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


YAML: tuple[Change, ...] = (*[_strange_yaml] * 6, _flip, _cut, _remove, _insert, _splice)


def changed(rng: random.Random, seeds: Sequence[bytes], changes: Sequence[Change]) -> bytes:
    """One of the seeds after a few changes."""
    data = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        data = rng.choice(changes)(rng, data, seeds)
    return data
