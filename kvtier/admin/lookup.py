"""Lookup of a prompt: how much of it is stored, and in which sets."""

from collections import Counter
from collections.abc import Sequence

from kvtier.admin.answers import LookupAnswer, NamespaceHit, SetHit
from kvtier.admin.opened import AdminRefusal, Opened
from kvtier.admin.stats import read_reports
from kvtier.format.namespace import chunk_keys, join_extras, salt_extra
from kvtier.index import entry as entries
from kvtier.index.base import SetInfo
from kvtier.runtime.units import counted
from kvtier.storage.segments import segment_name

TOKENS_MAX = 1 << 20
NAMESPACES_MAX = 64  # namespaces asked in one lookup, those with the most sets
SETS_SHOWN_MAX = 100


def look_up(opened: Opened, tokens: Sequence[int], salt: str, namespace: bytes | None = None) -> LookupAnswer:
    """Look up a prompt of plain tokens in one namespace, or in all. Prompts with adapters or images cannot be looked
    up: their keys depend on more than tokens and salt. Raises NotThere, IndexUnavailable."""
    sets = opened.index.sets()
    asked = [namespace] if namespace is not None else _all(opened, sets)
    models = {report.namespace: report.model for report in read_reports(opened, opened.clock())[0]}
    owners = {info.set_id: info.owner for info in sets}
    hits = []
    for id_ in asked:
        if namespace is None and opened.book.find(id_) is None:
            continue
        chunk_tokens = opened.book.get(id_).geometry.chunk_tokens
        keys = _keys(opened, tokens, salt, id_)
        values = opened.index.resolve(keys) if keys else []
        hits.append(
            NamespaceHit(
                namespace=id_.hex(),
                model=models.get(id_.hex()) or opened.book.model(id_),
                chunk_tokens=chunk_tokens,
                chunks=len(keys),
                hit_chunks=len(values),
                hit_tokens=len(values) * chunk_tokens,
                last_key=keys[len(values) - 1].hex() if values else None,
                sets=_places(values, owners),
            )
        )
    hits.sort(key=lambda hit: (-hit.hit_tokens, hit.namespace))
    return LookupAnswer(tokens=len(tokens), hits=hits)


def prefix_keys(opened: Opened, tokens: Sequence[int], salt: str, namespace: bytes) -> list[bytes]:
    """Return the keys of a prompt's whole chunks. Raises NotThere, AdminRefusal where it has none."""
    keys = _keys(opened, tokens, salt, namespace)
    if not keys:
        raise AdminRefusal(f"a prompt of {counted(len(tokens), 'token')} is less than a chunk: nothing is stored of it")
    return keys


def _keys(opened: Opened, tokens: Sequence[int], salt: str, namespace: bytes) -> list[bytes]:
    extras = {0: join_extras([salt_extra(salt)])} if salt else {}
    return chunk_keys(namespace, tokens, opened.book.get(namespace).geometry.chunk_tokens, extras)


def _all(opened: Opened, sets: Sequence[SetInfo]) -> list[bytes]:
    counts = Counter(dict.fromkeys(opened.book.ids(), 0))
    counts.update(info.namespace for info in sets)
    return [namespace for namespace, _ in counts.most_common(NAMESPACES_MAX)]


def _places(values: Sequence[bytes], owners: dict[int, str]) -> list[SetHit]:
    """Return one row for each set with chunks of the hit. A chunk with records in several sets counts in each."""
    chunks: dict[int, set[int]] = {}
    files: dict[int, set[str]] = {}
    for number, value in enumerate(values):
        for location in entries.locations_of(value):
            chunks.setdefault(location.set_id, set()).add(number)
            files.setdefault(location.set_id, set()).add(segment_name(location.set_id, location.part))
    return [
        SetHit(
            set_id=f"{set_id:016x}",
            owner=owners.get(set_id, ""),
            first_chunk=min(numbers),
            chunks=len(numbers),
            files=sorted(files[set_id]),
        )
        for set_id, numbers in list(chunks.items())[:SETS_SHOWN_MAX]
    ]
