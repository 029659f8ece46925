"""Stand-ins that only the simulation's own thread meets.

Modules are patched for the whole process, in which there may be threads of others: keepers and evictors that other
tests left behind. Those go on with the real thing; else they would draw from the seed, and one seed would be many runs.
"""

import threading
from collections.abc import Callable
from typing import Any


class OwnThread:
    """A module's stand-in for the thread that makes this, and the module itself for all others."""

    def __init__(self, stand_in: object, module: object) -> None:
        self._stand_in = stand_in
        self._module = module
        self._thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stand_in if threading.get_ident() == self._thread else self._module, name)


def for_own_thread(stand_in: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The same of a function, method or class that is called."""
    own = threading.get_ident()

    def chosen(*args: Any, **options: Any) -> Any:
        return (stand_in if threading.get_ident() == own else original)(*args, **options)

    return chosen
