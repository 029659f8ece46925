"""Where the files of a model lie on this machine, by the name that vLLM was given."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvtier.errors import ConfigError


def folder_of(name: str, revision: str | None, load_config: Any, key: str = "model") -> Path:
    """A model's own folder, or its snapshot in the Hugging Face cache.

    key: vLLM's setting that `name` is of. Raises ConfigError where there is neither.
    """
    if os.path.isdir(name):
        return Path(name)
    import vllm.envs
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    if getattr(vllm.envs, "VLLM_USE_MODELSCOPE", False):  # what the Hugging Face cache has under the name may differ
        raise ConfigError(key, name, "its files come from ModelScope; give their folder, or set model_tag")
    try:
        cache = getattr(load_config, "download_dir", None)
        return Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, HfHubHTTPError, OSError):
        fix = "its files lie neither in a folder nor in the Hugging Face cache; set model_tag to a name for its weights"
        raise ConfigError(key, name, fix) from None
