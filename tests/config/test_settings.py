"""Settings: what wins, what is refused, and that a refusal names key, value, source and fix."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from kvtier.cli.prompts import duration_argument
from kvtier.config.settings import Settings
from kvtier.config.types import parse_bytes
from kvtier.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.upper().startswith("KVTIER_"):
            monkeypatch.delenv(name)


def refusal(overrides: dict[Any, Any]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Settings.load(overrides)
    assert "\n" not in str(caught.value)
    assert caught.value.key in str(caught.value)
    return caught.value


def yaml_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "kvtier.yaml"
    path.write_text(text)
    return str(path)


def all_keys(model: type[BaseModel]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        nested = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        keys[name] = all_keys(field.annotation) if nested else None  # type: ignore[arg-type]
    return keys


def names_only(tree: object) -> Any:
    return {name: names_only(below) for name, below in tree.items()} if isinstance(tree, dict) else None


# --- what wins ---


def test_default_yaml_has_every_key_with_its_default(tmp_path: Path) -> None:
    assert Settings.load({"root": "/x", "config": str(CONFIGS / "default.yaml")}) == Settings.load({"root": "/x"})
    expected = all_keys(Settings)
    del expected["root"]  # required: shown as a comment
    text = (CONFIGS / "default.yaml").read_text()
    assert names_only(yaml.safe_load(text)) == expected
    assert "\n# root: " in text


def test_every_other_yaml_loads_and_holds_only_differences(tmp_path: Path) -> None:
    def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
        found = {}
        for name, value in tree.items():
            found |= leaves(value, (*path, name)) if isinstance(value, dict) else {(*path, name): value}
        return found

    default = leaves(yaml.safe_load((CONFIGS / "default.yaml").read_text()))
    others = [path for path in CONFIGS.glob("*.yaml") if path.name != "default.yaml"]
    assert CONFIGS / "vllm-cpu.yaml" in others
    for path in others:
        text = path.read_text().replace("/etc/kvtier/", f"{tmp_path}/")
        (tmp_path / "ca.pem").touch()  # looked at when settings are read; the other files when they are used
        Settings.load({"root": "/x", "config": yaml_file(tmp_path, text)})
        for key, value in leaves(yaml.safe_load(path.read_text())).items():
            assert default.get(key) != value, f"{path.name}: {key} repeats the default"


def test_precedence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "root: /yaml\nio: {threads: 3, piece_bytes: 2MiB, direct: never}\nchunk_tokens: 64\n"
    monkeypatch.setenv("KVTIER_CONFIG", yaml_file(tmp_path, text))
    monkeypatch.setenv("KVTIER_IO__THREADS", "4")
    monkeypatch.setenv("KVTIER_IO__PIECE_BYTES", "4MiB")
    monkeypatch.setenv("KVTIER_CHUNK_TOKENS", "128")
    settings = Settings.load({"io": {"threads": 5}})
    assert settings.io.threads == 5  # connector config
    assert settings.io.piece_bytes == 4 << 20  # environment
    assert settings.chunk_tokens == 128
    assert settings.io.direct == "never"  # YAML
    assert settings.root == Path("/yaml")
    assert settings.io.timeout_s == 30.0  # default


def test_the_connectors_config_file_wins_over_the_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONFIG", str(tmp_path / "absent.yaml"))
    assert Settings.load({"config": yaml_file(tmp_path, "root: /named")}).root == Path("/named")


def test_the_constructor_ignores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CHUNK_TOKENS", "64")
    assert Settings(root=Path("/x")).chunk_tokens == 256


def test_settings_are_frozen_and_picklable() -> None:
    settings = Settings.load({"root": "/x"})
    assert pickle.loads(pickle.dumps(settings)) == settings
    with pytest.raises(ValueError, match="frozen"):
        settings.io.threads = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("value", "n_bytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("4KiB", 4096),
        ("512MiB", 512 << 20),
        ("64GiB", 64 << 30),
        ("1TiB", 1 << 40),
        ("2Ti", 2 << 40),
        ("2Gi", 2 << 30),
        ("512mi", 512 << 20),
        ("1.5Ki", 1536),
        ("64GB", 64 * 10**9),
        ("512 mb", 512 * 10**6),
        ("1.5GiB", 3 << 29),
        ("9007199254740993", 9007199254740993),
        ("9007199254740993.0", 9007199254740993),
    ],
)
def test_byte_sizes(value: object, n_bytes: int) -> None:
    assert parse_bytes(value) == n_bytes


# --- unknown and misspelt keys ---


# (overrides of a root, or a settings file; key; what the fix says, with PATH for that file's)
REFUSED: list[tuple[dict[Any, Any] | str, str, tuple[str, ...]]] = [
    ({"capacty_bytes": "1GiB"}, "capacty_bytes", ("did you mean 'capacity_bytes'?", "connector config")),
    ({"io": {"thread": 4}}, "io.thread", ("'io.threads'",)),
    ({"save_threads": 4}, "save_threads", ('\'queues.save_threads\', written {"queues": {"save_threads": ...}}?',)),
    ({"host": {"zzz": 1}}, "host.zzz", ("known here: admit, arena_bytes",)),
    ({"host.arena_bytes": 1}, "host.arena_bytes", ('\'host.arena_bytes\', written {"host": {"arena_bytes": ...}}?',)),
    ("root: /x\nio.threads: 4\n", "io.threads", ("did you mean 'io.threads', written io: {threads: ...}?",)),
    ("root: /x\nindex:\n  knd: memory\n", "index.knd", ("'index.kind', written index: {kind: ...}?", "PATH")),
    (
        "root: /x\nio: {threads: 3}\n\nio: {direct: never}\n",
        "config",
        ("'io' stands twice, in line 2 and in \"PATH\", line 4",),
    ),
    ("&a root: /x\n*a : /y\n", "config", ("'root' stands twice",)),
    *[(text, "config", ("PATH",)) for text in ("- a list\n", "3: 4\n", "io: [\n", "just words")],
    # values
    ("root: /x\nepoch: first\n", "epoch", ("file PATH",)),
    ("root: /x\nepoch: -1\n", "epoch", ("(from file PATH)",)),
    ("root: /x\nqueues: {load_threads: 0}\n", "queues.load_threads", ("PATH, written queues: {load_threads: ...})",)),
    ({"io": {"threads": 0}}, "io.threads", ('(from connector config, written {"io": {"threads": ...}})',)),
    ({"epoch": -1, "io": {"threads": 0}}, "epoch", ("1 more setting is wrong",)),
    ({"confg": "/x.yaml"}, "confg", ("unknown key; did you mean 'config'?",)),
    (
        {"epoch": -1, "io": {"threads": 0}, "hots": 1},
        "epoch",
        ("2 more settings are wrong: io.threads = 0: must be", "; hots = '***': unknown key; did you mean 'host'"),
    ),
    ({"capacity_bytes": "x"}, "capacity_bytes", ("; the default is 64GiB (from",)),
    ({"segment_bytes": 1}, "segment_bytes", ("; the default is 1GiB (from",)),
    ({"host": {"arena_bytes": "x"}}, "host.arena_bytes", ("; it may be left out (from",)),
    ({"require_mount": "x"}, "require_mount", ("; the default is false (from",)),
    # values together
    (
        {"capacity_bytes": "512MiB", "segment_bytes": "1GiB"},
        "capacity_bytes",
        ("one segment set takes 1GiB; raise capacity_bytes", "lower segment_bytes", "connector config"),
    ),
    ({"segment_bytes": "4KiB", "capacity_bytes": "4KiB"}, "segment_bytes", ("12288",)),
    ({"hbm": {"admit": "saved"}}, "hbm.admit", ("hbm.arena_bytes is 0", "connector config")),
    # a tier that would keep nothing, or wait for ever
    ({"io": {"timeout_s": 1e10}}, "io.timeout_s", ("less than or equal to 86400",)),
    ({"io": {"timeout_s": 1e-6}}, "io.timeout_s", ("greater than or equal to 0.1",)),
    ({"index": {"timeout_s": 1e10}}, "index.timeout_s", ("less than or equal to 86400",)),
    ({"server": {"timeout_s": 1e10}}, "server.timeout_s", ("less than or equal to 86400",)),
    ({"touch_interval_s": 1e300}, "touch_interval_s", ("less than or equal to",)),
    ({"writer_lease_s": "9999999w"}, "writer_lease_s", ("less than or equal to",)),
    ({"shutdown_drain_s": "3661d"}, "shutdown_drain_s", ("less than or equal to",)),
    ({"touch_interval_s": 1e-9}, "touch_interval_s", ("greater than or equal to 0.01",)),
    ({"writer_lease_s": 1e-9}, "writer_lease_s", ("greater than or equal to 0.1",)),
    ({"server": {"history_s": 1e-9}}, "server.history_s", ("greater than or equal to 0.1",)),
    ({"io": {"piece_bytes": 1 << 50}}, "io.piece_bytes", ("less than or equal to 1073741824",)),
    ({"index": {"reply_timeout_ms": 1e-9}}, "index.reply_timeout_ms", ("greater than or equal to 1",)),
    ({"index": {"connect_timeout_ms": 1e-9}}, "index.connect_timeout_ms", ("greater than or equal to 1",)),
    ({"index": {"publish_queue_bytes": 1}}, "index.publish_queue_bytes", ("greater than or equal to 65536",)),
    ({"index": {"map_bytes": 1}}, "index.map_bytes", ("greater than or equal to 1048576",)),
    ({"index": {"map_bytes": 1 << 60}}, "index.map_bytes", ("less than or equal to",)),
    ({"capacity": {"ttl_s": 0.001}}, "capacity.ttl_s", ("set it to at least 10",)),
    (
        {"capacity": {"high_watermark": 0.001, "low_watermark": 0.001}},
        "capacity.high_watermark",
        ("nothing would stay",),
    ),
    ({"capacity": {"low_watermark": 0.001}}, "capacity.low_watermark", ("less than one segment set (1GiB)",)),
    (
        {"capacity": {"namespace_quota_bytes": "1MiB"}},
        "capacity.namespace_quota_bytes",
        ("nothing would ever be stored",),
    ),
    # lists of models
    ("root: /x\ncapacity: {tenants: [{cache_salts: [a]}]}\n", "capacity.tenants.0.name", ("not set", "PATH")),
    ("root: /x\ncapacity: {tenants: [{name: a}]}\n", "capacity.tenants.0.cache_salts", ("not set", "PATH")),
    (
        "root: /x\ncapacity: {tenants: [{name: a, cache_salts: [a], quota: 1GiB}]}\n",
        "capacity.tenants.0.quota",
        ("unknown key", "PATH"),
    ),
    (
        "root: /x\ncapacity: {tenants: [{name: a, cache_salts: a-*}]}\n",
        "capacity.tenants.0.cache_salts",
        ("must be a list", "PATH"),
    ),
]
# Settings of two types, of which each complained once.
REFUSED += [
    ({"min_load_tokens": value}, "min_load_tokens", ('number of tokens or "auto"',))
    for value in ("soon", True, -1, 3.5, None)
]
REFUSED += [
    ({"io": {"stripes": value}}, "io.stripes", ('must be a number of files from 1 to 16, or "auto"',))
    for value in (0, 17, -1, True, "many", 2.5, None)
]


@pytest.mark.parametrize(("given", "key", "said"), REFUSED)
def test_a_refusal_names_key_source_and_fix(
    given: dict[Any, Any] | str, key: str, said: tuple[str, ...], tmp_path: Path
) -> None:
    path = str(tmp_path / "kvtier.yaml")
    error = refusal({"config": yaml_file(tmp_path, given)} if isinstance(given, str) else {"root": "/x"} | given)
    assert error.key == key
    for part in said:
        assert part.replace("PATH", path) in str(error)
    assert error.value == "***" or not error.fix.startswith("unknown key")
    assert ("more setting" in error.fix) is any("more setting" in part for part in said), "one complaint a key"
    assert "KVTIER_" not in error.fix


def test_sets_are_smaller_where_only_a_small_capacity_is_set() -> None:
    for given, n_bytes in (
        ({"capacity_bytes": "64MiB"}, 4 << 20),
        ({"capacity_bytes": "1TiB"}, 1 << 30),
        ({"capacity_bytes": "64MiB", "segment_bytes": "32MiB"}, 32 << 20),
    ):
        assert Settings.load({"root": "/x", **given}).rank_set_bytes_max == n_bytes  # type: ignore[dict-item]


def test_what_is_just_enough_is_taken() -> None:
    for given in (
        {"segment_bytes": 12288, "capacity_bytes": 12288},
        {"segment_bytes": 1 << 20, "capacity_bytes": 4 << 20, "capacity": {"low_watermark": 0.25}},
        {"segment_bytes": 1 << 20, "capacity": {"namespace_quota_bytes": 1 << 20}},
        {"touch_interval_s": 5, "capacity": {"ttl_s": 10, "low_watermark": 0.95}},
        {"capacity": {"tenants": [TENANT | {"name": "ä" * 16}]}},
        {"hbm": {"admit": "second_hit", "arena_bytes": 0}},  # as default.yaml has it
        {"hbm": {"admit": "saved", "arena_bytes": "4GiB"}},
        *({"io": {"stripes": stripes}} for stripes in (1, "16", "auto")),
    ):
        Settings.load({"root": "/x", **given})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("KVTIER_CAPACITY_BYTE", "KVTIER_CAPACITY_BYTES"),
        ("KVTIER_IO__THREAD", "KVTIER_IO__THREADS"),
        ("KVTIER_IO_THREADS", "KVTIER_IO__THREADS"),
        ("kvtier_rot", "KVTIER_ROOT"),
        ("kvtier_config", "KVTIER_CONFIG"),  # it was taken, and never read
        ("KVTIER_IO", "KVTIER_IO__ENGINE"),
        ("KVTIER_INDEX", "KVTIER_INDEX__KIND"),
        ("KVTIER_CAPACITY", "KVTIER_CAPACITY_BYTES"),
        ("KVTIER_SERVER__ADMIN_TOKN", "KVTIER_SERVER__ADMIN_TOKEN"),
    ],
)
def test_misspelt_environment_variable(name: str, near: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, SECRET)
    error = refusal({"root": "/x"})
    assert error.key == name and error.value == "***" and SECRET not in str(error)
    assert error.fix == f"unknown environment variable: unset it, or did you mean {near!r}?"


def test_a_removed_key_is_refused_with_its_replacement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = yaml_file(tmp_path, "root: /x\ncapacity: {policy: lru}\n")
    error = refusal({"config": path})
    assert error.key == "capacity.policy" and "least recently used" in error.fix and path in error.fix
    monkeypatch.setenv("KVTIER_CAPACITY__POLICY", "s3fifo")
    error = refusal({"root": "/x"})
    assert error.key == "KVTIER_CAPACITY__POLICY" and "leave it out" in error.fix


# --- bad values ---

TENANT: dict[str, Any] = {"name": "a", "cache_salts": ["x"]}


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"root": "relative/path"}, "root"),
        ({"root": "/"}, "root"),
        ({"root": "//"}, "root"),
        ({"root": "/tmp/.."}, "root"),
        ({"root": "/x\0y"}, "root"),
        *[
            ({"root": "/x", "capacity": {"ttl_s": text}}, "capacity.ttl_s")
            for text in ("7 days", "d", "-7d", True, "0x10", "1_0")
        ],
        *[
            ({"root": "/x", "capacity": capacity}, f"capacity.{key}")
            for capacity, key in (
                ({"low_watermark": 0.97}, "low_watermark"),
                ({"low_watermark": 0}, "low_watermark"),
                ({"high_watermark": 1.5}, "high_watermark"),
                ({"ttl_s": 0}, "ttl_s"),
                ({"tenants": [TENANT, TENANT | {"cache_salts": ["y"]}]}, "tenants"),
                ({"tenants": [TENANT, TENANT | {"name": "b"}]}, "tenants"),
                ({"tenants": [TENANT | {"name": "ä" * 17}]}, "tenants.0.name"),
                *(({"tenants": [TENANT | {"name": name}]}, "tenants.0.name") for name in ("a/b", "a\nb", " a")),
                ({"tenants": [TENANT | {"cache_salts": []}]}, "tenants.0.cache_salts"),
                ({"tenants": [TENANT | {"quota_bytes": 9}]}, "tenants.a.quota_bytes"),
            )
        ],
        ({"root": 5}, "root"),
        ({"root": "/x", "capacity_bytes": "64XB"}, "capacity_bytes"),
        ({"root": "/x", "capacity_bytes": 0}, "capacity_bytes"),
        ({"root": "/x", "capacity_bytes": True}, "capacity_bytes"),
        ({"root": "/x", "segment_bytes": "0.3B"}, "segment_bytes"),
        ({"root": "/x", "chunk_tokens": 100}, "chunk_tokens"),
        ({"root": "/x", "chunk_tokens": -16}, "chunk_tokens"),
        ({"root": "/x", "chunk_tokens": 4096, "codec": "k4v4"}, "chunk_tokens"),
        ({"root": "/x", "codec": "zip"}, "codec"),
        ({"root": "/x", "model_tag": ""}, "model_tag"),
        ({"root": "/x", "epoch": -1}, "epoch"),
        ({"root": "/x", "save_generated": "maybe"}, "save_generated"),
        ({"root": "/x", "io": {"threads": 0}}, "io.threads"),
        ({"root": "/x", "io": {"threads": True}}, "io.threads"),
        ({"root": "/x", "io": {"piece_bytes": 5000}}, "io.piece_bytes"),
        ({"root": "/x", "io": {"pin_bytes": 0}}, "io.pin_bytes"),
        ({"root": "/x", "hbm": {"arena_bytes": "9" * 400 + ".5"}}, "hbm.arena_bytes"),
        ({"root": "/x", "io": {"timeout_s": "inf"}}, "io.timeout_s"),
        ({"root": "/x", "io": {"direct": "yes"}}, "io.direct"),
        ({"root": "/x", "index": {"path": "here"}}, "index.path"),
        ({"root": "/x", "index": {"timeout_s": 0}}, "index.timeout_s"),
        ({"root": "/x", "host": {"admit": "sometimes"}}, "host.admit"),
        ({"root": "/x", "queues": {"save_chunks_max": 0}}, "queues.save_chunks_max"),
        ({"root": "/x", "queues": {"load_requests_max": None}}, "queues.load_requests_max"),
        ({"root": "/x", "writer_lease_s": "soon"}, "writer_lease_s"),
        ({"root": "/x", "io": 5}, "io"),
        ({"root": "/x", "io": {3: 5}}, "io"),
        ({"root": "/x", 3: 5}, "3"),
    ],
)
def test_bad_value_names_its_key(overrides: dict[Any, Any], key: str) -> None:
    assert refusal(overrides).key == key


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"io": {"threads": "many"}}, "must be a whole number; "),
        ({"io": {"threads": 1.5}}, "must be a whole number; "),
        ({"io": {"threads": [1]}}, "must be a whole number; "),
        ({"capacity": {"high_watermark": "x"}}, "must be a number; "),
        ({"require_mount": "maybe"}, "must be true or false; "),
        ({"model_tag": ""}, "must have at least 1 character; "),
    ],
)
def test_a_wrong_type_is_said_in_plain_words(overrides: dict[Any, Any], said: str) -> None:
    """The message used to be "must be a valid integer, unable to parse string as an integer"."""
    assert refusal({"root": "/kv", **overrides}).fix.startswith(said)


def test_bad_value_in_the_environment_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_QUEUES__LOAD_THREADS", "many")
    error = refusal({"root": "/x"})
    assert (error.key, error.value) == ("queues.load_threads", "many")
    assert "environment variable KVTIER_QUEUES__LOAD_THREADS" in error.fix and "the default is 2" in error.fix


def test_root_in_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """It suggested /current/folder/~/tier."""
    monkeypatch.setenv("HOME", "/home/someone")
    assert "try /home/someone/tier" in refusal({"root": "~/tier"}).fix


def test_root_has_no_default() -> None:
    error = refusal({})
    assert error.key == "root" and "KVTIER_ROOT" in error.fix


def test_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVTIER_CONFIG", str(tmp_path / "absent.yaml"))
    error = refusal({"root": "/x"})
    assert error.key == "KVTIER_CONFIG" and "No such file" in error.fix


def test_empty_file_is_the_defaults(tmp_path: Path) -> None:
    settings = Settings.load({"root": "/x", "config": yaml_file(tmp_path, "# nothing set\n")})
    assert settings == Settings.load({"root": "/x"})


# --- checks that need more than one value ---


def test_capacity_smaller_than_one_segment_set() -> None:
    settings = Settings.load({"root": "/x", "capacity_bytes": "4GiB"})
    settings.check_capacity(4 << 30)
    with pytest.raises(ConfigError, match="capacity_bytes = .*one segment set takes 8GiB;.* not set, free space"):
        settings.check_capacity(8 << 30)


def test_chunk_that_is_not_whole_blocks() -> None:
    settings = Settings.load({"root": "/x", "chunk_tokens": 48})
    settings.check_block(16)
    with pytest.raises(ConfigError, match="chunk_tokens = 48: .*block of 32 tokens; set it to 64"):
        settings.check_block(32)


@pytest.mark.parametrize("key", ["staging_bytes", "arena_bytes"])
def test_gpu_memory_without_a_gpu(key: str) -> None:
    """It was left unused without a word."""
    settings = Settings.load({"root": "/x", "hbm": {key: "4GiB"}})
    settings.check_device(has_gpu=True)
    with pytest.raises(ConfigError, match=f"hbm.{key} = 4294967296: there is no GPU here"):
        settings.check_device(has_gpu=False)
    Settings.load({"root": "/x", "hbm": {"arena_bytes": 0}}).check_device(has_gpu=False)


SERVICE_LINKS = {
    "KVTIER_SERVICE_HOST": "10.0.0.1",
    "KVTIER_SERVICE_PORT": "80",
    "KVTIER_SERVICE_PORT_HTTP": "80",
    "KVTIER_PORT": "tcp://10.0.0.1:80",
    "KVTIER_PORT_80_TCP": "tcp://10.0.0.1:80",
    "KVTIER_PORT_80_TCP_PROTO": "tcp",
    "KVTIER_PORT_80_TCP_PORT": "80",
    "KVTIER_PORT_80_TCP_ADDR": "10.0.0.1",
}


@pytest.mark.parametrize("service", ["KVTIER", "KVTIER_REDIS", "KVTIER_ADMIN_2"])
def test_variables_of_kubernetes_services_are_not_settings(service: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a service called kvtier-redis stopped start-up."""
    for name, value in SERVICE_LINKS.items():
        monkeypatch.setenv(name.replace("KVTIER", service, 1), value)
    assert Settings.load({"root": "/x"}).root == Path("/x")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("KVTIER_SERVICE__ADMIN_TOKEN", "0123456789abcdef"),
        ("KVTIER_SERVICE__PORT", "9000"),
        ("KVTIER_SERVICE_TOKEN", "x"),
        ("KVTIER_PORT_X", "1"),
        ("KVTIER_REDIS_PORT", "6379"),
        ("KVTIER_SERVICE_HOST", "all"),
    ],
)
def test_what_kubernetes_does_not_set_is_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token for the admin service under such a name was ignored without a word."""
    monkeypatch.setenv(name, value)
    error = refusal({"root": "/x"})
    assert error.key == name and "unknown environment variable" in error.fix


SECRET = "S3CRETs3cretS3CRET"
REDIS = {"kind": "redis", "url": "redis://host:6379/0"}


@pytest.mark.parametrize(
    "overrides",
    [
        {"server": {"admin_tokn": SECRET}},
        {"index": {"passphrase_of_redis": SECRET}},
        {"server": SECRET},
        {"zzz": SECRET},
        {"capacity": {"tenants": [SECRET]}},
        {"capacity": {"tenants": [{"name": "a", "cache_salts": ["a"], "x": SECRET}]}},
        {"index": [SECRET]},
        {7: SECRET},
        # in the wrong place: the query of a URL, a URL without a scheme, instead of the name of their file
        {"index": REDIS | {"url": f"redis://host:6379/0?password={SECRET}"}},
        {"index": REDIS | {"url": f"redis://host:6379/0?db=0&pasword={SECRET}"}},
        {"index": REDIS | {"url": f"unix:///run/redis.sock?password={SECRET}"}},
        {"index": REDIS | {"url": f"redis://host:6379/0#{SECRET}"}},
        {"index": REDIS | {"url": f":{SECRET}@host:6379"}},
        {"index": REDIS | {"url": f"user:{SECRET}@host:6379"}},
        {"index": REDIS | {"password_file": SECRET}},
        {"index": REDIS | {"sentinel_password_file": SECRET}},
        {"index": REDIS | {"url": "rediss://host:6379/0", "tls_key_file": SECRET}},
        {"server": {"admin_token_file": SECRET}},
        {"server": {"read_token_file": SECRET}},
        {"server": {"tls_key": SECRET, "tls_cert": "/x"}},
        {"signing": {"key_file": SECRET}},
        {"capacity": {"tenants": [{"name": "a", "cache_salts": SECRET}]}},
        {"capacity": {"tenants": [{"name": "a", "cache_salts": [[SECRET]]}]}},
        {"capacity": {"tenants": [{"name": n, "cache_salts": [SECRET]} for n in "ab"]}},
    ],
)
def test_secrets_under_unknown_keys_and_in_the_wrong_place_are_not_shown(overrides: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings.load({"root": "/x"} | overrides)
    assert SECRET not in str(caught.value) and "***" in str(caught.value)


def test_the_default_watermarks_pass_for_a_capacity_of_one_set() -> None:
    assert Settings.load({"root": "/x", "capacity_bytes": "1GiB"}).capacity.low_watermark == 0.9


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("7d", 7 * 86_400),
        ("12h", 43_200),
        ("90s", 90),
        ("2w", 14 * 86_400),
        ("15m", 900),
        ("1.5h", 5400),
        ("30", 30),
        (30, 30),
        ("1e3", 1000),
    ],
)
def test_times_have_units_as_on_the_command_line(
    written: object, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings.load({"root": "/x", "capacity": {"ttl_s": written}}).capacity.ttl_s == seconds
    monkeypatch.setenv("KVTIER_CAPACITY__TTL_S", str(written))
    assert Settings.load({"root": "/x"}).capacity.ttl_s == seconds
    if str(written)[-1].isalpha():
        assert duration_argument(str(written)) == seconds


def test_tokens_are_a_number_a_text_of_one_or_auto() -> None:
    for value in (512, "512"):
        assert Settings.load({"root": "/x", "min_load_tokens": value}).min_load_tokens == 512
    assert Settings.load({"root": "/x", "min_load_tokens": "auto"}).min_load_tokens == "auto"
