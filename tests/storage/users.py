"""Work as another user than root: permission bits do not restrain root."""

import codecs
import os
from collections.abc import Callable

USER = 65534


def as_user(work: Callable[[], object]) -> str:
    """Run `work` in a process of user USER, or of this user if that is not root. Return its error; "" without one."""
    codecs.lookup("ascii")  # the child may not be able to reach the interpreter's files
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        if os.getuid() == 0:
            os.setgroups([])
            os.setgid(USER)
            os.setuid(USER)
        said = ""
        try:
            work()
        except BaseException as fault:
            said = f"{type(fault).__name__}: {fault}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    os.waitpid(child, 0)
    with open(read, encoding="utf-8") as told:
        return told.read()
