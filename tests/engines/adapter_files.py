"""Files of a LoRA adapter, as far as its fingerprint looks at them, and vLLM's request for one."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from safetensors.numpy import save_file


def write(folder: Path, value: float) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8}))
    save_file({"w": np.full(16, value, np.float32)}, folder / "adapter_model.safetensors")
    return folder


def lora(path: Path, number: int = 1, name: str = "a", load_inplace: bool = False) -> SimpleNamespace:
    return SimpleNamespace(lora_int_id=number, lora_name=name, lora_path=str(path), load_inplace=load_inplace)
