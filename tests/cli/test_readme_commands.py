"""The README's commands of kvtier, word for word but for the path of the settings."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from kvtier.cli import main
from kvtier.config import CONFIG_VARIABLE
from tests.core.rig import Engine
from tests.model_configs import LLAMA_8B

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
SECTION = README.split("## A shared tier for a cluster\n")[1].split("\n## ")[0]
COMMANDS = re.findall(r"^    (kvtier .+?)(?:\s+#.*)?$", SECTION, flags=re.M)
ON_THE_DEMO = re.findall(r"^    \.venv/bin/(kvtier .+?)(?:\s+#.*)?$", README, flags=re.M)
PLAN = re.search(r"^    (kvtier plan .+)\n\n((?:    .+\n)+)", README, flags=re.M)


def test_each_command_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine(tmp_path / "kv")
    engine.save(list(range(64 * 5)), list(range(20)))
    engine.close()
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompt.json").write_text(json.dumps(list(range(64 * 5))))
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"root: {tmp_path / 'kv'}\n")
    said = {}
    for command in COMMANDS:
        _, *words = shlex.split(command.replace("/etc/kvtier.yaml", str(config)))
        if words[0] == "serve":  # tests/ui and tests/server run that one
            continue
        assert main(words) == 0, command
        said[words[0]] = capsys.readouterr().out
    assert set(said) == {"stats", "lookup", "evict", "pin", "quota", "bench"}
    assert "320 of 320 tokens" in said["lookup"] and "would be evicted" in said["evict"]
    assert "500.0 GiB" in said["quota"]


def test_what_the_demo_left_is_found_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their path is a relative one. It led to an index whose path was relative too, and that was refused."""
    engine = Engine(tmp_path / "demo-output" / "tier")
    engine.save(list(range(64 * 5)), list(range(20)))
    engine.close()
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert [main(shlex.split(command)[1:]) for command in ON_THE_DEMO] == [0, 0, 0]


def test_the_sizing_example_is_what_plan_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert PLAN is not None
    words = shlex.split(PLAN[1])[1:]
    folder = tmp_path / words[words.index("--model") + 1]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_8B))
    monkeypatch.chdir(tmp_path)
    assert main(words) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = [line.strip() for line in PLAN[2].splitlines()]
    assert [line.split()[0] for line in shown] == ["codec", "raw", "k4v4"] and set(shown) <= set(printed)
