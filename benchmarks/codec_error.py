"""How far is decoded KV from what was saved? The codecs on Gaussian and on hard data, next to vLLM's own layout.

    python -m benchmarks.codec_error --out codec_error.json [--device cuda]

NMSE: energy of the error over the energy of the input; where a mean was added, also over the energy about the mean of
the chunk, which is what attention sees of K. Data is drawn from a fixed seed, (layers, heads, tokens, size) in bf16,
two chunks of 256 tokens; x is N(0, 1) but for:

    offset    2 on every element            walsh   2 times row 37 of the Hadamard matrix, without signs
    channel   element 17 times 20           sink    token 0 times 100

vLLM's layout (turboquant_4bit_nc, 3bit_nc), from its description and in floats: K is rotated by the Hadamard matrix
without signs, quantized by Lloyd and Max after division by its length, and decoded to the length it had; V is quantized
uniformly between the minimum and the maximum of each vector, unrotated.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import report
from kvtier.codecs.round_trip import round_trip
from kvtier.codecs.turboquant.codec import TurboquantCoder
from kvtier.codecs.turboquant.layout import PRESETS, SlabFormat
from kvtier.codecs.turboquant.rotation import HEAD_SIZES, hadamard
from kvtier.geometry import Extent

LAYERS, HEADS, CHUNK, CHUNKS = 2, 4, 256, 2
CODECS = ("fp8", *PRESETS)
DATA = ("gaussian", "offset", "walsh", "channel", "sink")
THEORY = {2: 0.11748, 3: 0.034548, 4: 0.009501, 5: 0.0025047, 6: 0.00064424}
"""Error of the exact quantizers of N(0, 1), without a scale, a mean or whole centroids."""
LLOYD_MAX = {
    3: ((0.500549734, 1.04995728, 1.74792755), (0.24509, 0.75601, 1.34391, 2.15195)),
    4: (
        (0.258221656, 0.522403717, 0.799549758, 1.09928584, 1.4371388, 1.84353185, 2.40080333),
        (0.12840, 0.38805, 0.65676, 0.94234, 1.25623, 1.61805, 2.06902, 2.73259),
    ),
}
"""Thresholds and centroids of the exact quantizers, of positive values."""
GAUSSIAN_LIMIT, HARD_LIMIT = 1.02, 1.3
"""What must hold, as parts of THEORY: 2, 3 and 4 bits at d = 128."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    sizes = {size: {codec: error(codec, *draw("gaussian", size, device)) for codec in CODECS} for size in HEAD_SIZES}
    hard = {kind: {codec: error(codec, *draw(kind, 128, device)) for codec in CODECS} for kind in DATA}
    vllm = {kind: {f"vLLM {bits} bits": vllm_error(bits, kind, device) for bits in (4, 3)} for kind in DATA}
    drift = {kind: generations(kind, device) for kind in ("gaussian", "offset")}
    faults = list(missed(hard))
    content = {"gaussian_by_size": sizes, "data": hard, "vllm": vllm, "generations": drift, "missed": faults}
    report.write(arguments.out, "how far is decoded KV from what was saved", content)
    show(sizes, hard, vllm, drift)
    print("all limits hold" if not faults else "MISSED: " + "; ".join(faults))


def draw(kind: str, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, (LAYERS, HEADS, CHUNKS * CHUNK, size) bf16."""
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(2, LAYERS, HEADS, CHUNKS * CHUNK, size, generator=generator)
    if kind == "offset":
        x += 2
    elif kind == "walsh":
        x += 2 * torch.from_numpy(hadamard(size)[37]).float()
    elif kind == "channel":
        x[..., 17] *= 20
    elif kind == "sink":
        x[..., 0, :] *= 100
    k, v = x.bfloat16().to(device)
    return k, v


def error(codec: str, k: torch.Tensor, v: torch.Tensor) -> dict[str, float]:
    back_k, back_v = round_trip(k, v, codec, chunk_tokens=CHUNK)
    return {"k": nmse(k, back_k), "k_centred": nmse(k, back_k, centred(k)), "v": nmse(v, back_v)}


def nmse(x: torch.Tensor, back: torch.Tensor, about: torch.Tensor | None = None) -> float:
    """about: what the error is measured against instead of x."""
    x = x.double()
    energy = (x if about is None else about).square().sum()
    return float((x - back.double()).square().sum() / energy)


def centred(x: torch.Tensor) -> torch.Tensor:
    """x less the mean of each chunk, fp64."""
    chunks = x.double().view(LAYERS, HEADS, CHUNKS, CHUNK, -1)
    return (chunks - chunks.mean(-2, keepdim=True)).view(x.shape)


def vllm_error(bits: int, kind: str, device: torch.device) -> dict[str, float]:
    k, v = draw(kind, 128, device)
    back_k = vllm_keys(k.float(), bits)
    return {"k": nmse(k, back_k), "k_centred": nmse(k, back_k, centred(k)), "v": nmse(v, vllm_values(v.float(), bits))}


def vllm_keys(k: torch.Tensor, bits: int) -> torch.Tensor:
    """k: (..., d) fp32."""
    size = k.shape[-1]
    rotation = torch.from_numpy(hadamard(size)).to(k) / math.sqrt(size)
    thresholds, centroids = LLOYD_MAX[bits]
    length = k.norm(dim=-1, keepdim=True)
    rotated = (k @ rotation.T) / length * math.sqrt(size)
    magnitude = torch.bucketize(rotated.abs(), torch.tensor(thresholds).to(k))
    codes = torch.tensor(centroids).to(k)[magnitude] * torch.where(rotated < 0, -1.0, 1.0)
    return ((codes / codes.norm(dim=-1, keepdim=True) * length) @ rotation).bfloat16()


def vllm_values(v: torch.Tensor, bits: int) -> torch.Tensor:
    """v: (..., d) fp32."""
    low, high = v.amin(-1, keepdim=True), v.amax(-1, keepdim=True)
    step = ((high - low) / ((1 << bits) - 1)).half().float()
    return (((v - low) / step).round().clamp(0, (1 << bits) - 1) * step + low.half().float()).bfloat16()


def generations(kind: str, device: torch.device) -> dict[str, Any]:
    """K saved, loaded and saved again, five times over, k4v4: NMSE to the first, and how many codes ever changed."""
    k, _ = draw(kind, 128, device)
    now, errors = k, []
    slab_format = SlabFormat(LAYERS, CHUNK, 128, 128, PRESETS["k4v4"])
    coder = TurboquantCoder(slab_format, Extent(0, LAYERS, 0, HEADS), device)
    cells, codes = Extent(0, 1, 0, HEADS), []
    for _ in range(5):
        codes.append(coder.encode(now[0, :, :CHUNK], now[0, :, :CHUNK], cells).data[:, : slab_format.layer(0).v_codes])
        now, _ = round_trip(now, now, "k4v4", chunk_tokens=CHUNK)
        errors.append(nmse(k, now))
    changed = sum(
        int(((a ^ b) & mask != 0).sum()) for a, b in zip(codes, codes[1:], strict=False) for mask in (15, 240)
    )
    return {"nmse": errors, "codes_changed": changed, "codes": 4 * 2 * codes[0].numel()}


def missed(hard: dict[str, dict[str, dict[str, float]]]) -> list[str]:
    """Limits that do not hold."""
    faults = []
    for kind, codecs in hard.items():
        limit = GAUSSIAN_LIMIT if kind == "gaussian" else HARD_LIMIT
        for codec, found in codecs.items():
            for plane, bits in zip("kv", PRESETS.get(codec, ()), strict=False):
                if bits <= 4 and found[plane] > limit * THEORY[bits]:
                    faults.append(f"{kind} {codec} {plane}: {found[plane]:.5f} > {limit} * {THEORY[bits]:.5f}")
    return faults


def show(sizes: Any, hard: Any, vllm: Any, drift: Any) -> None:
    print("\nNMSE on Gaussian data (K, V) by head size; theory:", {bits: f"{x:.5f}" for bits, x in THEORY.items()})
    rows = [
        [codec, *(f"{found[codec]['k']:.5f} {found[codec]['v']:.5f}" for found in sizes.values())] for codec in CODECS
    ]
    report.table(["codec", *(f"d={size}" for size in sizes)], rows)
    print("\nd = 128: K, (K about its mean), V")
    together = {kind: hard[kind] | vllm[kind] for kind in hard}
    rows = [[codec, *(_cell(together[kind][codec]) for kind in DATA)] for codec in together["gaussian"]]
    report.table(["codec", *DATA], rows)
    print("\nk4v4, K over five generations of saving and loading")
    for kind, found in drift.items():
        errors = " ".join(f"{x:.6f}" for x in found["nmse"])
        print(f"{kind:>10}: {errors}; {found['codes_changed']} of {found['codes']} codes changed")


def _cell(found: dict[str, float]) -> str:
    return f"{found['k']:.5f} ({found['k_centred']:.5f}) {found['v']:.5f}"


if __name__ == "__main__":
    main()
