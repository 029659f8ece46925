"""Lookup of a prompt: how much of it is stored, and in which sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvtier.admin.answers import LookupAnswer, NamespaceHit, SetHit
from kvtier.admin.opened import Opened
from kvtier.admin.stats import read_reports
from kvtier.format.namespace import chunk_keys, join_extras, salt_extra
from kvtier.index import entry as entries
from kvtier.index.base import SetInfo
from kvtier.storage.segments import segment_name

TOKENS_MAX = 1 << 20
NAMESPACES_MAX = 64  # namespaces asked in one lookup, those with the most sets
SETS_SHOWN_MAX = 100


class UnknownNamespace(LookupError):
    """No namespace has this id, or its description cannot be read."""


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Plain tokens with a cache salt. With adapters or images, keys depend on more than can be asked for here."""

    tokens: Sequence[int]
    cache_salt: str = ""


def look_up(opened: Opened, prompt: TokenPrompt, namespace: bytes | None = None) -> LookupAnswer:
    """Look a prompt up in one namespace, or in all. Raises UnknownNamespace, IndexUnavailable."""
    sets = opened.index.sets()
    asked = [namespace] if namespace is not None else _all(opened, sets)
    models = {report.namespace: report.model for report in read_reports(opened, opened.clock())[0]}
    owners = {info.set_id: info.owner for info in sets}
    hits = []
    for id_ in asked:
        try:
            hits.append(_hit(opened, prompt, id_, owners, models.get(id_.hex(), "")))
        except UnknownNamespace:
            if namespace is not None:
                raise
    hits.sort(key=lambda hit: (-hit.hit_tokens, hit.namespace))
    return LookupAnswer(tokens=len(prompt.tokens), hits=hits)


def keys_of(opened: Opened, prompt: TokenPrompt, namespace: bytes) -> list[bytes]:
    """Return the keys of the prompt's whole chunks. Raises UnknownNamespace."""
    found = opened.book.find(namespace)
    if found is None:
        raise UnknownNamespace(f"there is no namespace {namespace.hex()} in {opened.root.path}")
    extras = {0: join_extras([salt_extra(prompt.cache_salt)])} if prompt.cache_salt else {}
    return chunk_keys(namespace, prompt.tokens, found.geometry.chunk_tokens, extras)


def _all(opened: Opened, sets: Sequence[SetInfo]) -> list[bytes]:
    counts: dict[bytes, int] = dict.fromkeys(opened.book.ids(), 0)
    for info in sets:
        counts[info.namespace] = counts.get(info.namespace, 0) + 1
    return sorted(counts, key=lambda namespace: -counts[namespace])[:NAMESPACES_MAX]


def _hit(opened: Opened, prompt: TokenPrompt, namespace: bytes, owners: dict[int, str], model: str) -> NamespaceHit:
    keys = keys_of(opened, prompt, namespace)
    values = opened.index.resolve(keys) if keys else []
    found = opened.book.find(namespace)
    assert found is not None
    chunk_tokens = found.geometry.chunk_tokens
    return NamespaceHit(
        namespace=namespace.hex(),
        model=model,
        chunk_tokens=chunk_tokens,
        chunks=len(keys),
        hit_chunks=len(values),
        hit_tokens=len(values) * chunk_tokens,
        last_key=keys[len(values) - 1].hex() if values else None,
        sets=_places(values, owners),
    )


def _places(values: Sequence[bytes], owners: dict[int, str]) -> list[SetHit]:
    """Return one row for each set with chunks of the hit. A chunk of which engines wrote parts counts in each set."""
    first: dict[int, int] = {}
    chunks: dict[int, int] = {}
    files: dict[int, set[str]] = {}
    for number, value in enumerate(values):
        locations = entries.locations_of(value)
        for set_id in {location.set_id for location in locations}:
            first.setdefault(set_id, number)
            chunks[set_id] = chunks.get(set_id, 0) + 1
        for location in locations:
            files.setdefault(location.set_id, set()).add(segment_name(location.set_id, location.part))
    return [
        SetHit(
            set_id=f"{set_id:016x}",
            owner=owners.get(set_id, ""),
            first_chunk=first[set_id],
            chunks=chunks[set_id],
            files=sorted(files[set_id]),
        )
        for set_id in sorted(first, key=lambda set_id: first[set_id])[:SETS_SHOWN_MAX]
    ]
