"""Table of the transform codec: the result of calibrating one model, kept as one safetensors file.

L layers, H KV heads, of each plane (k, v) d elements a head. Components are what a transform makes of a vector.

    tensor             shape          type   content
    <plane>.mean       (L, H, d)      fp32   mean of K without its rotary embedding, or of V
    <plane>.scale      (L, H, d)      fp32   power of two that makes whole numbers of an element's difference to it
    <plane>.forward    (L, H, d, d)   int16  whole numbers -> components, (element, component)
    <plane>.unit       (L, H, d)      fp32   of components, which have a variance of about 1 then
    <plane>.inverse    (L, H, d, d)   fp16   components -> elements, (component, element)
    <plane>.back       (L, H, d)      fp32   unit of the elements that `inverse` makes
    <preset>.<plane>   (L, H, d)      uint8  bits of each component; of each preset
    levels             (512,)         fp16   what codes stand for: code c of b bits is at 2^b - 2 + c
    frequencies        (L, dk / 2)    fp64   angles by which the rotary embedding turns pairs (j, j + dk / 2) of K at
                                             each position, radians; 0 where K stays as it is

Metadata: `format`, `model` (name), `weights` (kvtier.model.weights_fingerprint). The bits of 8 neighbours, a group, are
whole bytes. Those of K and V together are as many in all heads of a layer, so that slabs have one size; over all layers
they are the preset's on average.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from blake3 import blake3

from kvtier.errors import ConfigError, Corrupt
from kvtier.format.geometry import Extent, Geometry
from kvtier.model.safetensors import header_size, parse_header
from kvtier.storage.atomic_files import replace_small

KEY = "codec_table"
FORMAT = "kvtier transform table 1"
PRESET_BITS = {"tc4": 4, "tc3": 3}  # bits of a component on average, by preset
GROUP = 8  # components whose codes are whole bytes together
BITS_MAX = 8
LEVELS = 512
FORWARD_MAX = 127 * 256  # largest magnitude in `forward`: both of its bytes, taken as signed, fit int8
MEAN_MAX = 2.0**100  # bound of `mean`
# With scales of 2^-70 or more, elements of 2^100 or more are refused (reference.U_MAX). So none is decoded to infinity:
# the kernels do not clamp what they decode.
SCALE_LEAST = 2.0**-70
HEAD_SIZES = (64, 80, 96, 128, 256)
HASH_BYTES = 16


class PlaneTable(NamedTuple):
    """Tensors of K or of V, as in the file. bits: of the preset in use."""

    mean: torch.Tensor
    scale: torch.Tensor
    forward: torch.Tensor
    unit: torch.Tensor
    inverse: torch.Tensor
    back: torch.Tensor
    bits: torch.Tensor

    def of(self, held: Extent, device: torch.device) -> PlaneTable:
        """Return the part of some layers and heads."""
        layers, heads = slice(held.first_layer, held.end_layer), slice(held.first_head, held.end_head)
        return PlaneTable(*(tensor[layers, heads].contiguous().to(device) for tensor in self))


@dataclass(frozen=True, slots=True)
class TransformTable:
    """A table as one preset uses it. hash: of the file, hex. The other fields as in the file."""

    path: Path
    hash: str
    model: str
    weights: str
    k: PlaneTable
    v: PlaneTable
    levels: torch.Tensor
    frequencies: torch.Tensor

    @property
    def row_bytes(self) -> torch.Tensor:
        """Bytes of a token's codes, K's and V's together, (L, H) int64."""
        return torch.cat([self.k.bits, self.v.bits], -1).sum(-1, dtype=torch.int64) // 8

    def check_geometry(self, geometry: Geometry) -> None:
        """Raises ConfigError for a model of another shape."""
        own = (*self.k.mean.shape, self.v.mean.shape[-1])
        shape = (geometry.layers, geometry.kv_heads, geometry.k_head_size, geometry.v_head_size)
        if own != shape:
            fix = f"it is of {self.model}, {_shape_text(own)}; this model has {_shape_text(shape)}"
            raise ConfigError(KEY, str(self.path), f"{fix}: run kvtier calibrate with this model")

    def check_weights(self, weights: str) -> None:
        """Raises ConfigError for a model of other weights. weights: its fingerprint."""
        if self.weights != weights:
            fix = f"it is of {self.model} with the weights {self.weights}; this model's are {weights}"
            raise ConfigError(KEY, str(self.path), f"{fix}: run kvtier calibrate with this model")


def read_table(path: Path, preset: str) -> TransformTable:
    """Read a table's part for one preset. Raises ConfigError for a file that is not a table."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        data = path.read_bytes()
        size = header_size(data[:8], len(data))
        notes = parse_header(data[8 : 8 + size], len(data)).metadata
        if notes.get("format") != FORMAT:
            raise ValueError(f"its format is {notes.get('format')!r}, not {FORMAT!r}")
        found = load(data)
        names = [[f"{plane}.{name}" for name in PlaneTable._fields[:-1]] + [f"{preset}.{plane}"] for plane in "kv"]
        k, v = (PlaneTable(*(found[name] for name in each)) for each in names)
        found_hash = blake3(data).hexdigest(HASH_BYTES)
        of = notes["model"], notes["weights"]
        table = TransformTable(path, found_hash, *of, k, v, found["levels"], found["frequencies"])
        _check(table, PRESET_BITS[preset])
    except (Corrupt, KeyError, ValueError, OSError, SafetensorError) as error:
        reason = f"tensor {error} is missing" if isinstance(error, KeyError) else str(error)
        fix = f"it is no table of calibration ({reason}); make it with kvtier calibrate MODEL --out {path}"
        raise ConfigError(KEY, str(path), fix) from None
    return table


def write_table(path: Path, tensors: Mapping[str, torch.Tensor], model: str, weights: str) -> None:
    """Write a table. tensors: by their names in the file."""
    from safetensors.torch import save

    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    data = save(whole, metadata={"format": FORMAT, "model": model, "weights": weights})
    replace_small(path, data)  # two calibrations to one path must not mix


def _check(table: TransformTable, bits: int) -> None:
    """Raises ValueError for tensors that do not go together."""
    layers, heads, k_size = table.k.mean.shape
    for name, plane in (("k", table.k), ("v", table.v)):
        size = plane.mean.shape[-1]
        if size not in HEAD_SIZES:
            raise ValueError(f"heads of {size} elements")
        vector, matrix = (layers, heads, size), (layers, heads, size, size)
        shapes = (vector, vector, matrix, vector, matrix, vector, vector)
        dtypes = ("float32", "float32", "int16", "float32", "float16", "float32", "uint8")
        for field, tensor, shape, dtype in zip(PlaneTable._fields, plane, shapes, dtypes, strict=True):
            _check_tensor(f"{name}.{field}", tensor, shape, dtype)
        exponents = torch.frexp(plane.scale)
        if not ((exponents.mantissa == 0.5) & (plane.scale >= SCALE_LEAST) & (exponents.exponent < 100)).all():
            raise ValueError(f"{name}.scale has other numbers than powers of two, or ones out of range")
        # The kernel computes x * scale - mean * scale. Within these bounds that is (x - mean) * scale.
        if not ((plane.mean * plane.scale).isfinite() & (plane.mean.abs() < MEAN_MAX)).all():
            raise ValueError(f"{name}.mean is too large")
        if plane.forward.int().abs().max() > FORWARD_MAX or plane.bits.max() > BITS_MAX:
            raise ValueError(f"{name}.forward or the bits of {name} are out of range")
        if (plane.bits.view(layers, heads, -1, GROUP).sum(-1) % 8).any():
            raise ValueError(f"the bits of a group of {name} are not whole bytes")
    _check_tensor("levels", table.levels, (LEVELS,), "float16")
    _check_tensor("frequencies", table.frequencies, (layers, k_size // 2), "float64")
    total = table.row_bytes
    n_bytes = bits * (k_size + table.v.mean.shape[-1]) // 8 * layers * heads
    if (total != total[:, :1]).any() or total.sum() != n_bytes:
        raise ValueError(f"the bits of a layer's heads are not equal, or not {bits} on average")


def _check_tensor(name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: str) -> None:
    if tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}" or 0 in shape:
        raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, not {shape} of {dtype}")
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise ValueError(f"{name} has numbers that are not finite")


def _shape_text(shape: tuple[int, ...]) -> str:
    return "{} layers of {} KV heads, K of {} and V of {} elements".format(*shape)
