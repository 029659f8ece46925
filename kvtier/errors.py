"""Exceptions of kvtier, as a tree. A miss or a refusal is a value, never one of these."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_SECRET_NAME = re.compile(r"(pas+(w(or)?d|phrase)?|pwd|secret|token|salts?)(\.\d+)*$", re.IGNORECASE)
_SECRET_FILE_NAME = re.compile(r"(pas+(w(or)?d|phrase)?_file|token_file|key_file|tls_key)$", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=:/)(/?).*@", re.DOTALL)
_URL_CREDENTIALS = re.compile(r"^([\w+.-]*:/?/?|).*@", re.DOTALL)  # of a text that is meant as an URL: also without //
_URL_REST = re.compile(r"(?<=[?&])(?!db=\d*(?:[&#]|$))([^=&#]*=)[^&#]+|(#).+", re.DOTALL)
HIDDEN = "***"  # stands for a value that may be a secret


def without_secrets(key: str, value: object) -> object:
    """Return a setting's value for printing: without passwords, tokens, and credentials within an URL."""
    if value is not None and (_SECRET_NAME.search(key) or _may_be_secret(key, value)):
        return HIDDEN
    if isinstance(value, str) and key.endswith("url"):
        return _URL_REST.sub(rf"\1\2{HIDDEN}", _URL_CREDENTIALS.sub(rf"\1{HIDDEN}@", value))
    if isinstance(value, Mapping):
        return {name: without_secrets(str(name), below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(key, below) for below in value]
    return _CREDENTIALS.sub(rf"\1{HIDDEN}@", value) if isinstance(value, str) else value


def _may_be_secret(key: str, value: object) -> bool:
    """Return whether a setting that names a secret's file seems to hold the secret itself: paths are absolute."""
    return _SECRET_FILE_NAME.search(key) is not None and not str(value).startswith(("/", "~"))


class KVTierError(Exception):
    """Base of every fault that kvtier raises on purpose."""


class ConfigError(KVTierError):
    """A setting or the place it names is wrong: start-up stops, with one readable message that has the key, the value
    that was found and what to do about it (I8)."""

    def __init__(self, key: str, value: object, fix: str) -> None:
        self.key = key
        self.value = without_secrets(key, value)
        self.fix = fix
        super().__init__(f"kvtier: {key} = {self.value!r}: {fix}")


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
    """The index could not be reached or opened: costs hits, never correctness (I5).

    fix: what to do about it, for commands; "" where the message says it, or nothing is known.
    """

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.fix = fix


class IndexResting(IndexUnavailable):
    """The index did not answer lately and is not asked for a while; the back-off was logged when it began."""


class IndexRefused(IndexUnavailable):
    """The index answers but refuses this command: it has no memory left for writes, or forbids it."""


class StaleLease(KVTierError):
    """The caller's fencing token is outdated: it counted as dead, and another owner has taken the lease."""


class WeightsUnreadable(KVTierError):
    """A weight file ends early, cannot be read, or was changed while it was read. offset: byte in the file; None: the
    whole file. reason: the message without the path and the offset."""

    def __init__(self, path: Path, offset: int | None, reason: str) -> None:
        self.path, self.offset, self.reason = path, offset, reason
        super().__init__(f"{path}{'' if offset is None else f' at byte {offset}'}: {reason}")


class WeightsDamaged(Corrupt):
    """A block of a weight file does not match its checksum in the manifest. offset: of the block in the file, bytes.

    tensors: names of the tensors with bytes in the block; none where it holds only the header. reason: the message
    without the path and the offset.
    """

    def __init__(self, path: Path, offset: int, tensors: Sequence[str]) -> None:
        self.path, self.offset, self.tensors = path, offset, tuple(tensors)
        named = ", ".join(self.tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        where = f"in tensor {named}" if named else "in the header"
        self.reason = (
            f"bytes {where} differ from the manifest; get the file again, or, if it was changed on purpose, run "
            f"`kvtier weights verify {path.parent} --write`"
        )
        super().__init__(f"{path} at byte {offset}: {self.reason}")
