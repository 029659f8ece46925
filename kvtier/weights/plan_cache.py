"""Plan files: a recorded plan as bytes, and the folder in which plans are kept for the next start.

The body of a file (`storage.cache_folder`) is the size of a JSON text (u32), the text with all but the copies, and the
copies as rows of 8 numbers (i64, in the order of Copy's fields). Numbers are little endian.
"""

import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from kvtier.errors import Corrupt
from kvtier.format.namespace import canonical_text
from kvtier.storage.cache_folder import FOLDER, CacheFolder
from kvtier.weights.copies import FIELDS
from kvtier.weights.copies import pack as pack_copies
from kvtier.weights.plan import Conversion, Elements, Fill, Parameter, WeightPlan

MAGIC = b"KVTWPLN4"  # its number grows when plans of an earlier kvtier must not be used any more
NONE = pack_copies([])
PLANS = FOLDER / "plans"


def plan_key(facts: object) -> str:
    """Return the name of a plan: a hash of everything that decides what a load copies. facts: as JSON."""
    return blake3(canonical_text(facts).encode()).hexdigest()


def pack(plan: WeightPlan, key: str) -> bytes:
    """Return the body of a plan file."""
    rest = asdict(replace(plan, copies=NONE, files=())) | {"key": key, "files": len(plan.files)}
    del rest["copies"]
    text = json.dumps(rest).encode()
    return struct.pack("<I", len(text)) + text + plan.copies.astype("<i8").tobytes()


def unpack(body: bytes, key: str, files: Sequence[Path]) -> WeightPlan:
    """Return the plan of a body for these checkpoint files. Raises Corrupt."""
    try:
        return _plan(body, key, files)
    except (KeyError, TypeError, ValueError, struct.error) as error:
        raise Corrupt(f"it is no plan of this kvtier ({error!r})") from None


def _plan(body: bytes, key: str, files: Sequence[Path]) -> WeightPlan:
    (text_bytes,) = struct.unpack_from("<I", body)
    rest = json.loads(body[4 : 4 + text_bytes])
    if rest["key"] != key or rest["files"] != len(files):
        raise Corrupt("it is the plan of another load")
    rows = np.frombuffer(body, dtype="<i8", offset=4 + text_bytes).reshape(-1, len(FIELDS))
    return WeightPlan(
        files=tuple(files),
        targets=tuple(
            Parameter(t["name"], tuple(t["shape"]), tuple(t["strides"]), t["dtype"]) for t in rest["targets"]
        ),
        copies=rows.astype(np.int64),
        conversions=tuple(Conversion(_view(c["source"]), _view(c["target"])) for c in rest["conversions"]),
        fills=tuple(Fill(_view(fill["target"]), fill["value"]) for fill in rest["fills"]),
    )


class PlanCache:
    """Folder of plan files, one for each key. Failures cost a new recording and nothing else."""

    def __init__(self, folder: Path) -> None:
        self._files = CacheFolder(folder, "plan", MAGIC)

    def get(self, key: str, files: Sequence[Path]) -> WeightPlan | None:
        """Return a plan that this user stored; None if there is none, or a damaged one, which is removed."""
        body = self._files.get(key)
        try:
            return None if body is None else unpack(body, key, files)
        except Corrupt as error:
            self._files.remove(key, error)
            return None

    def put(self, key: str, plan: WeightPlan) -> None:
        self._files.put(key, pack(plan, key))


def _view(value: dict[str, Any]) -> Elements:
    return Elements(value["number"], value["offset"], tuple(value["shape"]), tuple(value["strides"]), value["dtype"])
