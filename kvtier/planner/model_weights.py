"""Size of a model's weights: from the headers of its safetensors files, else from their index, else from the parameter
count that config.json implies. Reads headers only.
"""

import re
from pathlib import Path
from typing import NamedTuple

from kvtier.errors import ConfigError, Corrupt
from kvtier.model.config_json import ELEMENT_BYTES, KEY, ModelConfig
from kvtier.model.safetensors import INDEX, checkpoint_files, read_header, read_index
from kvtier.planner.model_parameters import end_parameters, total_parameters
from kvtier.runtime.units import counted

_LAYER = re.compile(r"\.layers\.(\d+)\.")


class Weights(NamedTuple):
    """Size of all weights. source: the origin of the figure, as text."""

    n_bytes: int
    source: str


def read_weights(folder: Path, model: ModelConfig) -> Weights:
    """Return the size of the weights. Raises ConfigError for damaged files, and for missing ones that are needed."""
    try:
        index = read_index(folder)
    except Corrupt as error:
        raise ConfigError(KEY, str(folder / INDEX), f"{error}; get it again") from None
    files = checkpoint_files(folder, index)
    if files and all(path.is_file() for path in files):
        n_bytes = sum(_tensor_bytes(path, model.layers) for path in files)
        return Weights(n_bytes, f"by the headers of {counted(len(files), 'safetensors file')}")
    total = index.get("metadata", {}).get("total_size")
    if isinstance(total, int) and total > 0:
        return Weights(total, f"by {INDEX}: the files themselves are not all there")
    ends = end_parameters(model)
    bits = _bits(folder, model)
    n_bytes = ends * ELEMENT_BYTES[model.dtype] + (total_parameters(model) - ends) * bits // 8
    how = f"{bits} bits a parameter of its layers, scales not counted" if model.quantized else f"all {model.dtype}"
    return Weights(n_bytes, f"by the parameters that config.json implies, {how}: no safetensors files are there")


def _tensor_bytes(path: Path, layers: int) -> int:
    """Sum the tensors that an engine loads: those of layers past the last are for drafts (DeepSeek's MTP)."""
    try:
        tensors = read_header(path, is_whole=False).tensors  # the header is enough to plan with
    except (Corrupt, OSError) as error:
        raise ConfigError(KEY, str(path), f"it is no safetensors file ({error}); get it again") from None
    total = 0
    for name, tensor in tensors.items():
        layer = _LAYER.search(name)
        if layer is None or int(layer[1]) < layers:
            total += tensor.n_bytes
    return total


def _bits(folder: Path, model: ModelConfig) -> int:
    """Return the bits of a layer's parameter as it is stored."""
    quantized = model.quantized
    if not quantized:
        return 8 * ELEMENT_BYTES[model.dtype]
    method = str(quantized.get("quant_method", ""))
    bits = {"fp8": 8, "fbgemm_fp8": 8, "gptq": quantized.get("bits"), "awq": quantized.get("bits")}.get(method)
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        fix = f"how large weights of quantization {method!r} are is not known here: put {INDEX} there, or the weights"
        raise ConfigError(KEY, str(folder), fix)
    return bits
