"""The transform codec's table, bytes and error, on plain tensors."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from benchmarks.round_trip import round_trip
from kvtier.build import codec_of, make_codec
from kvtier.codecs.transform import curve
from kvtier.codecs.transform.codec import TransformCodec, TransformCoder
from kvtier.codecs.transform.reference import _pack, _unpack
from kvtier.codecs.transform.table import PRESET_BITS, read_table, write_table
from kvtier.codecs.vectors import VectorPages
from kvtier.config.settings import Settings
from kvtier.errors import ConfigError
from kvtier.format.geometry import Extent
from kvtier.kernels.paged import Move, PagedKV, PagedLayer, Patch
from tests.codecs.transform_rig import MODEL, WEIGHTS, kv, make_table
from tests.support.rig import geometry, namespace

CPU = torch.device("cpu")
TOKENS = 256
LAYERS, HEADS = 2, 3
SHAPE = geometry(layers=LAYERS, kv_heads=HEADS, k_head_size=64, v_head_size=64)


@pytest.fixture(scope="module")
def table_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_table(tmp_path_factory.mktemp("tables") / "table", LAYERS, HEADS, 64)


def coder_of(path: Path, preset: str = "tc4", held: Extent | None = None) -> TransformCoder:
    return TransformCoder(read_table(path, preset), held or Extent(0, LAYERS, 0, HEADS), TOKENS, CPU)


def error(x: torch.Tensor, back: torch.Tensor) -> float:
    """Return the error as a share of what differs between tokens."""
    signal = (x - x.mean(1, keepdim=True)).square().sum()
    return float((x - back).square().sum() / signal)


# --- bytes ---


@pytest.mark.parametrize("size", (64, 80, 96, 128, 256))
@pytest.mark.parametrize("preset", PRESET_BITS)
def test_a_round_trip_of_each_head_size(tmp_path: Path, preset: str, size: int) -> None:
    path = make_table(tmp_path / "table", 2, 2, size)
    coder = coder_of(path, preset, Extent(0, 2, 0, 2))
    k, v = (x[:, :, :TOKENS].bfloat16() for x in kv(2, 2, size, 512))
    for layer in (0, 1):
        cells = Extent(layer, 1, 0, 2)
        encoded = coder.encode(k[layer], v[layer], cells, 512)
        assert not encoded.refused.any() and encoded.data.shape == (2, coder.n_bytes(range(layer, layer + 1)))
        back = coder.decode(encoded.data, cells, torch.bfloat16)
        for x, found in zip((k[layer], v[layer]), back, strict=True):
            assert torch.equal(x[:, 0], found[:, 0]), "the first token is stored as it is"
            assert error(x.float(), found.float()) < {"tc4": 5e-4, "tc3": 2e-3}[preset]


@pytest.mark.parametrize(("preset", "size", "factor"), [("tc4", 64, 3.8), ("tc3", 64, 5.0), ("tc4", 128, 3.85)])
def test_the_factor(preset: str, size: int, factor: float) -> None:
    shape = replace(SHAPE, k_head_size=size, v_head_size=size, chunk_tokens=TOKENS)
    assert 2 * TOKENS * 2 * size * LAYERS / TransformCodec(preset, None).layers_bytes(shape, range(LAYERS)) > factor


def test_the_position_matters_and_comes_back_with_the_bytes(table_path: Path) -> None:
    coder, cells = coder_of(table_path), Extent(0, 1, 0, HEADS)
    k, v = (x[0, :, :TOKENS] for x in kv(LAYERS, HEADS, 64, 1024))
    right, wrong = (coder.encode(k, v, cells, position).data for position in (1024, 0))
    errors = [error(k, coder.decode(data, cells, torch.float32)[0]) for data in (right, wrong)]
    assert errors[0] < 5e-4 and 3 * errors[0] < errors[1] < 1, "any position only costs accuracy"


def test_heads_and_layers_are_coded_alone(table_path: Path) -> None:
    """A rank's bytes do not depend on the heads and layers that it has."""
    k, v = (x[:, :, :TOKENS] for x in kv(LAYERS, HEADS, 64))
    whole = coder_of(table_path).encode(k[1], v[1], Extent(1, 1, 0, HEADS)).data
    part = coder_of(table_path, held=Extent(1, 1, 1, 2))
    cells = Extent(1, 1, 2, 1)
    alone = part.encode(k[1, 2:], v[1, 2:], cells).data
    assert torch.equal(whole[2:], alone)
    assert torch.equal(part.decode(alone, cells, torch.float32)[0], coder_of(table_path).decode(
        whole, Extent(1, 1, 0, HEADS), torch.float32)[0][2:])  # fmt: skip


@pytest.mark.parametrize("preset", ("int8", "k4v4", "tc4"))
def test_prompts_are_coded_alone(table_path: Path, preset: str) -> None:
    k, v = (torch.stack([x, x.flip(-2)], 1) for x in kv(LAYERS, HEADS, 64))
    table = table_path if preset == "tc4" else None
    together = round_trip(k, v, preset, 1e4, TOKENS, table)
    for prompt in (0, 1):
        alone = round_trip(k[:, prompt], v[:, prompt], preset, 1e4, TOKENS, table)
        assert all(torch.equal(x[:, prompt], y) for x, y in zip(together, alone, strict=True))


def test_packing_element_by_element() -> None:
    """Take the packed codes apart by the words of the format alone."""
    bits = torch.tensor([[[8] * 8 + [3, 0, 1, 4, 5, 2, 8, 1] + [0] * 8 + [7, 1, 0, 0, 0, 0, 0, 0] + [5] * 8]])
    draw = np.random.default_rng(0)
    codes = torch.from_numpy(draw.integers(0, 256, (1, 4, 40))) & ((1 << bits) - 1)
    packed = _pack(codes, bits)
    assert packed.shape == (1, 4 * (8 + 3 + 1 + 5)) and torch.equal(_unpack(packed, 4, bits), codes)
    data, place, token = packed[0].numpy().tobytes(), 0, 2
    for group, parts in enumerate(((4, 4), (2, 1), (), (1,), (4, 1))):
        number = b""
        for size in parts:
            number += data[place + token * size :][:size]
            place += 4 * size
        whole = int.from_bytes(number, "little")
        for element in range(8 * group, 8 * group + 8):
            width = int(bits[0, 0, element])
            assert whole & ((1 << width) - 1) == codes[0, token, element]
            whole >>= width
    assert place == len(data)


def test_the_bytes_of_a_known_table(table_path: Path) -> None:
    """Bytes of version 2 stay what they are: tables here are of whole numbers, so no mathematics library matters."""
    found = load_file(table_path)
    for name, tensor in found.items():
        if name.endswith(("mean", "unit", "back")):
            found[name] = torch.ones_like(tensor) * (2.0**-20 if name.endswith("unit") else 1)
        elif name.endswith(("scale", "forward", "inverse")):
            words = torch.arange(tensor.numel()).view(tensor.shape)
            found[name] = torch.full_like(tensor, 8) if "scale" in name else (words * 37 % 255 - 127).to(tensor.dtype)
        elif name.startswith("tc4"):
            found[name] = torch.tensor([8, 7, 6, 5, 3, 2, 1, 0], dtype=torch.uint8).repeat(8).expand(tensor.shape)
    found["frequencies"] *= 0
    path = table_path.parent / "whole"
    write_table(path, found, MODEL, WEIGHTS)
    words = torch.arange(2 * HEADS * TOKENS * 64).view(2, HEADS, TOKENS, 64)
    k, v = (words * 7919 % 2047 - 1023).float() / 64
    data = coder_of(path).encode(k, v, Extent(0, 1, 0, HEADS), 256).data
    assert blake3(data.numpy().tobytes()).hexdigest(16) == "f43a5e6e6a727b0df5c0143120b31b5e"


@pytest.mark.parametrize("spoil", (float("nan"), float("inf"), 1e38))
def test_what_cannot_be_kept_is_refused(table_path: Path, spoil: float) -> None:
    k, v = (x[0, :, :TOKENS].clone() for x in kv(LAYERS, HEADS, 64))
    v[1, 9, 5] = spoil
    assert coder_of(table_path).encode(k, v, Extent(0, 1, 0, HEADS)).refused.tolist() == [False, True, False]


@pytest.mark.parametrize("factor", (0.0, 1e-6, 1e3, 1e5))
def test_other_magnitudes_than_those_of_calibration(table_path: Path, factor: float) -> None:
    """A gain for each token follows them: the error is relative to the token."""
    coder, cells = coder_of(table_path), Extent(1, 1, 0, HEADS)  # a layer without a rotary embedding
    k, v = (x[1, :, :TOKENS] for x in kv(LAYERS, HEADS, 64))
    means = [x.mean(1, keepdim=True) for x in (k, v)]
    parts = [x - mean for x, mean in zip((k, v), means, strict=True)]
    encoded = coder.encode(*(mean + factor * part for mean, part in zip(means, parts, strict=True)), cells)
    assert not encoded.refused.any()
    for mean, part, back in zip(means, parts, coder.decode(encoded.data, cells, torch.float32), strict=True):
        wrong = (mean + factor * part - back)[:, 1:]
        assert wrong.norm() < 0.05 * max(factor, 0.05) * part.norm()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_bytes_decode(table_path: Path, seed: int) -> None:
    """To finite numbers: a slab is verified before, but by a checksum that is no signature."""
    coder, cells = coder_of(table_path), Extent(0, 1, 0, HEADS)
    draw = np.random.default_rng(seed)
    data = torch.from_numpy(draw.integers(0, 256, (HEADS, coder.n_bytes(range(1))), dtype=np.uint8))
    for x in coder.decode(data, cells, torch.float16):
        assert x.shape == (HEADS, TOKENS, 64) and x[:, 1:].isfinite().all()


# --- curve ---


def test_the_curve_is_nearly_the_best_quantizer() -> None:
    best = (1.0, 0.36338, 0.117482, 0.0345478, 0.009501, 0.0025047, 0.00064424, 0.00016365, 4.12e-5)
    values, errors = curve.levels()
    assert all(error < 1.02 * least for error, least in zip(errors, best, strict=True))
    assert all((np.diff(values[(1 << b) - 2 : (2 << b) - 2].astype(float)) > 0).all() for b in range(1, 9))


def test_the_kernels_bound_of_t_makes_the_outermost_codes() -> None:
    """The kernel clamps t to T_MAX instead of the codes, and makes the same codes as the reference."""
    first, last = np.array([curve.T_MAX, 1], dtype=np.float32).view(np.int32)
    t = np.arange(first, last + 1, dtype=np.int32).view(np.float32)
    for bits, (_, *coefficients) in enumerate(curve.CURVES[1:], 1):
        c1, c3, c5 = np.array(coefficients, dtype=np.float32)
        s = t * (c1 + t * t * (c3 + t * t * c5))
        places = (np.stack([-s, s]) + np.float32(1)) * np.float32(2.0 ** (bits - 1))
        codes = np.floor(places).clip(0, 2**bits - 1)
        assert (codes == [[0], [2**bits - 1]]).all()
        assert (np.floor(places[:, 0]) == codes[:, 0]).all(), "at T_MAX without the clip"


# --- tables ---


def spoiled(path: Path, **changes: torch.Tensor | None) -> Path:
    found = load_file(path) | changes
    other = path.parent / "spoiled"
    write_table(other, {name: tensor for name, tensor in found.items() if tensor is not None}, MODEL, WEIGHTS)
    return other


def test_tables_that_do_not_go_together_are_refused(table_path: Path) -> None:
    found = load_file(table_path)
    bits, byte = (found["tc4.k"].clone() for _ in range(2))
    bits[0, 0, 0] -= 1
    byte[0, 0, :8] = 0
    scale = found["k.scale"] * 1.5
    nan = found["v.mean"].clone()
    nan[0, 0, 0] = float("nan")
    for changes, reason in (
        ({"tc4.k": byte}, "not 4 on average"),
        ({"tc4.k": bits}, "not whole bytes"),
        ({"k.scale": scale}, "powers of two"),
        ({"v.scale": found["v.scale"] * 0 + 2.0**-72}, "out of range"),
        (
            {"k.mean": found["k.mean"] * 0 + 2.0**30, "k.scale": scale * 0 + 2.0**98},
            "k.mean is too large",
        ),
        ({"v.mean": found["v.mean"] * 0 + 2.0**100}, "v.mean is too large"),
        ({"v.mean": nan}, "v.mean has numbers that are not finite"),
        ({"k.forward": found["k.forward"][:1]}, "k.forward is"),
        ({"v.inverse": None}, "v.inverse' is missing"),
        ({"levels": found["levels"][:100]}, "levels is"),
    ):
        with pytest.raises(ConfigError, match=reason) as refused:
            read_table(spoiled(table_path, **changes), "tc4")
        assert refused.value.key == "codec_table" and "kvtier calibrate" in refused.value.fix
    save_file(found, table_path.parent / "of_tomorrow", {"format": "another", "model": MODEL, "weights": WEIGHTS})
    with pytest.raises(ConfigError, match="its format is 'another', not "):
        read_table(table_path.parent / "of_tomorrow", "tc4")


@settings(max_examples=40, deadline=None)
@given(place=st.integers(0, 4000), value=st.integers(0, 255), length=st.integers(0, 1 << 20))
def test_damaged_files_are_read_or_refused(table_path: Path, place: int, value: int, length: int) -> None:
    data = bytearray(table_path.read_bytes())
    data[place] = value
    other = table_path.parent / "damaged"
    other.write_bytes(data[: min(length, len(data))] if length % 2 else data)
    try:
        read_table(other, "tc4")
    except ConfigError as fault:
        assert fault.key == "codec_table"


def loaded(path: Path | None, codec: str = "tc4", **changes: object) -> Settings:
    return Settings.load({"root": "/x", "codec": codec, "codec_table": None if path is None else str(path)} | changes)


def test_an_engine_without_a_table_learns_the_command() -> None:
    with pytest.raises(ConfigError, match="kvtier calibrate MODEL --out FILE"):
        loaded(None)


def test_the_hash_of_the_table_is_in_the_codecs_name(table_path: Path) -> None:
    first = make_codec(loaded(table_path)).name
    other = make_codec(loaded(spoiled(table_path, **{"k.mean": load_file(table_path)["k.mean"] + 1}))).name
    assert first != other and first.startswith("tc4+") and len(first) == len("tc4+") + 32
    assert make_codec(loaded(table_path, "tc3")).name == first.replace("tc4", "tc3")


def test_a_table_of_another_model_is_refused(table_path: Path) -> None:
    codec = make_codec(loaded(table_path))
    codec.check(SHAPE)
    for changes in ({"layers": 3}, {"kv_heads": 4}, {"k_head_size": 128, "v_head_size": 128}):
        with pytest.raises(ConfigError, match=f"of {MODEL}, 2 layers of 3 KV heads.*this model has"):
            codec.check(replace(SHAPE, **changes))
    with pytest.raises(ConfigError, match=f"{MODEL} with the weights {WEIGHTS}; this model's are others"):
        codec_of(loaded(table_path), namespace(SHAPE, "others"))
    with pytest.raises(ConfigError, match="restart"):
        codec_of(loaded(table_path), namespace(SHAPE, WEIGHTS))  # its namespace names codec raw
    with pytest.raises(ConfigError, match="restart"):
        codec_of(loaded(table_path, model_tag="others"), namespace(SHAPE, "others"))


def test_sizes_are_known_without_a_table(table_path: Path) -> None:
    with_table = make_codec(loaded(table_path)).layers_bytes(SHAPE, range(2))
    assert TransformCodec("tc4", None).layers_bytes(SHAPE, range(2)) == with_table


def test_k_of_a_cpu_by_element_has_the_same_bytes(table_path: Path) -> None:
    k, v = (x[:, :, :TOKENS].transpose(1, 2).unflatten(1, (-1, 32)) for x in kv(LAYERS, HEADS, 64))
    packed = k.transpose(2, 3).transpose(-1, -2).contiguous()  # (layers, blocks, heads, size, 32)
    held, blocks = Extent(0, LAYERS, 0, HEADS), tuple(range(TOKENS // 32))
    by_element = packed.flatten(-2).unflatten(-1, (32, 64)).transpose(2, 3)
    coder = coder_of(table_path)
    slabs = []
    for planes, is_packed in ((k.contiguous(), False), (by_element, True)):
        layers = tuple(PagedLayer(*pair) for pair in zip(planes, v.clone(), strict=True))
        pages = VectorPages(PagedKV(layers, 32, is_packed), coder, held)
        slabs.append(torch.zeros(HEADS, coder.n_bytes(range(LAYERS)), dtype=torch.uint8))
        move = Move(Patch(0, 0, LAYERS, 0, HEADS), blocks, slabs[-1])
        pages.encode([move]).wait()
    assert torch.equal(*slabs)
    pages.decode([move])
    assert error(k.flatten(0, 1).float(), packed.transpose(-1, -2).transpose(2, 3).flatten(0, 1)) < 5e-4
