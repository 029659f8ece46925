"""Settings: one frozen tree. No other module reads the environment or YAML files.

Precedence, highest first: the connector's extra config, the environment, the YAML file, the defaults below.

    connector config   {"root": "/mnt/kv", "io": {"threads": 16}, "config": "/etc/kvtier.yaml"}
    environment        KVTIER_ROOT=/mnt/kv  KVTIER_IO__THREADS=16  KVTIER_CONFIG=/etc/kvtier.yaml
    YAML file          the one that `config` or KVTIER_CONFIG names; the same keys, see configs/default.yaml

A bad value or an unknown key stops start-up with a ConfigError that names key, value, source and fix (I8).
Byte sizes are whole numbers or texts: "64GiB" and "64Gi" count in 1024s, "64GB" in 1000s.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

from pydantic import BaseModel, BeforeValidator, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvtier.config.capacity import CapacitySettings, smaller_set
from kvtier.config.index import IndexSettings
from kvtier.config.kv_transfer import ROOT_VARIABLE
from kvtier.config.server import ServerSettings
from kvtier.config.signing import SigningSettings
from kvtier.config.sources import CONNECTOR, ENV_PREFIX, SettingsSource, merged, read_yaml
from kvtier.config.types import (
    FROZEN,
    TIMEOUT_S_MIN,
    AbsolutePath,
    Bytes,
    BytesOrZero,
    Count,
    Natural,
    Seconds,
    SecondsOrZero,
    Timeout,
    multiple_of,
)
from kvtier.errors import HIDDEN, ConfigError
from kvtier.format.geometry import PAGE_BYTES
from kvtier.format.record import STRIPES_MAX
from kvtier.runtime.units import exact

CONFIG_VARIABLE = "KVTIER_CONFIG"
# Variables that Kubernetes sets in each container for a Service: "kvtier", "kvtier-redis" and so on.
_SERVICE_LINK = re.compile(
    r"KVTIER(_[A-Z0-9_]+?)??_((?P<host>SERVICE_HOST)|(?P<number>SERVICE_PORT(_[A-Z0-9_]+)?|PORT_\d+_(TCP|UDP|SCTP)_PORT)"
    r"|(?P<addr>PORT_\d+_(TCP|UDP|SCTP)_ADDR)|(?P<proto>PORT_\d+_(TCP|UDP|SCTP)_PROTO)|PORT(_\d+_(TCP|UDP|SCTP))?)"
)
_NO_GROUP = ("model_type", "model_attributes_type")  # complaints of a value that stands for a whole group
# First word of Pydantic's error types for a value of a wrong type, as in "int_parsing" and "int_from_float".
_PLAIN_TYPES = {"int": "a whole number", "float": "a number", "bool": "true or false"}
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")
CHUNK_TOKENS_UNIT = 16  # smallest block of any engine, tokens; a chunk is a whole number of blocks
PIECE_BYTES_MAX = 1 << 30  # longest piece of an I/O operation, bytes
TOUCH_S_MIN = 0.01  # least interval at which recency is written, seconds
SWITCH_S_MIN = 1e-5  # least switch interval, seconds: below, threads that contend do little else than switch
SWITCH_S_MAX = 0.005  # Python's own, seconds
TURBOQUANT_CHUNK_TOKENS_MAX = 2048  # longest chunk whose sums for the mean of K are exact, tokens
SEGMENT_BYTES = 1 << 30  # default of segment_bytes
DEFAULT_SETS = 16  # segment sets that the capacity has room for, where segment_bytes is not set
SEGMENT_BYTES_MIN = 3 * PAGE_BYTES  # segment header, record header and one slab of a page

# Keys of earlier releases -> what to do instead, for the message that refuses them.
REMOVED_KEYS: dict[tuple[str, ...], str] = {
    ("capacity", "policy"): "removed: the least recently used segment sets are evicted first; leave it out",
    ("io", "pin_bytes"): "removed: files in memory are read as those of storage are; leave it out",
    ("codec_boundary_layers",): "removed: leave it out, and set codec to k6v5 for all layers",
    ("codec_accept_key_bias",): "removed with codec fp8: leave it out, and set codec to int8",
}
# Codecs of earlier releases -> what to set instead.
REMOVED_CODECS = {
    "fp8": "removed: where K has biases (Qwen2.5) it lost up to 0.78 nats. Set it to int8, which has as many bytes",
    "k6v4": "removed: set it to k6v5, which loses a third of it",
    **dict.fromkeys(("k5v3", "k4v3", "k3v3", "k4v2"), "removed: set it to k4v4, which loses less, or to k6v5"),
}

Admit = Literal["always", "saved", "second_hit", "never"]
HOST_ARENA_BYTES = {"cpu": 1 << 30, "cuda": 8 << 30}
# By the device of the engine's KV: on a GPU, loads do not pass through the host arena.
HOST_ADMIT: dict[str, Admit] = {"cpu": "always", "cuda": "saved"}


def _tokens_or_auto(value: object) -> object:
    if value != "auto" and not str(value).strip().isdecimal():  # else each type of the union complains
        raise ValueError('must be a number of tokens or "auto"')
    return value


def _files_or_auto(value: object) -> object:
    if str(value).strip() not in ("auto", *map(str, range(1, STRIPES_MAX + 1))):  # as above
        raise ValueError(f'must be a number of files from 1 to {STRIPES_MAX}, or "auto"')
    return value


class HostSettings(BaseModel):
    """The host arena: encoded chunks in memory of one worker, pinned where there is a GPU. None: chosen by the
    device, as HOST_ARENA_BYTES and HOST_ADMIT say."""

    model_config = FROZEN
    arena_bytes: Bytes | None = None
    admit: Admit | None = None

    def arena_bytes_on(self, device: str) -> int:
        """Return the bytes of the host arena of a worker whose KV is on `device`, "cpu" or "cuda"."""
        return self.arena_bytes or HOST_ARENA_BYTES[device]


class HbmSettings(BaseModel):
    """GPU memory outside the engine's own. staging_bytes: slots that chunks pass through; None: three of the engine's
    steps, or two thirds of what the engine leaves if that is less. arena_bytes: further slots, so that encoded chunks
    stay there; 0: none do."""

    model_config = FROZEN
    staging_bytes: Bytes | None = None
    arena_bytes: BytesOrZero = 0
    admit: Admit = "second_hit"


class IoSettings(BaseModel):
    """Reading and writing segments. threads and piece_bytes None: as measured with a GPU, whose reads alone the
    latter cuts, else by the file system.
    fdatasync: whether segments are flushed before their records are published; auto: unless the file system is known to
    be local or coherent between nodes.
    stripes: files of a segment set that each rank writes at the same time; auto: 1 where the file system lets threads
    write one file at the same time (XFS, NFS), else 8."""

    model_config = FROZEN
    engine: Literal["auto", "ring", "kvikio"] = "auto"
    calibrate: bool = True
    threads: Annotated[Count, Field(le=256)] | None = None
    piece_bytes: (
        Annotated[Bytes, Field(le=PIECE_BYTES_MAX), multiple_of(PAGE_BYTES, "direct I/O moves whole pages")] | None
    ) = None
    direct: Literal["auto", "require", "never"] = "auto"
    fdatasync: Literal["auto", "always", "never"] = "auto"
    stripes: Annotated[int | Literal["auto"], BeforeValidator(_files_or_auto)] = "auto"
    timeout_s: Timeout = 30.0


class QueueSettings(BaseModel):
    """Bounds of the queues between the engine and the storage (I4). save_chunks_max None: as many chunks as the memory
    for saves has slots. shared_load_wait_s: longest wait for another request's load of the same chunks; 0: each request
    loads by itself. load_group_s: longest time between groups of requests that begin after their loads, beside requests
    that decode; 0: each begins at once."""

    model_config = FROZEN
    save_chunks_max: Count | None = None
    load_requests_max: Count = 256
    shared_load_wait_s: SecondsOrZero = 5.0
    load_group_s: SecondsOrZero = 0.05
    save_threads: Annotated[Count, Field(le=64)] = 2
    load_threads: Annotated[Count, Field(le=64)] = 2

    def saves_within(self, n_slots: int) -> int:
        """Return how many chunks saves may hold of `n_slots` slots."""
        return n_slots if self.save_chunks_max is None else min(n_slots, self.save_chunks_max)


class Settings(BaseSettings):
    """The whole tree. `load` reads all sources; the constructor takes only what it is given.

    root: folder of the file-system tier, shared by all workers; capacity_bytes: limit of its segments.
    require_mount: refuse a root on the machine's root file system, as when its own file system is not mounted.
    segment_bytes: of one rank's files in a segment set; chunk_tokens: tokens of a chunk, a multiple of the engine's
    block.
    codec_table: file of `kvtier calibrate`, which the codecs tc4 and tc3 need.
    model_tag: identity of the weights where they are not in files; epoch: raise it to abandon all stored KV.
    save_generated: store generated tokens too; min_load_tokens: shorter hits are computed.
    writer_lease_s: time without a renewed lease after which a writer's open segments count as abandoned.
    touch_interval_s: interval at which recency is written; shutdown_drain_s: time that a stop waits for saves.
    switch_interval_s: time after which a thread of the engine's processes asks another one for Python's interpreter
    lock, during lookups and loads; Python's own is 5 ms.
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", validate_default=True, env_prefix=ENV_PREFIX, env_nested_delimiter="__"
    )
    root: AbsolutePath
    require_mount: bool = False
    capacity_bytes: Bytes = 64 << 30
    segment_bytes: Annotated[Bytes, Field(ge=SEGMENT_BYTES_MIN)] = SEGMENT_BYTES
    chunk_tokens: Annotated[Count, multiple_of(CHUNK_TOKENS_UNIT, "it is the smallest block of an engine")] = 256
    codec: Literal["raw", "int8", "k6v5", "k4v4", "tc4", "tc3"] = "raw"
    codec_table: AbsolutePath | None = None
    model_tag: Annotated[str, Field(min_length=1)] | None = None
    epoch: Natural = 0
    save_generated: bool = True
    min_load_tokens: Annotated[Natural | Literal["auto"], BeforeValidator(_tokens_or_auto)] = "auto"
    host: HostSettings = HostSettings()
    hbm: HbmSettings = HbmSettings()
    io: IoSettings = IoSettings()
    index: IndexSettings = IndexSettings()
    queues: QueueSettings = QueueSettings()
    capacity: CapacitySettings = CapacitySettings()
    signing: SigningSettings = SigningSettings()
    server: ServerSettings = ServerSettings()
    writer_lease_s: Annotated[Seconds, Field(ge=TIMEOUT_S_MIN)] = 30.0
    touch_interval_s: Annotated[Seconds, Field(ge=TOUCH_S_MIN)] = 5.0
    shutdown_drain_s: Seconds = 5.0
    switch_interval_s: Annotated[Seconds, Field(ge=SWITCH_S_MIN, le=SWITCH_S_MAX)] = 1e-4

    @field_validator("root")
    @classmethod
    def _root_folder(cls, value: Path) -> Path:
        if os.path.normpath(value).strip("/") == "":
            raise ValueError("must not be /: set a directory for kvtier alone, such as /var/tmp/kvtier")
        return value

    @field_validator("codec", mode="before")
    @classmethod
    def _codec_of_today(cls, value: object) -> object:
        if isinstance(value, str) and value in REMOVED_CODECS:
            raise ValueError(REMOVED_CODECS[value])
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The constructor reads nothing but its arguments: `load` merges the sources, so that it can name them."""
        return (init_settings,)

    @classmethod
    def load(cls, overrides: Mapping[str, Any] | None = None) -> Settings:
        """Reads and checks all sources. `overrides`: the connector's extra config. Raises ConfigError."""
        connector = dict(overrides or {})
        for name in connector:
            if not isinstance(name, str):
                raise ConfigError(str(name), HIDDEN, "keys of the connector config must be texts")
        config = connector.pop("config", None)
        path, namer = (config, "config") if config is not None else (os.environ.get(CONFIG_VARIABLE), CONFIG_VARIABLE)
        sources = [
            SettingsSource(CONNECTOR, connector),
            SettingsSource("environment", _environment(cls)),
            SettingsSource(
                "defaults" if path is None else f"file {path}", {} if path is None else read_yaml(path, namer)
            ),
        ]
        values: dict[str, Any] = {}
        for source in reversed(sources):
            values = merged(values, source.values)
        try:
            settings = cls(**values)
            settings.check_capacity(settings.rank_set_bytes_max)  # of all ranks: by an engine, see build.set_shape
            settings.check_codec()
            settings.check_hbm()
            settings.capacity.check(settings.touch_interval_s)
            settings.index.check()
        except ValidationError as error:
            raise _config_error(cls, error, sources) from None
        except ConfigError as error:
            raise ConfigError(
                error.key, error.value, f"{error.fix}{_origin(tuple(error.key.split('.')), sources)}"
            ) from None
        return settings

    @property
    def rank_set_bytes_max(self) -> int:
        """Return a limit for one rank's files in a segment set, as far as it is known without the model.

        Where segment_bytes is not set, the files of all ranks together keep to it, so that the capacity has room for
        DEFAULT_SETS. Only a single chunk may be larger. `slots_max` computes the real size.
        """
        if "segment_bytes" in self.model_fields_set:
            return self.segment_bytes
        return min(self.segment_bytes, self.capacity_bytes // DEFAULT_SETS)

    def slots_max(self, rank_bytes: Sequence[int]) -> int:
        """Return the slots of a segment set; 0 if no chunk fits.

        rank_bytes: a slot's bytes of each rank, with a page for the header. `build.set_shape` computes them from the
        model, and with the slots the bytes of the set.
        """
        slots = (self.segment_bytes - PAGE_BYTES) // max(rank_bytes)
        if "segment_bytes" in self.model_fields_set:
            return slots
        return max(min(1, slots), min(slots, self.capacity_bytes // DEFAULT_SETS // sum(rank_bytes)))

    def check_codec(self) -> None:
        """Raises ConfigError for settings of the codec that do not go together."""
        if self.codec in ("tc4", "tc3") and self.codec_table is None:
            fix = f"codec {self.codec} needs a table of the model: make it with kvtier calibrate MODEL --out FILE"
            raise ConfigError("codec_table", None, fix)
        if self.codec in ("k6v5", "k4v4") and self.chunk_tokens > TURBOQUANT_CHUNK_TOKENS_MAX:
            fix = f"with codec {self.codec} it may be {TURBOQUANT_CHUNK_TOKENS_MAX} at most"
            raise ConfigError("chunk_tokens", self.chunk_tokens, fix)

    def check_hbm(self) -> None:
        """Raises ConfigError when chunks are to stay in an hbm arena that is not there."""
        if self.hbm.admit in ("always", "saved") and not self.hbm.arena_bytes:
            fix = "no chunk stays in GPU memory while hbm.arena_bytes is 0: set that too, or leave hbm.admit out"
            raise ConfigError("hbm.admit", self.hbm.admit, fix)

    def check_device(self, has_gpu: bool) -> None:
        """Raises ConfigError for settings of GPU memory where the engine's KV is in host memory."""
        for key, n_bytes in (("hbm.arena_bytes", self.hbm.arena_bytes), ("hbm.staging_bytes", self.hbm.staging_bytes)):
            if n_bytes and not has_gpu:
                fix = "there is no GPU here, so it would stay empty: leave it out, and use host.arena_bytes"
                raise ConfigError(key, n_bytes, fix)

    def check_capacity(self, set_bytes: int, slots: int | None = None) -> None:
        """Raises ConfigError when not even one segment set (`set_bytes` on disk over all ranks) fits the capacity.

        slots: of the set, None where the model is not known.
        """
        if self.capacity_bytes < set_bytes:
            fix = (
                f"one segment set takes {exact(set_bytes)}; raise capacity_bytes to at least that (better, several "
                f"times that; where it is not set, free space on the root's disk) or lower {smaller_set(slots)}"
            )
            raise ConfigError("capacity_bytes", self.capacity_bytes, fix)
        self.capacity.check_sets(set_bytes, self.capacity_bytes, slots)

    def check_block(self, block_tokens: int) -> None:
        """Raises ConfigError unless a chunk is a whole number of the engine's blocks."""
        if self.chunk_tokens % block_tokens:
            nearest = -(-self.chunk_tokens // block_tokens) * block_tokens
            fix = f"must be a multiple of the engine's block of {block_tokens} tokens; set it to {nearest}"
            raise ConfigError("chunk_tokens", self.chunk_tokens, fix)


def has_root_variable() -> bool:
    """Return True if KVTIER_ROOT is set: vLLM's plugin then supplies the connector's configuration."""
    return ROOT_VARIABLE in os.environ


def _environment(settings_cls: type[Settings]) -> Mapping[str, Any]:
    """Return the values that KVTIER_* variables set. Raises ConfigError for a variable without a setting."""
    paths = list(_paths(settings_cls))
    leaves = [path for path in paths if not any(other[:-1] == path for other in paths)]
    values = [*map(_variable, leaves)]  # Pydantic reads these in small letters too
    names = [*values, CONFIG_VARIABLE]
    removed = {_variable(path): fix for path, fix in REMOVED_KEYS.items()}
    for name, value in os.environ.items():
        is_known = name == CONFIG_VARIABLE or name.upper() in values or _is_service_link(name, value)
        if name.upper().startswith(ENV_PREFIX) and not is_known:
            fix = removed.get(name.upper()) or f"unknown environment variable: unset it{_near(name.upper(), names)}"
            raise ConfigError(name, HIDDEN, fix)  # the value is not shown: it may be a secret whose name is misspelt
    try:
        return EnvSettingsSource(settings_cls)()
    except (SettingsError, RecursionError):  # of a list, which stands there as JSON; it names the group only
        lists = {_variable(path) for path in leaves if _is_list(settings_cls, path)}
        name, value = next((name, value) for name, value in os.environ.items() if name.upper() in lists)
        raise ConfigError(name, value, "must be a list in JSON, as a connector config has it") from None


def _variable(path: tuple[str, ...]) -> str:
    return ENV_PREFIX + "__".join(path).upper()


def _is_list(settings_cls: type[Settings], path: tuple[str, ...]) -> bool:
    field = _field(settings_cls, path)
    return field is not None and get_origin(field.annotation) is tuple


def _is_service_link(name: str, value: str) -> bool:
    """Tell whether Kubernetes set the variable, for a Service whose name begins with kvtier."""
    match = _SERVICE_LINK.fullmatch(name)
    if match is None:
        return False
    if match["host"] or match["addr"]:
        return re.fullmatch(r"[0-9a-fA-F:.]*[:.][0-9a-fA-F:.]*", value) is not None  # an IP address
    if match["number"]:
        return value.isdecimal()
    return value in ("tcp", "udp", "sctp") if match["proto"] else _SERVICE_URL.match(value) is not None


def _paths(model: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Yield every key of the tree, groups too, as ("io", "threads")."""
    for name, field in model.model_fields.items():
        yield (name,)
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from ((name, *below) for below in _paths(field.annotation))


def _near(name: str, names: Sequence[str]) -> str:
    """Suggest a variable: of a group the first one, which says what kind it is."""
    below = [other for other in names if other.startswith(name + "_")]
    found = below or difflib.get_close_matches(name, sorted(names), n=1)
    return f", or did you mean {found[0]!r}?" if found else ""


def _config_error(settings_cls: type[Settings], error: ValidationError, sources: list[SettingsSource]) -> ConfigError:
    """Turn Pydantic's complaints into one readable message."""
    # Missing keys come last, because other mistakes may cause them.
    complaints = sorted(error.errors(), key=lambda complaint: complaint["type"] == "missing")
    first, *others = [_one_error(settings_cls, complaint, sources) for complaint in complaints]
    if not others:
        return first
    listed = "; ".join(f"{other.key} = {other.value!r}: {other.fix}" for other in others)
    also = "1 more setting is wrong" if len(others) == 1 else f"{len(others)} more settings are wrong"
    return ConfigError(first.key, first.value, f"{first.fix}; {also}: {listed}")


def _one_error(settings_cls: type[Settings], complaint: ErrorDetails, sources: list[SettingsSource]) -> ConfigError:
    whole = tuple(str(part) for part in complaint["loc"])
    known = set(_paths(settings_cls))
    path = next((whole[:n] for n in range(len(whole), 0, -1) if whole[:n] in known), whole)
    if path in known and len(whole) > len(path) and _is_list(settings_cls, path):
        return _entry_error(whole, complaint, _origin(path, sources))
    if complaint["type"] == "extra_forbidden":
        path = whole
        source = next((source for source in sources if source.holds(path)), sources[0])
        if source.name == CONNECTOR:  # names the settings file, and is a key of this source only
            known.add(("config",))
        fix = REMOVED_KEYS.get(path) or "unknown key" + _suggestion(path, known, source)
        return ConfigError(".".join(path), HIDDEN, f"{fix} (from {source.name})")
    elif complaint["type"] == "missing":
        return ConfigError(
            ".".join(path),
            None,
            f"not set, and it has no default: set {ENV_PREFIX}{path[-1].upper()}, or "
            f"{path[-1]} in the YAML file or the connector config, to an absolute path",
        )
    elif complaint["type"] in _NO_GROUP:
        fix = f"must be a mapping with keys {', '.join(sorted(p[-1] for p in known if p[:-1] == path))}"
        return ConfigError(".".join(path), HIDDEN, fix + _origin(path, sources))
    elif complaint["type"] == "path_type":
        fix = "must be an absolute path"
    else:
        fix = _reason(complaint) + _default(settings_cls, path)
    return ConfigError(".".join(path), complaint["input"], fix + _origin(path, sources))


def _entry_error(whole: tuple[str, ...], complaint: ErrorDetails, origin: str) -> ConfigError:
    """Return the error for an entry of a list, such as ("capacity", "tenants", "0", "name"): it has no default."""
    is_missing = complaint["type"] == "missing"
    known = {
        "missing": "not set, and it has no default",
        "extra_forbidden": "unknown key",
        "tuple_type": "must be a list",
    }
    fix = known.get(complaint["type"]) or _reason(complaint)
    if complaint["type"] in ("extra_forbidden", *_NO_GROUP):
        return ConfigError(".".join(whole), HIDDEN, fix + origin)
    return ConfigError(".".join(whole), None if is_missing else complaint["input"], fix + origin)


def _reason(complaint: ErrorDetails) -> str:
    if plain := _PLAIN_TYPES.get(complaint["type"].partition("_")[0]):
        return f"must be {plain}"
    said = complaint["msg"].removeprefix("Value error, ")
    return said.replace("Input should", "must").replace("String should", "must")


def _origin(path: tuple[str, ...], sources: list[SettingsSource]) -> str:
    return next((f" (from {source.describe(path)})" for source in sources if source.holds(path)), " (the default)")


def _suggestion(path: tuple[str, ...], known: set[tuple[str, ...]], source: SettingsSource) -> str:
    beside = {other[-1] for other in known if other[:-1] == path[:-1]}
    dotted = tuple(path[-1].split("."))
    near = [other for other in sorted(known) if dotted in (other, other[-1:])] or [
        (*path[:-1], name) for name in difflib.get_close_matches(path[-1], sorted(beside), n=1)
    ]
    if near:
        return f"; did you mean {'.'.join(near[0])!r}{source.written(near[0])}?"
    return f"; known here: {', '.join(sorted(beside))}"


def _field(settings_cls: type[Settings], path: tuple[str, ...]) -> FieldInfo | None:
    model: type[BaseModel] = settings_cls
    for name in path[:-1]:
        below = model.model_fields[name].annotation
        assert isinstance(below, type) and issubclass(below, BaseModel)
        model = below
    return model.model_fields.get(path[-1])


def _default(settings_cls: type[Settings], path: tuple[str, ...]) -> str:
    field = _field(settings_cls, path)
    if field is None or field.is_required() or isinstance(field.default, BaseModel):
        return ""
    value = field.default
    if value is None:
        return "; it may be left out"
    if isinstance(value, bool):
        return f"; the default is {str(value).lower()}"
    is_size = path[-1].endswith("_bytes") and isinstance(value, int)
    return f"; the default is {exact(value) if is_size else repr(value)}"
