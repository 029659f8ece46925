"""Transactions on an LMDB environment that is open: what they may do. Who may have one, and when, says lmdb_env."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, TypeVar

import lmdb

T = TypeVar("T")
Work = Callable[["View"], T]
Identity = tuple[tuple[int, int], ...]
Database = Any  # py-lmdb does not export the type of its handles


class View:
    """The named databases as one transaction sees them."""

    __slots__ = ("_databases", "_txn")

    def __init__(self, txn: lmdb.Transaction, databases: dict[str, Database]) -> None:
        self._txn = txn
        self._databases = databases

    def get(self, database: str, key: bytes) -> bytes | None:
        return self._txn.get(key, None, self._databases[database])  # type: ignore[return-value]  # buffers=False

    def leading(self, database: str, keys: Sequence[bytes], wanted: Callable[[bytes], bool]) -> list[bytes]:
        """Values of `keys` up to the first that is missing or not `wanted`."""
        get, handle = self._txn.get, self._databases[database]
        found: list[bytes] = []
        for key in keys:
            value: bytes | None = get(key, None, handle)  # type: ignore[assignment]  # buffers=False
            if value is None or not wanted(value):
                break
            found.append(value)
        return found

    def put(self, database: str, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=self._databases[database])

    def delete(self, database: str, key: bytes) -> None:
        self._txn.delete(key, db=self._databases[database])

    def scan(self, database: str, prefix: bytes = b"", limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """(key, value) of the keys that start with `prefix`, in order; at most the first `limit`."""
        found: list[tuple[bytes, bytes]] = []
        cursor = self._txn.cursor(self._databases[database])
        if cursor.set_range(prefix) if prefix else cursor.first():
            for key, value in islice(cursor, limit):
                if not bytes(key).startswith(prefix):
                    break
                found.append((bytes(key), bytes(value)))
        return found

    def count(self, database: str) -> int:
        return int(self._txn.stat(self._databases[database])["entries"])

    def clear(self, database: str) -> None:
        self._txn.drop(self._databases[database], delete=False)


class Opened:
    """One open environment and its named databases; closed as a whole when the files under it are replaced."""

    def __init__(self, env: lmdb.Environment, identity: Identity, close: Callable[[], None]) -> None:
        """identity: device and inode of its files. close: closes `env`."""
        self.env = env
        self.identity = identity
        self.close = close
        self.databases: dict[str, Database] = {}

    def open_databases(self, names: tuple[str, ...]) -> None:
        """Opens them, creating those that are missing. Needs the writer lock."""
        with self.env.begin(write=True) as txn:
            self.databases = {name: self.env.open_db(name.encode(), txn=txn) for name in names}

    def used_bytes(self) -> int:
        """Length of the data file up to its last page in use."""
        return int(self.env.info()["last_pgno"] + 1) * int(self.env.stat()["psize"])

    def run(self, work: Work[T], *, write: bool) -> T:
        with self.env.begin(write=write) as txn:
            return work(View(txn, self.databases))
