"""schemathesis over the OpenAPI document: it makes up calls that fit the document and calls that do not, and compares
what comes back with what the document says. With tokens and without. `make soak` makes up many more of them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("schemathesis")

from tests.server.process import Running, environment, running, write_config
from tests.server.serving import ADMIN, READER, fill

WITH_TOKENS = {"admin_token": ADMIN, "read_token": READER}


def made_up_calls(served: Running, folder: Path, token: str | None, *options: str) -> str:
    """What schemathesis prints; a finding fails the test with it."""
    run = ["run", f"{served.address}/api/v1/openapi.json", "--generation-deterministic", "--no-color"]
    command = [sys.executable, "-c", "import schemathesis.cli as c; c.schemathesis()", *run, *options]
    if token is not None:
        command += ["-H", f"Authorization: Bearer {token}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment(), timeout=1500)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert served.process.poll() is None, "the service ended"
    assert re.search(r"(?<![\d,])0 generated", done.stdout) is None and "Tested: " in done.stdout
    return done.stdout


def check(tmp_path: Path, server: dict[str, Any], runs: list[tuple[str | None, tuple[str, ...]]]) -> None:
    filled = fill(tmp_path / "kv")
    with running(write_config(tmp_path, filled.path, **server)) as served:
        for token, options in runs:
            made_up_calls(served, tmp_path, token, *options)


def test_with_tokens(tmp_path: Path) -> None:
    as_admin = ("--max-examples", "3", "--phases", "examples,coverage,fuzzing")
    check(tmp_path, WITH_TOKENS, [(ADMIN, as_admin), (None, ("--max-examples", "1", "--phases", "fuzzing"))])


def test_without_tokens(tmp_path: Path) -> None:
    check(tmp_path, {}, [(None, ("--max-examples", "3", "--phases", "fuzzing,stateful"))])


@pytest.mark.soak
@pytest.mark.parametrize("who", ["admin", "reader", "nobody", "loopback"])
def test_many_calls(tmp_path: Path, who: str) -> None:
    server = {} if who == "loopback" else WITH_TOKENS
    check(tmp_path, server, [({"admin": ADMIN, "reader": READER}.get(who), ("--max-examples", "200"))])
