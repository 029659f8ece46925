"""What the command line says to a new user who slips."""

import errno
import os
from pathlib import Path

import pytest

from kvtier.cli import doctor, stats
from kvtier.errors import TierUnavailable
from tests.cli.asking import Cli


@pytest.mark.parametrize("name", ["kvtier.yaml", "kvtier.yml", "kvtier.toml", "kvtier.JSON"])
@pytest.mark.parametrize("command", ["doctor", "stats", "verify"])
def test_a_settings_file_that_is_not_there_is_no_root(
    command: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda *_, **__: [])
    path = tmp_path / name
    said = cli.refused(command, str(path))
    assert f"config = '{path}'" in said and "there is no such file" in said
    path.mkdir()
    assert "there is no such file" not in cli.errors(command, str(path), status=0 if command == "doctor" else 2)


@pytest.mark.parametrize("words", [("check",), ("stats", "--config")])
def test_a_folder_in_place_of_settings_says_how_a_root_is_named(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    said = cli.refused(*words, ".", status=1 if words == ("check",) else 2)
    assert "it is a folder" in said and f"`KVTIER_ROOT={tmp_path} kvtier check`" in said
    assert f"`kvtier doctor {tmp_path}`" in said


@pytest.mark.parametrize("command", ["check", "stats"])
def test_an_empty_variable_and_a_url_are_named(command: str, monkeypatch: pytest.MonkeyPatch, cli: Cli) -> None:
    """An empty KVTIER_ROOT was taken for the current folder."""
    status = 1 if command == "check" else 2
    monkeypatch.setenv("KVTIER_ROOT", "")
    said = cli.refused(command, status=status)
    assert "it is empty" in said and said.endswith("(from environment variable KVTIER_ROOT)\n")
    monkeypatch.setenv("KVTIER_ROOT", "s3://bucket/kv")  # "try /the/current/folder/s3:/bucket/kv", it said
    said = cli.refused(command, status=status)
    assert "it is a URL, and kvtier needs a path" in said and "try" not in said
    monkeypatch.delenv("KVTIER_ROOT")
    monkeypatch.setenv("KVTIER_CONFIG", "")
    assert cli.refused(command, status=status).startswith("kvtier: KVTIER_CONFIG = '': it is empty")


@pytest.mark.parametrize("is_tiers", [False, True])
@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EACCES, "run this as the engines' user"), (errno.ENOSPC, "df -i"), (errno.EROFS, "mount it")],
)
def test_an_error_of_the_system_says_what_to_do(
    number: int, advice: str, is_tiers: bool, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    """The message used to be "[Errno 13] Permission denied: '/kv/x'"."""

    def fail(*_: object) -> None:
        fault = OSError(number, os.strerror(number), "/kv/x")
        if is_tiers:
            raise TierUnavailable(f"/kv/x: {fault.strerror}") from fault
        raise fault

    monkeypatch.setattr(stats, "find_place", fail)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    said = cli.refused("stats", "x")
    assert said.startswith(f"kvtier: /kv/x: {os.strerror(number)}; ") and advice in said


def test_a_command_that_is_given_no_root_says_how_one_is_named(tmp_path: Path, cli: Cli) -> None:
    for command in ("stats", "verify", "bench", "index check"):
        assert cli.refused(*command.split()).endswith("or name the root, or its settings file, as PATH\n")
    said = cli.refused("serve", str(tmp_path))
    assert f"root: {tmp_path}" in said and f"`KVTIER_ROOT={tmp_path} kvtier serve`" in said


def test_a_root_that_cannot_be_is_named_itself(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "kvtier.yaml").write_text("root: /proc/kv\n")
    said = cli.errors("check", str(tmp_path / "kvtier.yaml"))
    assert said.startswith("kvtier: root = '/proc/kv': no files can be made there")


def test_a_redis_that_does_not_answer_is_said_once(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "kv/v2").mkdir(parents=True)
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"root: {tmp_path}/kv\nindex: {{kind: redis, url: 'redis://127.0.0.1:1/0'}}\n")
    advice = "; start it, or correct index.url"
    for command in ("stats", "verify", "pin", "quota", "index check", "index rebuild", "evict --all --yes"):
        said = cli.refused(*command.split(), "--config", str(config))
        assert said.count("Redis") == 1 and said.endswith(f"Connection refused{advice}\n")
    assert cli.printed("check", str(config), status=1).count(advice) == 1


def test_check_prints_tenants_as_a_settings_file_has_them(tmp_path: Path, cli: Cli) -> None:
    tenants = '[{"name": "search", "cache_salts": ["search-*"], "quota_bytes": 1073741824}]'
    config = tmp_path / "kvtier.yaml"
    config.write_text(f"root: {tmp_path / 'kv'}\ncapacity_bytes: 4GiB\ncapacity: {{tenants: {tenants}}}\n")
    assert f"capacity.tenants: {tenants}\n" in cli.printed("check", str(config))
