"""`kvtier index rebuild` and `index check`, for an embedded index and for one in Redis."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvtier.config.index import IndexSettings
from kvtier.config.settings import Settings
from kvtier.doctor import report
from kvtier.doctor.host import Host, ProbeFailed
from kvtier.doctor.report import examine
from kvtier.errors import IndexUnavailable
from kvtier.index.base import Index, Location, NewRecord, RemoteState
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.index.open import open_index
from kvtier.index.redis.index import RedisIndex
from kvtier.maintenance import consistency_check
from kvtier.storage.root import open_root
from tests.cli.asking import CHUNKS, Cli
from tests.redis_server import GENEROUS_MS, has_redis, index_settings, standalone
from tests.support.rig import Engine

PATIENT = {"reply_timeout_ms": GENEROUS_MS, "connect_timeout_ms": GENEROUS_MS}


class Place:
    """A root with five chunks, its engine ended; the words that name it; its index."""

    def __init__(self, folder: Path, settings: IndexSettings | None) -> None:
        self.root = folder / "kv"
        redis = {} if settings is None else {"kind": "redis", "url": settings.url, "prefix": "p", **PATIENT}
        changes = {"index": redis} if redis else {}
        engine = Engine(self.root, changes=changes)
        assert len(engine.save(list(range(64 * CHUNKS)), list(range(4 * CHUNKS)))) == CHUNKS
        engine.close()
        self.words = [str(self.root)]
        self._settings = settings
        if settings is not None:
            config = folder / "kvtier.yaml"
            config.write_text(yaml.safe_dump({"root": str(self.root), **changes}))
            self.words += ["--config", str(config)]

    def open(self) -> Index:
        if self._settings is None:
            return LmdbIndex(str(self.root / "v2" / "index"))
        return RedisIndex(self._settings.model_copy(update={"prefix": "p"}))


@pytest.fixture(params=["embedded", pytest.param("redis", marks=has_redis)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(consistency_check, "SETTLE_S", 0.01)
    if request.param == "embedded":
        yield Place(tmp_path, None)
        return
    with standalone(tmp_path / "redis") as server:
        yield Place(tmp_path, index_settings(server.url))


@pytest.fixture
def only_redis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `doctor` examine Redis only, and start no processes for other probes."""

    def fail(*_: object, **__: object) -> None:
        raise ProbeFailed("not asked here")

    monkeypatch.setattr(Host, "probe", fail)


def check(place: Place, cli: Cli, status: int = 0) -> Any:
    return cli.json("index", "check", *place.words, status=status)


def test_what_an_engine_left_agrees(place: Place, cli: Cli) -> None:
    found = check(place, cli)
    assert [found[name] for name in ("chunks", "records", "indexed", "n_disagreements")] == [CHUNKS, CHUNKS, CHUNKS, 0]
    assert "0 disagreements" in cli.printed("index", "check", *place.words)


def test_a_lost_entry_is_found_and_a_rebuild_brings_it_back(place: Place, cli: Cli) -> None:
    index = place.open()
    (info,) = index.sets()
    key, location = index.members(info.set_id)[2]
    assert index.retract(key, location)
    index.close()
    found = check(place, cli)
    assert (found["n_disagreements"], found["unnamed"]) == (0, 1)
    assert [row["slot"] for row in found["unnamed_places"]] == [location.slot]
    assert "is a miss and takes room" in cli.printed("index", "check", *place.words)
    assert cli.json("index", "rebuild", *place.words)["records"] == 1
    assert check(place, cli)["unnamed"] == 0


@has_redis
def test_a_rebuild_counts_again_what_redis_lost_the_counts_of(tmp_path: Path, cli: Cli) -> None:
    """As by a maxmemory-policy that evicts keys."""
    with standalone(tmp_path / "redis") as server:
        place = Place(tmp_path, index_settings(server.url))
        assert server.cli("del", "p:e") == "1"
        assert cli.json("stats", *place.words)["index"]["chunks"] == 0
        server.cli("config", "resetstat")
        cli.run("index", "rebuild", *place.words)
        assert "cmdstat_scan:calls=1," in server.cli("info", "commandstats"), "all entries are read once"
        assert cli.json("stats", *place.words)["index"]["chunks"] == CHUNKS


@has_redis
def test_a_rebuild_that_fails_while_it_counts_leaves_a_whole_index(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had read all segments, and commands said all the same that the index was partial, until the next rebuild."""

    def fail(_: RedisIndex) -> None:
        raise IndexUnavailable("no answer in 10 s")

    with standalone(tmp_path / "redis") as server:
        place = Place(tmp_path, index_settings(server.url))
        server.cli("flushall")
        with monkeypatch.context() as patched:
            patched.setattr(RedisIndex, "recount", fail)
            assert "no answer in 10 s" in cli.errors("index", "rebuild", *place.words, status=2)
        index = place.open()
        assert not index.was_reset and index.counts().chunks == CHUNKS
        index.close()


def test_commands_say_that_an_index_is_partial(tmp_path: Path, cli: Cli) -> None:
    """As that of a copied root: lookups found nothing, and nothing was to be evicted, without a word of why."""
    root = Path(shutil.copytree(Place(tmp_path, None).root, tmp_path / "copy"))
    config = tmp_path / "copy.yaml"
    config.write_text(yaml.safe_dump({"root": str(root)}))
    tokens = tmp_path / "tokens"
    tokens.write_text(json.dumps(list(range(64 * CHUNKS))))
    lookup = ("lookup", str(config), "--tokens", str(tokens))
    for words, status in (
        (lookup, 1),
        (("evict", str(config), "--all", "--dry-run"), 0),
        (("pin", str(config)), 0),
        (("stats", str(config)), 0),
    ):
        assert "partial until an engine, or kvtier index rebuild" in cli.errors(*words, status=status)
    cli.run("index", "rebuild", str(config))
    assert "partial" not in cli.errors(*lookup, status=0)


def test_an_entry_without_a_record_is_found_and_a_rebuild_takes_it_out(place: Place, cli: Cli) -> None:
    index = place.open()
    (info,) = index.sets()
    key, at = index.members(info.set_id)[0]
    whole = at.extent
    wrong = NewRecord(bytes(16), Location(at.set_id, at.rank, 40, at.slab_bytes, at.extent, at.checksums), whole)
    assert index.publish([wrong], into_unowned=True) == 1
    index.close()
    found = check(place, cli, 1)
    assert found["n_disagreements"] == 1
    assert "there is none" in found["disagreements"][0]["what"] and found["disagreements"][0]["slot"] == 40
    assert "1 record gone from their files, 0 bad records" in cli.printed("index", "rebuild", *place.words)
    check(place, cli)
    again = cli.json("index", "rebuild", *place.words)
    assert (again["gone_records"], again["bad_records"]) == (0, 0)


def test_a_set_without_files_and_files_without_a_set_are_found(place: Place, cli: Cli) -> None:
    for segment in place.root.glob("v2/*/*.kvseg"):
        segment.rename(segment.with_name(f"{2:016x}-0000-00.kvseg"))
    found = check(place, cli, 1)
    said = [row["what"] for row in found["disagreements"]]
    assert said.count("the index names a record there, and there is none") == CHUNKS
    assert len(said) == CHUNKS + 1 and "renamed or copied" in said[0], "nor is the segment what its name says"
    assert "1 set without files" in cli.printed("index", "rebuild", *place.words, status=None)


def test_an_index_that_is_lost_is_made_from_the_segments(place: Place, cli: Cli) -> None:
    index = place.open()
    index.clear()
    index.close()
    found = check(place, cli, 1)
    assert (found["records"], found["chunks"]) == (CHUNKS, 0)
    assert {row["what"] for row in found["disagreements"]} == {"no segment set of the index"}
    cli.run("index", "rebuild", *place.words)
    found = check(place, cli)
    assert (found["indexed"], found["chunks"]) == (CHUNKS, CHUNKS)


@has_redis
def test_a_record_that_a_publisher_left_without_a_set_is_taken_out(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consistency_check, "SETTLE_S", 0.01)
    with standalone(tmp_path / "redis") as server:
        place = Place(tmp_path, index_settings(server.url))
        index = place.open()
        assert isinstance(index, RedisIndex)
        (info,) = index.sets()
        _, at = index.members(info.set_id)[0]
        lost = NewRecord(b"x" * 16, at._replace(set_id=77), at.extent)
        from kvtier.index.redis.entries import adding

        index._entries.change([(lost.key, adding(lost.location, lost.whole))], are_new=True)
        assert "does not list it" in check(place, cli, 1)["disagreements"][0]["what"]
        assert "1 record without a set" in cli.printed("index", "rebuild", *place.words)
        check(place, cli)
        index.close()


@has_redis
def test_a_root_with_an_index_in_redis_asks_for_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    with standalone(tmp_path / "redis") as server:
        place = Place(tmp_path, index_settings(server.url))
        assert "--config FILE" in cli.errors("index", "rebuild", str(place.root), status=2)
        server.pause()
        monkeypatch.setenv("KVTIER_INDEX__REPLY_TIMEOUT_MS", "100")
        assert "or raise index.reply_timeout_ms" in cli.refused("stats", *place.words)
        server.kill()
        assert "start it, or correct index.url" in cli.refused("index", "check", *place.words)
        server.start()


@has_redis
@pytest.mark.usefixtures("only_redis")
def test_doctor_looks_at_the_redis_of_a_settings_file(tmp_path: Path) -> None:
    config = tmp_path / "kvtier.yaml"

    def redis_verdict() -> tuple[str, str]:
        found = {verdict.what: verdict for verdict in examine(config)}
        assert found["root"].level in ("ok", "warn")
        return found["Redis"].level, found["Redis"].value + found["Redis"].fix

    with standalone(tmp_path / "redis", ["--requirepass", "hunter2"]) as server:
        index = {"kind": "redis", "url": server.url, "prefix": "p", "password": "hunter2", **PATIENT}
        config.write_text(json.dumps({"root": str(tmp_path / "kv"), "index": index}))
        settings = Settings.load({"config": str(config)})
        open_index(settings, open_root(settings)).close()
        assert redis_verdict()[0] == "ok"
        config.write_text(json.dumps({"root": str(tmp_path / "kv"), "index": index | {"password": "wrong"}}))
        level, said = redis_verdict()
        assert level == "bad" and "refuses the login" in said
    level, said = redis_verdict()
    assert level == "warn" and "does not answer" in said


@pytest.mark.usefixtures("only_redis")
@pytest.mark.parametrize(("does_answer", "level"), [(True, "ok"), (False, "warn")])
def test_doctor_goes_by_whether_redis_answered_and_not_by_its_words(
    does_answer: bool, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, url = tmp_path / "kvtier.yaml", "redis://kv.example"
    config.write_text(json.dumps({"root": str(tmp_path / "kv"), "index": {"kind": "redis", "url": url}}))
    state = RemoteState(url, does_answer, "whose index does not answer")
    monkeypatch.setattr(report, "look_at_redis", lambda _: state)
    (verdict,) = [verdict for verdict in examine(config) if verdict.what == "Redis"]
    assert (verdict.level, bool(verdict.fix)) == (level, not does_answer) and url in verdict.value


@has_redis
def test_check_says_what_redis_says(tmp_path: Path, cli: Cli) -> None:
    with standalone(tmp_path / "redis", ["--requirepass", "hunter2"]) as server:
        config = tmp_path / "kvtier.yaml"

        def said(status: int, **index: str) -> str:
            text = {"root": str(tmp_path / "kv"), "index": {"kind": "redis", **index, **PATIENT}}
            config.write_text(yaml.safe_dump(text))
            out = "".join(cli.run("check", str(config), status=status))
            assert "hunter2" not in out and "wrong-one" not in out
            return out

        address = f"127.0.0.1:{server.port}"
        assert f"in Redis at redis://{address}/0" in said(0, url=f"redis://:hunter2@{address}/0")
        assert server.cli("-a", "hunter2", "dbsize") == "0", "check writes nothing"
        said(0, url=f"redis://{address}/0", password="hunter2")
        assert "index.password" in said(1, url=f"redis://{address}/0", password="wrong-one")
        server.kill()
        out = said(1, url=f"redis://:hunter2@{address}/0")
        assert "does not answer" in out and "an engine starts, and caches nothing until it does" in out


@has_redis
@pytest.mark.usefixtures("only_redis")
def test_check_refuses_the_prefix_of_another_root(tmp_path: Path, cli: Cli) -> None:
    """An engine does not start with it; check called it right."""
    with standalone(tmp_path / "redis") as server:
        index = {"kind": "redis", "url": f"redis://127.0.0.1:{server.port}/0", **PATIENT}
        Engine(tmp_path / "one", changes={"index": index}).close()
        config = tmp_path / "kvtier.yaml"
        for root, status in (("one", 0), ("new", 1), ("two", 1)):
            if root == "two":
                Engine(tmp_path / "two", changes={"index": index | {"prefix": "other"}}).close()
            config.write_text(yaml.safe_dump({"root": str(tmp_path / root), "capacity_bytes": "4GiB", "index": index}))
            said = cli.errors("check", str(config), status=status)
            assert status == 0 or "index.prefix = 'kvtier': it has the index of root" in said
        (verdict,) = [found for found in examine(config) if found.what == "Redis"]
        assert verdict.level == "bad" and "prefix of its own" in verdict.fix


@has_redis
@pytest.mark.usefixtures("only_redis")
@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-ttl"])
def test_a_redis_that_evicts_is_warned_of(policy: str, tmp_path: Path, cli: Cli) -> None:
    with standalone(tmp_path / "redis", ["--maxmemory", "100mb", "--maxmemory-policy", policy]) as server:
        config = tmp_path / "kvtier.yaml"
        index = {"kind": "redis", "url": f"redis://127.0.0.1:{server.port}/0", **PATIENT}
        config.write_text(yaml.safe_dump({"root": str(tmp_path / "kv"), "index": index}))
        is_said = "set maxmemory-policy to noeviction" in cli.printed("check", str(config))
        (verdict,) = [found for found in examine(config) if found.what == "Redis"]
        assert is_said == (verdict.level == "warn") == (policy != "noeviction")
        server.cli("config", "set", "maxmemory", "1")
        is_full = policy == "noeviction"
        assert is_full == ("Redis is full" in cli.printed("check", str(config)))
        server.cli("acl", "setuser", "default", "-info")
        (verdict,) = [found for found in examine(config) if found.what == "Redis"]
        assert verdict.level == "ok" and "maxmemory-policy was not looked at" in verdict.value
