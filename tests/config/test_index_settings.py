"""Settings of an index in Redis: its URL, what goes together, and that no secret is ever printed."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvtier.config.index import RedisPlace, parse_url
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError

SECRET = "hunter2hunter2"


def load(root: Path, **index: Any) -> Settings:
    return Settings.load({"root": str(root), "index": {"kind": "redis", **index}})


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("redis://host", RedisPlace("one", (("host", 6379),), "", "", 0, False)),
        ("redis://host:1/2", RedisPlace("one", (("host", 1),), "", "", 2, False)),
        ("redis://host:65535", RedisPlace("one", (("host", 65535),), "", "", 0, False)),
        ("rediss://10.0.0.1:6380/", RedisPlace("one", (("10.0.0.1", 6380),), "", "", 0, True)),
        ("redis://[fe80::1]:7", RedisPlace("one", (("fe80::1", 7),), "", "", 0, False)),
        ("redis://[fe80::1%eth0.1]:7", RedisPlace("one", (("fe80::1%eth0.1", 7),), "", "", 0, False)),
        ("unix:///run/redis.sock?db=3", RedisPlace("one", (), "/run/redis.sock", "", 3, False)),
        ("redis+sentinel://a,b:1/kv", RedisPlace("sentinel", (("a", 26379), ("b", 1)), "", "kv", 0, False)),
        ("rediss+sentinel://a/kv?db=4", RedisPlace("sentinel", (("a", 26379),), "", "kv", 4, True)),
        ("redis+cluster://a:1,b:2", RedisPlace("cluster", (("a", 1), ("b", 2)), "", "", 0, False)),
    ],
)
def test_urls(url: str, place: RedisPlace) -> None:
    assert parse_url(url) == place


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://host", "must be the address of a Redis"),
        ("redis://", "a host is a name"),
        ("redis://a:65536", "from 1 to 65535"),
        ("redis://a:0", "from 1 to 65535"),
        ("redis://a..b", "between dots has 1 to 63"),
        ("redis://a,b", "several hosts"),
        ("redis+sentinel://a", "name the service"),
        ("redis+cluster://a/1", "one database"),
        ("redis://a/x", "number of the database"),
        ("redis://a?timeout=3", "settings of their own"),
        ("unix://host", "absolute path"),
        (f"redis://user:{SECRET}@", "a host is a name"),
        (f"redis:/user:{SECRET}@host", "must be the address"),
        (f"redis://user:{SECRET}/x@host", "a host is a name"),
    ],
)
def test_wrong_urls_are_refused_without_their_password(tmp_path: Path, url: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, url=url)
    assert caught.value.key == "index.url" and said in caught.value.fix and SECRET not in str(caught.value)


def test_credentials_leave_the_url(tmp_path: Path) -> None:
    settings = load(tmp_path, url=f"redis://me:{SECRET}%40@host:1/0")
    assert (settings.index.url, settings.index.username) == ("redis://host:1/0", "me")
    assert settings.index.secret() == f"{SECRET}@"
    assert SECRET not in repr(settings) + str(settings) + json.dumps(settings.model_dump(mode="json"))
    assert load(tmp_path, url=f"redis://:{SECRET}@host").index.secret() == SECRET


def test_the_password_may_stand_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_text(f"{SECRET}\n")
    assert load(tmp_path, url="redis://host", password_file=str(path)).index.secret() == SECRET
    path.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        load(tmp_path, url="redis://host", password_file=str(path)).index.secret()


@pytest.mark.parametrize(
    ("index", "key"),
    [
        ({}, "index.url"),
        ({"url": "redis://h", "path": "/x"}, "index.path"),
        ({"kind": "embedded", "url": "redis://h"}, "index.url"),
        ({"kind": "memory", "path": "/x"}, "index.path"),
        ({"url": "redis://h", "map_bytes": "32GiB"}, "index.map_bytes"),
        ({"url": "redis://h", "timeout_s": 5}, "index.timeout_s"),
        ({"url": "redis://h", "sentinel_username": "me"}, "index.sentinel_username"),
        ({"url": "redis+cluster://h", "sentinel_password": SECRET}, "index.sentinel_password"),
        ({"url": "redis://h", "sentinel_password_file": "/x"}, "index.sentinel_password_file"),
        ({"kind": "embedded", "prefix": "mine"}, "index.prefix"),
        ({"kind": "embedded", "password": SECRET}, "index.password"),
        ({"kind": "embedded", "password_file": "/x"}, "index.password_file"),
        ({"kind": "embedded", "tls_check_hostname": False}, "index.tls_check_hostname"),
        ({"kind": "embedded", "breaker": {"failures": 9}}, "index.breaker"),
        ({"kind": "memory", "reply_timeout_ms": 100}, "index.reply_timeout_ms"),
        ({"url": "redis://h", "password": SECRET, "password_file": "/x"}, "index.password_file"),
        ({"url": "redis://h", "username": "me"}, "index.username"),
        ({"url": "redis://h", "tls_ca_file": "/etc/hostname"}, "index.tls_ca_file"),
        ({"url": "rediss://h", "tls_cert_file": "/etc/hostname"}, "index.tls_cert_file"),
        ({"url": "rediss://h", "tls_ca_file": "/nowhere"}, "index.tls_ca_file"),
        ({"url": "redis://h", "prefix": "a{b}"}, "index.prefix"),
        ({"url": "redis://h", "reply_timeout_ms": 0}, "index.reply_timeout_ms"),
        ({"url": "redis://h", "password": 12345678901}, "index.password"),
        ({"url": "redis://h", "pasword": SECRET}, "index.pasword"),
        ({"url": f"redis://u:{SECRET}@h", "breaker": {"failures": 0}}, "index.breaker.failures"),
        ([f"redis://u:{SECRET}@h"], "index"),
        (f"redis://u:{SECRET}@h", "index"),
    ],
)
def test_what_does_not_go_together_is_refused_without_a_secret(tmp_path: Path, index: Any, key: str) -> None:
    values = {"kind": "redis", **index} if isinstance(index, dict) else index
    with pytest.raises(ConfigError) as caught:
        Settings.load({"root": str(tmp_path), "index": values})
    assert caught.value.key == key
    assert SECRET not in str(caught.value) and "12345678901" not in str(caught.value)


@pytest.mark.parametrize(("kind", "user"), [("redis", "embedded"), ("embedded", "redis")])
def test_a_setting_of_another_kind_of_index_is_refused_unless_it_is_the_default(
    tmp_path: Path, kind: str, user: str
) -> None:
    """These settings were taken and ignored. A copy of default.yaml is no mistake."""
    url = {"url": "redis://h"} if kind == "redis" else {}
    index = {
        "kind": kind,
        "map_bytes": "16GiB",
        "prefix": "kvtier",
        "breaker": {"failures": 3},
        "password": None,
        **url,
    }
    Settings.load({"root": str(tmp_path), "index": index})
    empty = {"sentinel_password": ""} if kind == "redis" else {"username": "", "password": ""}
    Settings.load({"root": str(tmp_path), "index": index | empty})
    change = {"prefix": "mine"} if user == "redis" else {"map_bytes": "1GiB"}
    with pytest.raises(ConfigError, match=f"only index.kind {user} uses it, and that is {kind}: set it to {user}, or"):
        Settings.load({"root": str(tmp_path), "index": index | change})


def test_the_time_of_an_index_in_memory_may_be_set(tmp_path: Path) -> None:
    found = Settings.load({"root": str(tmp_path), "index": {"kind": "memory", "timeout_s": 3}})
    assert found.index.lookup_timeout_s == 3


def test_a_password_in_a_misspelt_variable_is_not_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_INDEX__PASWORD", SECRET)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, url="redis://host")
    assert "KVTIER_INDEX__PASSWORD" in str(caught.value) and SECRET not in str(caught.value)


def test_a_lookup_waits_as_long_as_its_kind_of_index_may(tmp_path: Path) -> None:
    assert load(tmp_path, url="redis://h", connect_timeout_ms=100, reply_timeout_ms=50).index.lookup_timeout_s == 0.15
    assert Settings.load({"root": str(tmp_path), "index": {"timeout_s": 3}}).index.lookup_timeout_s == 3
