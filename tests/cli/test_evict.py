"""`kvtier evict` beside a running engine: what it says, and its exit status."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvtier.cli import evict as command
from kvtier.cli.tables import UNKNOWN, seconds, when
from kvtier.config.settings import CONFIG_VARIABLE
from kvtier.runtime.units import rate, size
from tests.cli.asking import Cli
from tests.eviction.test_capacity import small_disk
from tests.support.rig import Engine, saved_by_another

CHUNKS = 5


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    """An engine with chunks in an open set, whose root and settings are those of `kvtier.yaml` beside it."""
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    monkeypatch.setattr(command, "SHOW_TIMEOUT_S", 0.0)
    tenants = "[{name: search, cache_salts: ['search-*']}]"
    text = f"root: {tmp_path / 'kv'}\ncapacity_bytes: 64MiB\nsegment_bytes: 4MiB\ncapacity: {{tenants: {tenants}}}\n"
    (tmp_path / "kvtier.yaml").write_text(text)
    engine = Engine(tmp_path / "kv")
    assert len(engine.save(list(range(64 * CHUNKS)), list(range(4 * CHUNKS)))) == CHUNKS
    yield engine
    engine.close()


def evict(engine: Engine, cli: Cli, *arguments: str, status: int = 0) -> tuple[str, str]:
    return cli.run("evict", str(engine.root.parent / "kvtier.yaml"), *arguments, status=status)


@pytest.mark.parametrize("how", ["--dry-run", "--yes"])
def test_what_an_engine_fills_stays_and_is_named(live: Engine, how: str, cli: Cli) -> None:
    out, said = evict(live, cli, "--all", how, "--json", status=2)
    answer = json.loads(out)
    (kept,) = answer["kept"]
    assert answer["n_sets"] == 0 and answer["dry_run"] == (how == "--dry-run")
    assert kept["why"] == "open" and kept["n_sets"] >= 1 and kept["n_bytes"] > 0
    assert kept["owners"] == [live.store._keeper._plan.owner]
    assert len(said.splitlines()) == 1 and "not all of it" in said and kept["owners"][0] in said
    out, said = evict(live, cli, "--all", how, status=2)
    assert out.startswith("0 segment sets ") and "open, for a running engine" in said
    assert live.load(list(range(64 * CHUNKS)), list(range(40, 40 + 4 * CHUNKS)))[0] == CHUNKS


@pytest.mark.parametrize("is_held", [False, True])
def test_space_is_called_free_when_it_is(
    is_held: bool, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(CONFIG_VARIABLE, raising=False)
    config = tmp_path / "kvtier.yaml"
    with small_disk(64) as disk, ExitStack() as stack:
        index = f"index: {{path: {tmp_path / 'index'}}}\n"
        config.write_text(f"root: {disk}\ncapacity_bytes: 32MiB\nsegment_bytes: 4MiB\n{index}")
        changes = {"index": {"path": str(tmp_path / "index")}, "capacity_bytes": 32 << 20}
        saved_by_another(disk, list(range(64 * CHUNKS)), list(range(4 * CHUNKS)), changes=changes)
        (path,) = disk.glob("v2/*/*.kvseg")
        n_bytes = path.stat().st_blocks * 512
        if is_held:
            stack.enter_context(path.open("rb"))
            monkeypatch.setattr(command, "SHOW_TIMEOUT_S", 0.1)
        said = cli.printed("evict", str(config), "--all", "--yes")
        if is_held:
            assert f"of {size(n_bytes)} became free" in said and f"(pid {os.getpid()})" in said, said
        else:
            assert f"{size(n_bytes)} became free on the disk" in said, said


def test_enough_is_enough(live: Engine, cli: Cli) -> None:
    """Open sets that no eviction needs are no reason to say that something is missing."""
    live.close()
    other = Engine(live.root, weights="other")
    try:
        answer = json.loads(evict(live, cli, "--bytes", "1KiB", "--yes", "--json")[0])
        assert (answer["n_sets"], answer["kept"]) == (1, [])
    finally:
        other.close()


@pytest.mark.parametrize("given", ["20000w", f"{'9' * 400}w"])
@pytest.mark.parametrize("command", [("evict", "--unused"), ("pin", "--for")])
def test_a_time_has_a_bound(given: str, command: tuple[str, str], cli: Cli) -> None:
    """A pin for so long was made, and each listing of the pins ended with a traceback from then on."""
    assert "at most 115,740 days" in cli.errors(command[0], "kvtier.yaml", f"{command[1]}={given}", status=2)


def test_numbers_have_no_exponent() -> None:
    assert [seconds(value) for value in (999.7, 99.97, 0.9997, -7199)] == ["1,000 s", "100 s", "1,000 ms", "-7,199 s"]
    assert [rate(value) for value in (999.7e6, 999.7e3, 1.234e12)] == ["1,000 MB/s", "1,000 kB/s", "1,234 GB/s"]


@pytest.mark.parametrize("at_s", [1e20, 1e300, -1e300])
def test_a_time_that_is_no_date_is_not_shown_as_one(at_s: float) -> None:
    assert when(at_s) == UNKNOWN


@pytest.mark.parametrize("given", ["7", "7.5", "0d", "d", "7 days", "-7d"])
@pytest.mark.parametrize("command", [("evict", "--unused"), ("pin", "--for")])
def test_a_time_needs_its_unit(given: str, command: tuple[str, str], cli: Cli) -> None:
    assert '"12h", "7d"' in cli.errors(command[0], "kvtier.yaml", f"{command[1]}={given}", status=2)
