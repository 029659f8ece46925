"""The shell blocks of README.md and of docs/quickstart: each is run here, or its mark says what runs it or why not.

A mark is a comment on the line before the block: `<!-- not run: REASON -->`, or `<!-- run by tests/PATH -->`. Files are
those of the blocks with a title. Output that a page shows in a `text` block must be among what the command prints.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.model_configs import LLAMA_8B
from tests.redis_server import Server, has_redis, standalone
from tests.support.rig import saved_by_another

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs/sizing.md", *sorted((ROOT / "docs/quickstart").glob("*.md"))]
BLOCK = re.compile(r'(?:^<!-- (.+?) -->\n)?^```(\w+)(?: title="(.+?)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
SHELL = ("bash", "sh", "shell", "console")
LOOSE = re.compile(r"^(?: {4}|\t)(?:\$ |make|kvtier|vllm|pip|python|\.venv)", re.MULTILINE)  # a command without a fence
# Expected output of a page's commands, in addition to its `text` blocks.
PRINTED = {
    "one-machine": ("320 of 320 tokens", "would be evicted"),
    "cluster": ("320 of 320 tokens", "would be evicted", "500.0 GiB"),
}
PASSWORD = "correct-horse-battery"


@dataclass(frozen=True)
class Block:
    """One fenced block. mark: the comment before it; title: the path of the file that it is."""

    mark: str
    language: str
    title: str
    text: str

    @property
    def is_run(self) -> bool:
        return self.language in SHELL and not self.mark


def blocks(page: Path) -> list[Block]:
    return [Block(*(part or "" for part in found)) for found in BLOCK.findall(page.read_text())]


WITH_COMMANDS = [page for page in PAGES if any(block.is_run for block in blocks(page))]


@dataclass(frozen=True)
class Machine:
    """A folder in place of the paths of the pages, and a Redis in place of theirs."""

    folder: Path
    redis: Server

    def moved(self, text: str) -> str:
        """Replace the paths and addresses of a page by those of this test."""
        places = {
            "/etc/kvtier": self.folder / "kvtier",
            ".venv/bin/kvtier": "kvtier",
            "/nvme/kv": self.folder / "kv",
            "/mnt/lustre/kvtier": self.folder / "kv",
            "/models/Llama-3.1-8B": self.folder / "Llama-3.1-8B",
            "kv-redis:6379": f"127.0.0.1:{self.redis.port}",
            "require_mount: true": "require_mount: false",
            "2TiB": "2GiB",
        }
        for written, used in places.items():
            text = text.replace(written, str(used))
        return text

    def run(self, block: Block) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVTIER_")}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        command = ["bash", "-euo", "pipefail", "-c", self.moved(block.text)]
        ran = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, f"{block.text}{ran.stdout}{ran.stderr}"
        return ran.stdout


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """Chunks of an engine in the root, the config.json of a model, and the small files that the pages name."""
    (tmp_path / "Llama-3.1-8B").mkdir()
    (tmp_path / "Llama-3.1-8B" / "config.json").write_text(json.dumps(LLAMA_8B))
    (tmp_path / "kvtier").mkdir()
    (tmp_path / "kvtier" / "redis-password").write_text(PASSWORD)
    (tmp_path / "prompt.json").write_text(json.dumps(list(range(64 * 5))))
    with standalone(tmp_path / "redis", ["--requirepass", PASSWORD]) as redis:
        yield Machine(tmp_path, redis)


@has_redis
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.stem)
def test_blocks_run(page: Path, machine: Machine) -> None:
    found = blocks(page)
    for block in found:
        if block.title:
            path = Path(machine.moved(block.title))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(machine.moved(block.text))
            fill(machine.folder / "kv", yaml.safe_load(path.read_text()))
    if page.stem == "README":
        fill(machine.folder / "demo-output" / "tier", {})
    everything = printed = ""
    for block in found:
        if block.is_run:
            printed = machine.run(block)
            everything += printed
        elif block.language == "text":
            shown = {line.strip() for line in block.text.splitlines()}
            assert shown <= {line.strip() for line in printed.splitlines()}
    assert all(part in everything for part in PRINTED.get(page.stem, ()))


def fill(root: Path, settings: dict[str, object]) -> None:
    """Store five chunks of 64 tokens with the page's index."""
    saved_by_another(root, list(range(64 * 5)), list(range(20)), changes={"index": settings.get("index", {})})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_marks_say_why(page: Path) -> None:
    assert not LOOSE.search(page.read_text()), "a command outside of a fenced block"
    for block in blocks(page):
        if block.language not in SHELL or not block.mark:
            continue
        reason, runner = re.fullmatch(r"(?:not run: (.{8,})|run by (tests/\S+))", block.mark).groups()  # type: ignore[union-attr]
        assert reason or (ROOT / runner).exists(), block.mark


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_yaml_blocks_can_be_read(page: Path) -> None:
    for block in blocks(page):
        if block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))
