"""What is worth trying on which machine, which of the measured choices is picked, and a calibration as JSON."""

import importlib.util
import json
import os
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kvtier.errors import Corrupt
from kvtier.io import calibration as kept
from kvtier.io.calibration import (
    Ask,
    Calibration,
    cache_share,
    default_choice,
    device_threads,
    first_round,
    fits,
    last_level_cache_bytes,
    pick,
    second_round,
)
from kvtier.io.engines import EngineChoice, Target

MIB = 1 << 20
DEVICE = Target(1 << 40, 64 * MIB, 0)
BIG_CACHE = 300 * MIB
USUAL = EngineChoice("ring", 12, 4 * MIB, 2)
SMALL, LARGE = EngineChoice("ring", 8, MIB, 2), EngineChoice("ring", 16, MIB, 4)
KVIKIO = EngineChoice("kvikio", 8, MIB)


@pytest.mark.parametrize(
    ("rates", "picked"),
    [
        ({USUAL: 47.6e9, SMALL: 50e9}, USUAL),  # within 5 %: as good
        ({USUAL: 47.4e9, SMALL: 50e9}, SMALL),
        ({SMALL: 48.6e9, LARGE: 50e9}, SMALL),  # within 3 %: what holds less memory
        ({SMALL: 48.4e9, LARGE: 50e9}, LARGE),
        ({USUAL: 40e9, SMALL: 48.6e9, LARGE: 50e9}, SMALL),
        ({KVIKIO: 50e9, LARGE: 37.6e9}, LARGE),  # the ring before KvikIO, down to 75 %
        ({KVIKIO: 50e9, USUAL: 37.6e9, LARGE: 49e9}, LARGE),  # and then only rings are compared
        ({KVIKIO: 50e9, LARGE: 37.4e9}, KVIKIO),
    ],
)
def test_which_of_the_rates_is_picked(rates: dict[EngineChoice, float], picked: EngineChoice) -> None:
    assert pick(rates, USUAL) == picked
    assert pick(dict(reversed(rates.items())), USUAL) == picked


@pytest.mark.parametrize(("processors", "threads"), [(None, 4), (2, 4), (8, 6), (16, 14), (18, 16), (192, 16)])
def test_processors_are_left_to_the_engine(
    processors: int | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    assert device_threads() == threads


def test_rings_stay_in_half_the_cache() -> None:
    for target in (DEVICE, Target(4096, 64 * MIB)):
        ask = Ask(Path("/x"), target, True, False)
        for cache_bytes in (8 * MIB, 32 * MIB, BIG_CACHE):
            assert target.ordinal is None or fits(default_choice(ask, cache_bytes), cache_bytes)
            tried = first_round(ask, cache_bytes)
            assert tried and (target.ordinal is None or all(fits(choice, cache_bytes) for choice in tried))
    assert default_choice(Ask(Path("/x"), DEVICE, True, True), BIG_CACHE) == USUAL._replace(threads=device_threads())
    assert default_choice(Ask(Path("/x"), DEVICE, True, True, ("kvikio",)), BIG_CACHE).engine == "kvikio"


def test_ranks_of_one_machine_share_its_processors_and_their_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(kept, "last_level_cache_bytes", lambda: 300 * MIB)
    alone, two = (Ask(Path("/x"), DEVICE, True, True, ranks=ranks) for ranks in (1, 2))
    assert default_choice(alone, cache_share(alone)) == EngineChoice("ring", 16, 4 * MIB, 2)
    assert default_choice(two, cache_share(two)) == EngineChoice("ring", 14, 2 * MIB, 2)
    for choice in first_round(two, cache_share(two)):
        assert 2 * choice.held_bytes <= 150 * MIB, "the rings of both stay in half of it"
    assert [device_threads(ranks) for ranks in (1, 2, 4, 8, 64)] == [16, 14, 6, 4, 4]
    assert {choice.threads for choice in second_round(default_choice(two, BIG_CACHE), two, BIG_CACHE)} == {8}
    on_disk = replace(two, in_memory=False)
    assert {choice.threads for choice in second_round(default_choice(on_disk, BIG_CACHE), on_disk, BIG_CACHE)} == {
        8,
        16,
    }


def test_a_file_in_memory_is_read_into_a_device_in_pieces_of_the_default_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    in_memory, on_disk = (Ask(Path("/x"), DEVICE, True, in_memory) for in_memory in (True, False))
    usual = default_choice(in_memory, BIG_CACHE)
    assert first_round(in_memory, BIG_CACHE) == (usual,)
    assert {choice.threads for choice in second_round(usual, in_memory, BIG_CACHE)} == {8}, "16 leave the engine none"
    assert {choice.piece_bytes for choice in first_round(on_disk, BIG_CACHE)} == {4 * MIB, 2 * MIB, MIB}
    assert {choice.threads for choice in second_round(usual, on_disk, BIG_CACHE)} == {8, 16}, "24 do not fit the cache"


@pytest.mark.parametrize("installed", [True, False])
def test_auto_means_kvikio_where_it_is_installed(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None) if installed else None)
    assert kept.engines_for("auto", DEVICE) == (("ring", "kvikio") if installed else ("ring",))
    assert kept.engines_for("kvikio", DEVICE) == ("kvikio",), (
        "asked for by name it is tried, and the fault names the fix"
    )


def test_kvikio_is_for_devices_only() -> None:
    assert kept.engines_for("kvikio", Target(4096, MIB)) == kept.engines_for("auto", Target(4096, MIB)) == ("ring",)
    assert kept.engines_for("kvikio", DEVICE) == ("kvikio",) and kept.engines_for("ring", DEVICE) == ("ring",)
    ask = Ask(Path("/x"), Target(4096, 64 * MIB), True, False, ("ring", "kvikio"))
    assert {choice.engine for choice in first_round(ask, BIG_CACHE)} == {"ring"}


def test_cache_of_all_dies_is_counted_once_each(tmp_path: Path) -> None:
    for cpu, sharers in enumerate(("0-1", "0-1", "2-3", "2-3")):
        folder = tmp_path / f"cpu{cpu}" / "cache" / "index3"
        folder.mkdir(parents=True)
        (folder / "size").write_text("32768K\n")
        (folder / "shared_cpu_list").write_text(sharers)
    assert last_level_cache_bytes(tmp_path) == 64 * MIB
    assert last_level_cache_bytes(tmp_path / "absent") == kept.CACHE_BYTES_UNKNOWN


def test_json() -> None:
    made = Calibration(EngineChoice("kvikio", 16, MIB), 1e9, None, 0.5, 1.5, ("a", "b"))
    assert Calibration.from_json(json.loads(json.dumps(made.to_json()))) == made
    for change in ({"read_bytes_s": -1}, {"choice": {}}, {"seconds": "x"}):
        with pytest.raises(Corrupt):
            Calibration.from_json(made.to_json() | change)
