"""PCIe benchmark: rate of copies between pinned host memory and the GPU. `python -m kvtier.kernels.pcie` prints it as
JSON."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import torch

COPY_BYTES = 256 << 20
ROUNDS = 5


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`tensor` (uint8) keeps it alive. address: a multiple of 4096."""

    tensor: torch.Tensor
    address: int
    ordinal: int
    name: str


def device_memory(n_bytes: int) -> DeviceMemory | None:
    """Memory of the current CUDA device; None when torch sees none."""
    if not torch.cuda.is_available():
        return None
    ordinal = torch.cuda.current_device()
    tensor = torch.empty(n_bytes + 4096, dtype=torch.uint8, device=f"cuda:{ordinal}")
    address = -(-tensor.data_ptr() // 4096) * 4096
    return DeviceMemory(tensor, address, ordinal, torch.cuda.get_device_name(ordinal))


def rates(n_bytes: int = COPY_BYTES, rounds: int = ROUNDS) -> tuple[float, float]:
    """(to the device, from it) in bytes a second: the best of some copies of pinned memory."""
    host = torch.empty(n_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(n_bytes, dtype=torch.uint8, device="cuda")
    return _best(device, host, rounds), _best(host, device, rounds)


def _best(target: torch.Tensor, source: torch.Tensor, rounds: int) -> float:
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    taken = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - started_s)
    return target.numel() / min(taken)


if __name__ == "__main__":
    if torch.cuda.is_available():
        to_device, from_device = rates()
        name = torch.cuda.get_device_name()
        print(json.dumps({"name": name, "to_device_bytes_s": to_device, "from_device_bytes_s": from_device}))
    else:
        print(json.dumps(None))
