"""Forms of layers: CONTRACT with the installed vLLM's own specs and groups, and what follows for the namespace.

No engine runs here: vLLM has turboquant_* on GPUs only. What its kernels write and read is in test_slots.py, an engine
whose layers are not alike in test_real_engine.py.
"""

import typing
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

import vllm
from vllm.config import cache as cache_config
from vllm.v1 import kv_cache_interface as interface

try:
    from vllm.v1.core.kv_cache_planning import get_kv_cache_groups  # from vLLM 0.33 on
except ImportError:
    from vllm.v1.core.kv_cache_utils import get_kv_cache_groups

from kvtier.config.settings import Settings
from kvtier.connectors.vllm import kv_dtypes, namespace
from kvtier.connectors.vllm.compatibility import check_cache, layer_specs
from kvtier.connectors.vllm.kv_dtypes import (
    SLOTS,
    check_cache_dtype,
    check_specs,
    forms_of,
    kv_dtype_of,
    slot_bytes,
    slot_name,
)
from kvtier.connectors.vllm.kv_layout import CacheShape, in_layer_order
from kvtier.connectors.vllm.namespace import Identity
from kvtier.connectors.vllm.platform import Packing
from kvtier.connectors.vllm.worker import WorkerHalf
from kvtier.errors import ConfigError
from kvtier.format.geometry import LayerForm
from tests.engines.test_identity import engine as plain_engine

LAYERS, HEADS, BLOCK_TOKENS = 8, 4, 64
NAMES = [f"model.layers.{number}.self_attn.attn" for number in range(LAYERS)]
SKIPPED = ["0", "1", "6", "7"]
"""What vLLM itself leaves out of turboquant_*, in any order: its configuration sorts them as texts or as numbers."""


@pytest.fixture(autouse=True)
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "packing_of", lambda spec, config: Packing("vllm", False))


def spec_of(cache_dtype: str, head_size: int = 128) -> Any:
    """A layer's spec as the installed release makes it for a GPU."""
    known = {"block_size": BLOCK_TOKENS, "num_kv_heads": HEADS, "head_size": head_size, "head_size_v": head_size}
    if cache_dtype == "auto":
        return interface.FullAttentionSpec(**known, dtype=torch.bfloat16)
    known |= {"dtype": torch.uint8, "kv_quant_mode": interface.get_kv_quant_mode(cache_dtype)}
    if cache_dtype not in SLOTS:
        return interface.FullAttentionSpec(**known)
    if hasattr(interface, "TQFullAttentionSpec"):  # before 0.32
        return interface.TQFullAttentionSpec(**known, tq_slot_size=slot_bytes(cache_dtype, head_size))
    from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

    return TurboQuantAttentionBackend.customize_spec(interface.FullAttentionSpec(**known))


def engine(cache_dtype: str, skipped: list[str], stages: int = 1, **model: Any) -> SimpleNamespace:
    sizes = {"get_total_num_kv_heads": lambda: HEADS, "get_total_num_hidden_layers": lambda: LAYERS}
    config = plain_engine(Path("m"), stages=stages, cache_dtype=cache_dtype, **sizes | model)
    config.cache_config.kv_cache_dtype_skip_layers = skipped
    config.scheduler_config = SimpleNamespace(disable_hybrid_kv_cache_manager=True)
    config.attention_config = SimpleNamespace(hisparse_config=None)
    return config


def specs_of(cache_dtype: str, skipped: list[str], head_size: int = 128, names: list[str] = NAMES) -> dict[str, Any]:
    plain, main = spec_of("auto", head_size), spec_of(cache_dtype, head_size)
    return {name: plain if name.split(".")[2] in skipped else main for name in names}


def group_of(config: Any, specs: Mapping[str, Any]) -> Any:
    """The only group that vLLM itself makes of these layers, for a connector like ours."""
    groups = get_kv_cache_groups(config, dict(specs))
    assert len(groups) == 1
    return groups[0]


def settings(**changes: Any) -> Settings:
    known = {"root": "/tmp/kvtier-never-made", "model_tag": "weights", "chunk_tokens": 256}
    return Settings.load(known | changes)


def identity_of(config: Any, spec: Any, names: list[str] = NAMES) -> Identity:
    return namespace.identity_of(config, spec, names, settings())


def test_every_kv_dtype_of_this_release_is_moved_or_refused_for_a_reason_of_its_own() -> None:
    offered = typing.get_args(cache_config.CacheDType)
    assert set(SLOTS) < set(offered)
    for name in offered:
        try:
            check_cache_dtype(name)
        except ConfigError as refused:
            assert kv_dtypes.REFUSED[name] in refused.fix
            assert "use auto" in refused.fix


@pytest.mark.parametrize("name", ["fp8", SLOTS[0], "auto"])
def test_a_kv_dtype_that_a_plugin_has_registered_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From vLLM 0.33 on, under a name of vLLM's own too: what its bytes mean is the plugin's affair then."""
    check_cache_dtype(name)
    handlers = {name: object()}
    monkeypatch.setattr(cache_config, "get_kv_cache_dtype_handler", handlers.get, raising=False)
    with pytest.raises(ConfigError, match="a plugin of vLLM defines"):
        check_cache_dtype(name)


def test_a_name_like_that_of_a_known_kv_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="not known to kvtier"):
        check_cache_dtype("fp8_mine")


@pytest.mark.parametrize(
    ("head_size", "expected"), [(64, (100, 70, 62, 54)), (128, (196, 134, 118, 102)), (256, (388, 262, 230, 198))]
)
def test_bytes_of_slots(head_size: int, expected: tuple[int, ...]) -> None:
    assert tuple(slot_bytes(preset, head_size) for preset in SLOTS) == expected
    for preset, n_bytes in zip(SLOTS, expected, strict=True):
        assert spec_of(preset, head_size).page_size_bytes == BLOCK_TOKENS * HEADS * n_bytes


@pytest.mark.parametrize("preset", SLOTS)
def test_scheduler_and_worker_know_the_same_forms(preset: str) -> None:
    """A worker is told all layers' specs, the scheduler that of one of them: its first, or any other."""
    config = engine(preset, SKIPPED)
    specs = specs_of(preset, SKIPPED)
    group = group_of(config, specs)
    assert type(group.kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs"
    cache = SimpleNamespace(kv_cache_groups=[group])
    on_worker = identity_of(config, check_cache(cache, settings()), in_layer_order(group.layer_names))
    geometry = on_worker.namespace.geometry
    assert geometry.plain_layers == (0, 1, 6, 7)
    assert geometry.plain == LayerForm(128, 128, "bfloat16", 2)
    assert geometry.form == LayerForm(slot_bytes(preset, 128), 0, preset, 1)
    for spec in (spec_of("auto"), spec_of(preset)):
        cache.kv_cache_groups[0].kv_cache_spec = spec
        assert identity_of(config, check_cache(cache, settings())).namespace == on_worker.namespace
    forms = {name: geometry.form_of(number) for number, name in enumerate(NAMES)}
    check_specs(config, specs, forms)


def test_layers_are_skipped_by_their_number_in_any_stage_of_a_pipeline() -> None:
    whole = identity_of(engine(SLOTS[1], SKIPPED), spec_of(SLOTS[1])).namespace
    config = engine(SLOTS[1], SKIPPED[::-1], stages=2)
    for names in (NAMES[:4], NAMES[4:]):
        assert identity_of(config, spec_of("auto"), names).namespace == whole


def test_presets_never_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do engines that leave out other layers, or whose K in fp8 is another variant, or whose release is unknown."""
    engines = [(preset, SKIPPED) for preset in SLOTS] + [("fp8", SKIPPED), ("fp8_e5m2", SKIPPED), ("fp8", [])]
    engines += [(SLOTS[1], [*SKIPPED, "2"]), ("auto", [])]
    spaces = [identity_of(engine(*each), spec_of("auto" if each[1] else each[0])).namespace for each in engines]
    monkeypatch.setattr(kv_dtypes, "_fp8_is_e4b15", lambda: True)
    spaces += [identity_of(engine(preset, SKIPPED), spec_of("auto")).namespace for preset in SLOTS[:1]]
    assert spaces[-1].geometry.dtype == "turboquant_k8v4:e4b15"
    monkeypatch.setattr("vllm.__version__", "0.99.0+cu999")
    spaces += [identity_of(engine(preset, SKIPPED), spec_of("auto")).namespace for preset in SLOTS[1:]]
    assert spaces[-1].geometry.dtype == "turboquant_3bit_nc@0.99.0"
    assert len({space.id for space in spaces}) == len(spaces)


def test_releases_whose_slots_are_the_same_share(monkeypatch: pytest.MonkeyPatch) -> None:
    assert vllm.__version__.split("+")[0] in kv_dtypes.SLOT_RELEASES
    names = set()
    for release in ("0.25.1", "0.27.1+cpu", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0"):
        monkeypatch.setattr("vllm.__version__", release)
        names.add(slot_name(SLOTS[1]))
    assert names == {"turboquant_4bit_nc"}


def test_what_is_not_quantized_at_all_is_plain() -> None:
    """vLLM leaves out all layers of a model with up to four; and auto leaves none out."""
    plain = identity_of(engine("auto", []), spec_of("auto")).namespace
    everything = [str(number) for number in range(LAYERS)]
    assert identity_of(engine(SLOTS[1], everything), spec_of("auto")).namespace == plain
    assert identity_of(engine("auto", ["0"]), spec_of("auto")).namespace == plain


@pytest.mark.parametrize("skipped", [[], ["0", "3"]], ids=["all", "but some"])
def test_both_halves_know_that_a_checkpoint_asks_for_fp8(skipped: list[str]) -> None:
    """vLLM's layers write it into the configuration, which the scheduler's process, without layers, still has as it
    was: its namespace would be one that no worker moves KV of. An explicit choice wins."""
    spec, scheme = spec_of("auto" if skipped else "fp8"), SimpleNamespace(kv_cache_scheme={"num_bits": 8})
    scheduler, worker, chosen = engine("auto", skipped), engine("fp8", skipped), engine("bfloat16", skipped)
    for config in (scheduler, worker, chosen):
        config.quant_config = scheme
    assert identity_of(scheduler, spec).namespace == identity_of(worker, spec).namespace
    assert identity_of(worker, spec).namespace.geometry.dtype == "fp8_e4m3"
    assert kv_dtype_of(chosen, spec_of("auto")) == "bfloat16"
    latent = interface.MLAAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
    assert kv_dtype_of(scheduler, latent) == "auto", "MLA's layers do not look at it"


def test_layers_left_out_by_kind_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype_skip_layers = 'sliding_window': name the layers by"):
        forms_of(engine("fp8", ["0", "sliding_window"]), spec_of("fp8"), range(LAYERS))


@pytest.mark.parametrize(
    ("specs", "text"),
    [
        (specs_of(SLOTS[1], ["0", "1", "6"]), "layers.7.self_attn.attn': vLLM keeps 134 bytes"),
        (specs_of(SLOTS[1], [*SKIPPED, "2"]), "layers.2.self_attn.attn': vLLM keeps 512 bytes"),
        (specs_of(SLOTS[2], SKIPPED), "layers.2.self_attn.attn': vLLM keeps 118 bytes"),
        (specs_of(SLOTS[1], SKIPPED, head_size=64), "layers.0.self_attn.attn': vLLM keeps 256 bytes"),
    ],
    ids=["more", "fewer", "another preset", "another head size"],
)
def test_a_worker_whose_layers_are_others_is_refused(specs: dict[str, Any], text: str) -> None:
    config = engine(SLOTS[1], SKIPPED)
    geometry = identity_of(config, spec_of("auto")).namespace.geometry
    with pytest.raises(ConfigError, match=text):
        check_specs(config, specs, {name: geometry.form_of(number) for number, name in enumerate(NAMES)})


def test_layers_of_different_kinds_in_one_group_are_refused() -> None:
    class RSWASpec(SimpleNamespace):
        pass

    each = {NAMES[0]: spec_of("auto"), NAMES[1]: RSWASpec(block_size=16)}
    group = SimpleNamespace(layer_names=NAMES[:2], kv_cache_spec=SimpleNamespace(kv_cache_specs=each))
    assert layer_specs(group) == each
    with pytest.raises(ConfigError, match="kv_cache_spec = 'RSWASpec'"):
        check_cache(SimpleNamespace(kv_cache_groups=[group]), settings())


def test_layers_of_unlike_sizes_are_refused() -> None:
    """As Gemma 4's. Not as a KV dtype that vLLM keeps in another way."""
    each = {NAMES[0]: spec_of("auto"), NAMES[1]: spec_of("auto", 256)}
    group = SimpleNamespace(layer_names=NAMES[:2], kv_cache_spec=SimpleNamespace(kv_cache_specs=each))
    with pytest.raises(ConfigError, match="kv_cache_spec = '4 KV heads of 128, 4 KV heads of 256'.* unlike sizes"):
        check_cache(SimpleNamespace(kv_cache_groups=[group]), settings())


def test_a_lossy_codec_is_refused_by_name() -> None:
    from kvtier.build import make_codec

    geometry = identity_of(engine(SLOTS[1], SKIPPED), spec_of("auto")).namespace.geometry
    make_codec(settings()).check(geometry)
    for codec in ("int8", "k4v4"):
        with pytest.raises(ConfigError, match="turboquant_4bit_nc, which is encoded already: set it to raw") as refused:
            make_codec(settings(codec=codec)).check(geometry)
        assert (refused.value.key, refused.value.value) == ("codec", codec)


def engine_tensors(preset: str, n_blocks: int) -> dict[str, torch.Tensor]:
    """A KV cache of random bytes in the shapes of the installed release, boundary layers included."""
    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, spec in specs_of(preset, SKIPPED).items():
        raw = torch.randint(0, 256, (n_blocks * spec.page_size_bytes,), generator=generator, dtype=torch.uint8)
        if hasattr(interface, "create_kv_cache_views"):  # 0.32, whose only layout for slots is LBNHC
            place = interface.KVCacheTensor(raw.numel(), [name], raw.numel(), spec.page_size_bytes)
            layout = interface.KVCacheLayout.LBNHC
            found[name] = interface.create_kv_cache_views(raw, spec, n_blocks, layout, place, 16)[0]
            continue
        from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
        from vllm.v1.attention.backends.turboquant_attn import TurboQuantAttentionBackend

        ratio = BLOCK_TOKENS // 16
        backend = FlashAttentionBackend if spec.dtype is torch.bfloat16 else TurboQuantAttentionBackend
        kind = "auto" if spec.dtype is torch.bfloat16 else preset
        shape = backend.get_kv_cache_shape(n_blocks * ratio, 16, HEADS, 128, kind)
        found[name] = raw.view(spec.dtype).view(shape)
    return found


@pytest.mark.parametrize("preset", SLOTS)
def test_a_worker_finds_every_byte_of_a_token_and_head(preset: str) -> None:
    """Views of the tensors that vLLM registers, with kernel blocks of 16 tokens in blocks of 64."""
    config, n_blocks = engine(preset, SKIPPED), 6
    specs = specs_of(preset, SKIPPED)
    half = WorkerHalf.__new__(WorkerHalf)
    half._spec = specs[NAMES[0]]
    half._kv_cache_config = SimpleNamespace(num_blocks=n_blocks, kv_cache_groups=[group_of(config, specs)])
    half._vllm_config = config
    identity = identity_of(config, half._spec)
    tensors = engine_tensors(preset, n_blocks)
    pages = half._engine_pages(tensors, NAMES, identity, identity.shares[0])
    assert (pages.ratio, pages.pages.block_tokens) == (4, 16)
    for name, layer in zip(NAMES, pages.pages.layers, strict=True):
        tensor = tensors[name]
        widths = [plane.shape[-1] * plane.element_size() for plane in layer.planes]
        plain = name.split(".")[2] in SKIPPED
        assert widths == ([256, 256] if plain else [slot_bytes(preset, 128)])
        assert sum(plane.numel() * plane.element_size() for plane in layer.planes) == tensor.numel() * tensor.itemsize
        assert all(plane.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr() for plane in layer.planes)


def test_a_slot_of_another_size_is_refused() -> None:
    from kvtier.connectors.vllm.kv_layout import engine_pages

    shape = CacheShape(6, 16, HEADS, 134, 0, is_slots=True, element_bytes=1)
    good = torch.zeros(6, HEADS, 16, 134, dtype=torch.uint8)
    assert engine_pages({NAMES[0]: good}, NAMES[:1], shape).pages.layers[0].k.shape == (6, 16, HEADS, 134)
    tokens_first = torch.zeros(6, 16, HEADS, 134, dtype=torch.uint8)  # 0.25
    assert engine_pages({NAMES[0]: tokens_first}, NAMES[:1], shape).pages.layers[0].k.shape == (6, 16, HEADS, 134)
    bad = [good[..., :-2], good.view(torch.int16), good.flatten(1), torch.zeros(6, 16, 16, 134, dtype=torch.uint8)]
    for tensor in bad:
        with pytest.raises(ConfigError, match="fits no layout"):
            engine_pages({NAMES[0]: tensor}, NAMES[:1], shape)
    alike = CacheShape(6, 16, 16, 134, 0, is_slots=True, element_bytes=1)
    with pytest.raises(ConfigError, match="several layouts"):
        engine_pages({NAMES[0]: torch.zeros(6, 16, 16, 134, dtype=torch.uint8)}, NAMES[:1], alike)


@pytest.mark.parametrize("scale", ["k_scale", "v_scale"])
def test_scales_of_the_checkpoint_are_in_the_key(scale: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 means nothing without its scales, which lie outside of the blocks. One number makes other weights."""
    from safetensors.torch import save_file

    monkeypatch.setattr(namespace, "FINGERPRINTS", tmp_path / "fingerprints")
    known = {
        f"model.layers.{number}.self_attn.{name}": torch.tensor([0.03125 + number])
        for number in range(LAYERS)
        for name in ("k_scale", "v_scale")
    }
    known["model.embed_tokens.weight"] = torch.ones(1 << 16)
    ids = []
    for folder, changed in (("one", {}), ("same", {}), ("other", {f"model.layers.5.self_attn.{scale}": 1.0000001})):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text('{"model_type": "llama"}')
        tensors = known | {name: torch.tensor([value]) for name, value in changed.items()}
        save_file(tensors, tmp_path / folder / "model.safetensors")
        config = engine("fp8", [], model=str(tmp_path / folder))
        unnamed = settings(model_tag=None)
        ids.append(namespace.identity_of(config, spec_of("fp8"), NAMES, unnamed).namespace.id)
    assert ids[0] == ids[1] != ids[2]
