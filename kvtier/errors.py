"""What can be broken, as a tree. A miss or a refusal is a value, never one of these.

KVTierError
├── ConfigError        a setting or the place it names is wrong: start-up stops (I8)
├── TierUnavailable    the storage refuses work for now: full, read-only, hung
├── Corrupt            bytes are not what their header or checksum promises
└── IndexUnavailable   the index does not answer: costs hits, never correctness (I5)
"""

from __future__ import annotations


class KVTierError(Exception):
    """Base of every fault that kvtier raises on purpose."""


class ConfigError(KVTierError):
    """One readable message with the key, the value that was found and what to do about it (I8)."""

    def __init__(self, key: str, value: object, fix: str) -> None:
        self.key = key
        self.value = value
        self.fix = fix
        super().__init__(f"kvtier: {key} = {value!r}: {fix}")


class TierUnavailable(KVTierError):
    """The file-system tier cannot take or give bytes now; the caller goes on without it.

    is_full: the disk, or this user's quota on it, has no space left.
    """

    def __init__(self, message: str, *, is_full: bool = False) -> None:
        super().__init__(message)
        self.is_full = is_full


class Corrupt(KVTierError):
    """A header, a record or an index value fails its own check."""


class IndexUnavailable(KVTierError):
    """The index could not be reached or opened."""
