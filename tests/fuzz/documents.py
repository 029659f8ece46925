"""The documents that kvtier reads: JSON files of a root, of a model and of caches, and notes in the index."""

import json
import struct
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from kvtier.admin.prompts import NoTokenizer, _text
from kvtier.cli.app import NotDone
from kvtier.cli.prompts import _tokens
from kvtier.connectors.vllm.lora import Adapters
from kvtier.connectors.vllm.requests import view_of
from kvtier.errors import ConfigError
from kvtier.eviction import limits, pins
from kvtier.eviction.evictor import Evictor
from kvtier.eviction.limits import Need
from kvtier.eviction.set_removal import PREFIX, Removal
from kvtier.index.lmdb.index import LmdbIndex
from kvtier.io.calibration import Calibration, _read
from kvtier.io.engines import EngineChoice
from kvtier.maintenance.sweeper import SWEPT_NOTE, Sweeper
from kvtier.model.config_json import read_model
from kvtier.model.weights_fingerprint import MAGIC, _known, config_fingerprint, weights_fingerprint
from kvtier.planner.model_weights import INDEX, read_weights
from kvtier.scheduler.engine_report import WorkerReport
from kvtier.storage.cache_folder import CacheFolder
from kvtier.storage.root import NAMESPACE_FILE, read_namespace
from kvtier.storage.root_owner import read_owner
from tests.fuzz.formats import INFO
from tests.support.rig import geometry, namespace

SPACE = namespace(geometry())
MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "gptq", "bits": 4},
}
MOE = MODEL | {
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [1],
    "decoder_sparse_step": 1,
}
LATENT = MODEL | {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
    "q_lora_rank": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
}
CALIBRATION = Calibration(EngineChoice("ring", 4, 65536), 1e9, None, 1e-4, 0.5, ("because",))
KEY = {"host": "here", "threads": None}
TENSORS = {
    "__metadata__": {"format": "pt"},
    "model.layers.0.w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]},
    "model.layers.1.w": {"dtype": "F32", "shape": [4], "data_offsets": [16, 32]},
}


def _put(folder: Path, name: str, data: bytes) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_bytes(data)
    return path


def namespace_file(data: bytes, folder: Path) -> None:
    """Under the right name: from there on it may be wrong inside only."""
    place = folder / SPACE.id.hex()
    _put(place, NAMESPACE_FILE, data or b" ")  # an empty one is waited for
    assert read_namespace(place) == SPACE


def owner_file(data: bytes, folder: Path) -> None:
    _put(folder, "owner.json", data or b" ")
    owner = read_owner(folder)
    assert owner is not None
    if owner.index_path is not None:
        owner.index_path.exists()  # a path that the system takes


def calibration_file(data: bytes, folder: Path) -> None:
    found = _read(_put(folder, "calibration.json", data or b" "), KEY, 1000.0)
    if found is not None:
        found.describe()
        assert all(type(size) is int and size > 0 for size in found.choice[1:])
        assert Calibration.from_json(json.loads(json.dumps(found.to_json()))) == found


def fingerprint_cache(data: bytes, folder: Path) -> None:
    cache = CacheFolder(folder, "fingerprint", MAGIC)
    _put(folder, "abc.fingerprint", data)
    assert _known(cache, "abc") is None
    cache.put("abc", data)  # whole, as the user's own processes may write anything
    found = _known(cache, "abc")
    assert found is None or len(found) == 64


def safetensors_header(data: bytes, folder: Path) -> None:
    """Of a model's weights, as an engine reads it at its start, and as `kvtier plan` does."""
    (folder / "config.json").write_text(json.dumps(MODEL))
    for content in (data, struct.pack("<Q", len(data)) + data + bytes(32)):
        _put(folder, "model.safetensors", content)
        try:
            read_weights(folder, read_model(folder))
        except ConfigError:
            continue
        finally:
            try:
                weights_fingerprint(folder, None)
            except ConfigError as fault:
                assert fault.key == "model_tag"


def safetensors_index(data: bytes, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(MODEL))
    _put(folder, INDEX, data)
    read_weights(folder, read_model(folder))


def model_config(data: bytes, folder: Path) -> None:
    _put(folder, "config.json", data)
    try:
        model = read_model(folder)
    finally:
        try:
            config_fingerprint(folder)
        except ConfigError as fault:
            assert fault.key == "model_tag"
    read_weights(folder, model)


def tokenizer_file(data: bytes, folder: Path) -> None:
    try:
        _text(_put(folder, "tokenizer.json", data))
    except NoTokenizer:
        return


def token_list(data: bytes, _: Path) -> None:
    try:
        found = _tokens(data.decode("utf-8", "replace"), "input")
    except NotDone:
        return
    assert all(0 <= token < 1 << 32 for token in found)


def worker_report(data: bytes, _: Path) -> None:
    report = WorkerReport.read(data)
    assert WorkerReport.read(report.note()).owner == report.owner
    report.load.quantile_s(0.5)


@cache
def _index(folder: Path) -> LmdbIndex:
    return LmdbIndex(str(folder / "index"), map_bytes=16 << 20)


def notes(data: bytes, folder: Path) -> None:
    """As all notes that kvtier reads, in one index: room is made and the root is swept beside them all the same, and
    pins and quotas beside them count."""
    mine = pins.Pin("mine", bytes(16), (bytes(16),), "", 1.0, None)
    assert mine in pins.read_pins({"pin/other": data, mine.name: mine.pack()}, 5.0)
    rows = {limits.tenant_note("other"): data, limits.tenant_note("mine"): limits.quota_value(5)}
    assert limits.Quotas().with_notes(rows).of_tenant("mine") == 5
    index = _index(folder)
    name = data[:40].decode("utf-8", "replace")
    for place in (
        "pin/a",
        limits.tenant_note("t"),
        limits.namespace_note(bytes(16)),
        SWEPT_NOTE,
        f"{PREFIX}{7:016x}",
        f"pin/{name}",
        f"quota/namespace/{name}",
    ):
        index.put_note(place, data, None)
    index.put_note(f"{PREFIX}{name}", Removal(7, bytes(16), 5, "").pack(), None)
    index.create_set(INFO)
    index.close_set(INFO.set_id, INFO.n_bytes)
    evictor = Evictor(index, folder, "me", clock=lambda: 10.0)
    evictor.fits(Need(1, bytes(16), "t"), 1 << 40)
    pins.read_pins(index.notes("pin/", 1.0), 5.0)
    Sweeper(index, folder, "me", lambda: 20.0).sweep()
    evictor.make_room(Need(1 << 40, bytes(16), "t"), 1 << 40)
    for place in index.notes("", 30.0):
        index.drop_note(place)


def transfer_params(data: bytes, _: Path) -> None:
    """What a client sends along with a request, as JSON. It never lets a request save or load that said otherwise."""
    try:
        switches = json.loads(data)
    except (ValueError, RecursionError):
        return
    asked = SimpleNamespace(
        request_id="r",
        all_token_ids=[1] * 64,
        prompt_token_ids=[1] * 64,
        num_prompt_tokens=64,
        prompt_embeds=None,
        kv_transfer_params=switches,
        lora_request=None,
        cache_salt=None,
        mm_features=[],
        skip_reading_prefix_cache=False,
        resumable=False,
    )
    view = view_of(asked, 16, Adapters())
    if isinstance(switches, dict):
        assert view.may_load is not True or switches.get("kvtier_load", True) is True
        assert view.may_save is not True or switches.get("kvtier_save", True) is True
    else:
        assert not switches or not (view.may_load or view.may_save)


def _json(*values: object) -> list[bytes]:
    return [json.dumps(value).encode() for value in values]


SEEDS = {
    "namespace_file": [SPACE.canonical_json().encode()],
    "owner_file": _json(
        {"node": {"host": "here", "machine": "5d1c"}, "index_path": "index"},
        {"root_id": "9f2c"},
        {"node": {"host": "here", "machine": "5d1c"}, "index_path": "/var/tmp/index"},
        {"node": {"host": "here", "machine": "5d1c"}, "index_path": None},
    ),
    "calibration_file": _json({"key": KEY, "made_s": 999.0, "calibration": CALIBRATION.to_json()}),
    "fingerprint_cache": [b"abc" + b"ab" * 32],
    "safetensors_header": _json(TENSORS),
    "safetensors_index": _json({"metadata": {"total_size": 64}, "weight_map": {"model.layers.0.w": "a.safetensors"}}),
    "model_config": _json(MODEL, MOE, LATENT, {"model_type": "llava", "text_config": MODEL}),
    "tokenizer_file": _json({"version": "1.0", "model": {}}),
    "token_list": [b"[1, 2, 3]", b"1 2 3"],
    "worker_report": [
        WorkerReport(
            owner="o",
            host="h",
            pid=1,
            kvtier_version="1",
            engine="vllm",
            engine_version="0",
            model="m",
            namespace="ab" * 16,
            ranks=1,
            started_s=1.0,
            at_s=2.0,
            interval_s=1.0,
            counters={"lookup_tokens": 5.0},
        ).note()
    ],
    "notes": [
        *_json(
            {"namespace": "ab" * 16, "keys": ["cd" * 16], "label": "l", "created_s": 1.0, "expires_s": None},
            {"bytes": 5},
        ),
        Removal(7, bytes(16), 5, "ü").pack(),
        struct.pack("<d", 5.0),
        struct.pack("<QQQB", 7, 1, 1, 1),
        b"-1",
        b"f" * 17,
        b"0x7",
        b"1" * 40,
    ],
    "transfer_params": _json({"kvtier_load": False, "kvtier_save": True}, {"other": 1}, None, {}),
}
