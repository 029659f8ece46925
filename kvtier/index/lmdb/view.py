"""Operations within a transaction of an open LMDB environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import lmdb

T = TypeVar("T")
Work = Callable[["View"], T]
Identity = tuple[tuple[int, int], ...]
Database = Any  # py-lmdb does not export the type of its handles


class View:
    """Named databases within one transaction."""

    __slots__ = ("_databases", "_txn")

    def __init__(self, txn: lmdb.Transaction, databases: dict[str, Database]) -> None:
        self._txn = txn
        self._databases = databases

    def get(self, database: str, key: bytes) -> bytes | None:
        return self._txn.get(key, None, self._databases[database])  # type: ignore[return-value]  # buffers=False

    def values(self, database: str, keys: Sequence[bytes]) -> list[bytes | None]:
        """Return the value of each key, None where it is missing."""
        return list(map(partial(self._txn.get, db=self._databases[database]), keys))  # type: ignore[arg-type]

    def leading(self, database: str, keys: Sequence[bytes], wanted: Callable[[bytes], bool]) -> list[bytes]:
        """Return the values of `keys` up to the first that is missing or not `wanted`."""
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

    def put_all(self, database: str, values: Mapping[bytes, bytes]) -> None:
        self._txn.cursor(self._databases[database]).putmulti(values.items())

    def delete(self, database: str, key: bytes) -> None:
        self._txn.delete(key, db=self._databases[database])

    def scan(self, database: str, prefix: bytes = b"", limit: int | None = None) -> list[tuple[bytes, bytes]]:
        """Return (key, value) of the keys that begin with `prefix`, in order; at most the first `limit`."""
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


class OpenEnvironment:
    """Open environment and its named databases. identity: device and inode of its files. close: closes `env`."""

    def __init__(self, env: lmdb.Environment, identity: Identity, close: Callable[[], None]) -> None:
        self.env = env
        self.identity = identity
        self.close = close
        self.databases: dict[str, Database] = {}

    def open_databases(self, names: tuple[str, ...]) -> None:
        """Open the databases, creating missing ones. The caller holds the writer lock."""
        with self.env.begin(write=True) as txn:
            self.databases = {name: self.env.open_db(name.encode(), txn=txn) for name in names}

    def used_bytes(self) -> int:
        """Return the length of the data file up to its last used page."""
        return int(self.env.info()["last_pgno"] + 1) * int(self.env.stat()["psize"])

    def run(self, work: Work[T], *, write: bool) -> T:
        with self.env.begin(write=write) as txn:
            return work(View(txn, self.databases))
