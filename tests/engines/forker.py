"""Imports vLLM once and becomes engines: python forker.py

Each line of standard input is a job as JSON: {"argv": [script, argument, ...], "stdin", "stdout", "stderr": paths,
"ended": path}. A process is forked for it that runs the script as if Python had been started with it, in a session of
its own; its process number is printed. When it has ended, its status (as subprocess has it) is in the file `ended`.
At the end of the input what still runs is killed.

Importing takes two thirds of an engine's start. What is forked has one thread and no engine yet, so that each engine is
as in a process of its own.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

PRELOADED = ("engine", "scenarios", "vllm.model_executor.models.llama", "vllm.v1.worker.cpu_worker")
POLL_S = 0.05


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
        sys.argv = job["argv"]
        runpy.run_path(sys.argv[0], run_name="__main__")
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def serve() -> None:
    running: dict[int, str] = {}
    rest = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_S)
        if ready:
            read = os.read(0, 1 << 16)
            if not read:
                break
            *lines, rest = (rest + read).split(b"\n")
            for line in lines:
                job = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    become(job)
                running[pid] = job["ended"]
                print(pid, flush=True)
        _note_ended(running)
    for pid in running:
        os.killpg(pid, signal.SIGKILL)


def _note_ended(running: dict[int, str]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        ended = Path(running.pop(pid))
        written = ended.with_suffix(".part")
        written.write_text(str(os.waitstatus_to_exitcode(status)))
        written.rename(ended)


def main() -> None:
    for name in PRELOADED:
        importlib.import_module(name)
    tasks = os.listdir("/proc/self/task")
    assert len(tasks) == 1, "a process with threads does not fork well"
    gc.freeze()  # vLLM collects several times at each start: not what all have in common
    print("ready", flush=True)
    serve()


if __name__ == "__main__":
    main()
