"""Imports vLLM once and becomes engines: python forker.py SOCKET

SOCKET is the name of an abstract socket, to which all workers of a test session connect: each gets a line when vLLM is
imported. Each line of a connection is a job as JSON: {"argv": [script, argument, ...], "stdin", "stdout", "stderr":
paths, "ended": path, "environment": more variables}. A process is forked for it that runs the script as if Python had
been started with it, in a session of its own; its process number is sent back. When it has ended, its status (as
subprocess has it) is in the file `ended`. Where a connection ends, what still runs of its jobs is killed; with the last
one the forker ends.

Importing takes two thirds of an engine's start. What is forked has one thread and no engine yet, so that each engine is
as in a process of its own.
"""

import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = (
    "engine",
    "scenarios",
    "vllm.model_executor.layers.quantization.compressed_tensors.utils",
    "vllm.model_executor.models.llama",
    "vllm.v1.worker.cpu_worker",
)
POLL_S = 0.05


class Client:
    """One worker of the session. running: the file that gets the status, by process number."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.lines = connection.makefile("r")
        self.running: dict[int, str] = {}


def become(job: dict[str, Any]) -> NoReturn:
    """Runs the job in this process, which ends with it."""
    status = 1
    try:
        os.setsid()
        for fd, (name, flags) in enumerate(
            (("stdin", os.O_RDONLY), ("stdout", os.O_WRONLY | os.O_CREAT), ("stderr", os.O_WRONLY | os.O_CREAT))
        ):
            opened = os.open(job[name], flags | os.O_APPEND * (fd > 0), 0o600)
            os.dup2(opened, fd)
            os.close(opened)
        os.environ.update(job["environment"])
        sys.argv = job["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve(listener: socket.socket) -> None:
    """Serves clients until the last one has gone."""
    clients: list[Client] = []
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select(POLL_S):
                if key.data is None:
                    clients.append(Client(listener.accept()[0]))
                    clients[-1].connection.sendall(b"ready\n")
                    selector.register(clients[-1].connection, selectors.EVENT_READ, clients[-1])
                    continue
                client: Client = key.data
                if line := client.lines.readline():  # a client sends no line before it has the last one's answer
                    _start(client, json.loads(line), [listener, *(each.connection for each in clients)])
                    continue
                for pid in client.running:
                    os.killpg(pid, signal.SIGKILL)
                selector.unregister(client.connection)
                clients.remove(client)
                if not clients:
                    return
            _note_ended(clients)


def _start(client: Client, job: dict[str, Any], sockets: list[socket.socket]) -> None:
    pid = os.fork()
    if pid == 0:
        for each in sockets:
            os.close(each.fileno())
        become(job)
    client.running[pid] = job["ended"]
    client.connection.sendall(f"{pid}\n".encode())


def _note_ended(clients: list[Client]) -> None:
    for client in clients:
        for pid in list(client.running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found == pid:
                ended = Path(client.running.pop(pid))
                written = ended.with_suffix(".part")
                written.write_text(str(os.waitstatus_to_exitcode(status)))
                written.rename(ended)


def prepare() -> None:
    """Imports what all engines import, and does once what vLLM does at each start."""
    for name in PRELOADED:
        importlib.import_module(name)
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    # It imports vLLM in a process of its own for each class of models that its cache does not know.
    registry._run_in_subprocess = lambda inspect: inspect()
    if getattr(current_platform, "register_triton_kernel_overrides", None):  # looks through all modules
        current_platform.register_triton_kernel_overrides()
        type(current_platform).register_triton_kernel_overrides = classmethod(lambda cls: None)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, "a process with threads does not fork well"
    gc.freeze()  # vLLM collects several times at each start: not what all have in common


def main() -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(f"\0{sys.argv[1]}")
        except OSError:  # another worker's forker was quicker
            return
        listener.listen()
        prepare()
        serve(listener)


if __name__ == "__main__":
    main()
