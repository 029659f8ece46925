"""Connections to servers that are named: looking a name up has no deadline of its own, and may take half a minute when
no name server answers. So they are made on threads beside, and waited for no longer than a connection may take."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from functools import partial
from ipaddress import ip_address
from typing import Any

from redis.exceptions import RedisError

from kvtier.jobs import Jobs, ThreadJobs

THREADS, WAITING_MAX = 4, 64
"""Names that are looked up at once, and that wait for that; what comes too late is dropped."""


class Connector:
    """Makes connections in time. Threads are started when the first name is to be looked up."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: Jobs | None = None

    def timely(self, kind: type[Any]) -> type[Any]:
        """A class of redis-py's connections, with a deadline."""
        connector = self

        class Timely(kind):  # type: ignore[misc]
            def _connect(self) -> Any:
                connect, limit_s = super()._connect, self.socket_connect_timeout
                if is_address(self.host):
                    return connect()
                look_up = partial(socket.getaddrinfo, self.host, self.port, type=socket.SOCK_STREAM)
                found = connector.run(look_up, limit_s)
                # It looks the name up once more, and tries one address after the other, for `limit_s` each: the first
                # may be one of a server that is gone, or of IPv6 where that leads nowhere.
                return connector.run(connect, limit_s * (1 + len(found)))

        return Timely

    def run(self, work: Callable[[], Any], limit_s: float) -> Any:
        """What `work` returns or raises. Raises TimeoutError when that takes longer than the limit; a connection that
        comes then is closed."""
        attempt = _Attempt()
        if not self._started().submit(partial(attempt.run, work)):
            raise TimeoutError("too many names are being looked up")
        return attempt.result(limit_s)

    def _started(self) -> Jobs:
        with self._lock:
            if self._jobs is None:
                self._jobs = ThreadJobs("connect", THREADS, WAITING_MAX)
            return self._jobs

    def close(self) -> None:
        with self._lock:
            if self._jobs is not None:
                self._jobs.close()


class _Attempt:
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._is_over = self._is_late = False
        self._made: Any = None
        self._fault: OSError | RedisError | None = None

    def run(self, work: Callable[[], Any]) -> None:
        if self._is_late:
            return
        made, fault = None, None
        try:
            made = work()
        except (OSError, RedisError) as error:
            fault = error
        with self._changed:
            self._made, self._fault, self._is_over = made, fault, True
            self._changed.notify()
            if self._is_late and hasattr(made, "close"):
                made.close()

    def result(self, limit_s: float) -> Any:
        with self._changed:
            self._is_late = not self._changed.wait_for(lambda: self._is_over, limit_s)
        if self._is_late:
            raise TimeoutError("not connected in time")
        if self._fault is not None:
            raise self._fault
        return self._made


def is_address(host: str) -> bool:
    """Whether it need not be looked up."""
    try:
        ip_address(host.partition("%")[0])
        return True
    except ValueError:
        return False
