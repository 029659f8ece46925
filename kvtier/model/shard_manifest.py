"""Manifest of a folder of shards: which weights they are, for which engine, and which files belong to it.

`kvtier weights shard` writes it last, so that a folder with a manifest is whole. Beside it are
model-rank-R-part-P.safetensors with the parameters of each tensor-parallel rank, as vLLM's `sharded_state` names them.
"""

import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from kvtier.errors import ConfigError

NAME = "kvtier-weights.json"
MANIFEST_BYTES_MAX = 1 << 26  # longest manifest that is read, bytes


class ShardManifest(BaseModel):
    """Content of a manifest.

    source_fingerprint: that of the checkpoint. shards_fingerprint: of this folder's files, to notice changes.
    release: vLLM's that made them. files: size of each shard, bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: Literal[1] = 1
    source_fingerprint: str
    shards_fingerprint: str = ""
    release: str
    architecture: str
    tensor_parallel_size: PositiveInt
    dtype: str
    quantization: str | None
    files: dict[str, int] = {}

    def of_rank(self, rank: int) -> list[str]:
        """Return the names of a rank's shards, by part."""
        names = [name for name in self.files if name.startswith(f"model-rank-{rank}-")]
        return sorted(names, key=lambda name: (len(name), name))


def read_shard_manifest(folder: Path, name: str = NAME) -> ShardManifest | None:
    """Return the manifest of a folder, or None if it has none. Raises ConfigError for a damaged one."""
    path = folder / name
    try:
        with path.open("rb") as file:
            return ShardManifest.model_validate_json(file.read(MANIFEST_BYTES_MAX))
    except FileNotFoundError:
        return None
    except (ValidationError, OSError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        fix = f"it is no manifest of shards of this kvtier ({reason}); make the shards again"
        raise ConfigError("model", str(path), fix) from None


def manifest_text(manifest: ShardManifest) -> bytes:
    """Return the content of a manifest's file."""
    return json.dumps(manifest.model_dump(), indent=1).encode() + b"\n"
