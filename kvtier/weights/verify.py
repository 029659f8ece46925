"""Verification of a folder of weights: its files, their headers, and their checksums against the manifest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvtier.errors import Corrupt, WeightsUnreadable
from kvtier.model.safetensors import INDEX, checkpoint_files, read_header, read_index
from kvtier.weights import manifest
from kvtier.weights.manifest import MANIFEST
from kvtier.weights.reader import Sums, WeightReader, damage


@dataclass(frozen=True, slots=True)
class WeightFinding:
    """A fault of a file. offset: first byte of the bad block; None for the file as a whole. what: text without both."""

    file: str
    offset: int | None
    what: str


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a model, and those of Mistral's own format (`consolidated*`), which vLLM prefers.

    Raises WeightsUnreadable where the folder or a file of the index is missing, or there is none; Corrupt for a
    malformed index.
    """
    if not folder.is_dir():
        raise WeightsUnreadable(
            folder, None, "there is no such folder; name the one with the model's safetensors files"
        )
    try:
        index = read_index(folder)
        files = checkpoint_files(folder, index)
        if any(path.parent != folder for path in files):
            raise Corrupt("it names a file in another folder")
    except Corrupt as error:
        raise Corrupt(f"{folder / INDEX} is no index of safetensors files: {error}; get it again") from None
    files = sorted({*files, *folder.glob("consolidated*.safetensors")})
    for path in files:
        if not path.is_file():
            what = "is a link to nothing" if path.is_symlink() else "is no file" if path.exists() else "is missing"
            reason = f"{INDEX} names this file, and it {what}" if index else f"it {what}"
            raise WeightsUnreadable(path, None, f"{reason}; get it again")
    if not files:
        raise WeightsUnreadable(folder, None, "no safetensors file is in this folder")
    return files


def verify(folder: Path, progress: Callable[[int], object] | None = None) -> tuple[list[WeightFinding], int]:
    """Compare a folder with its manifest. Return the findings and the bytes read. progress: of bytes read so far.

    Raises WeightsUnreadable without a manifest, Corrupt for a damaged one, OSError.
    """
    files = weight_files(folder)
    expected = manifest.read(folder)
    if expected is None:
        reason = f"there is none; `kvtier weights verify {folder} --write` makes it"
        raise WeightsUnreadable(folder / MANIFEST, None, reason)
    findings, done = [], 0
    with WeightReader(progress=lambda landed: progress(done + landed) if progress else None) as reader:
        for path in sorted({*expected, *files}):
            found, n_bytes = _verify_file(path, expected.get(path), reader)
            findings += found
            done += n_bytes
    return findings, done


def _verify_file(path: Path, expected: Sums | None, reader: WeightReader) -> tuple[list[WeightFinding], int]:
    if expected is None:
        return [WeightFinding(path.name, None, "the manifest does not list this file")], 0
    findings = []
    try:
        read_header(path)
    except Corrupt as error:
        findings.append(WeightFinding(path.name, 0, f"it {str(error).removeprefix(f'{path} ')}"))
    except OSError as error:
        return [WeightFinding(path.name, None, f"it cannot be opened: {error.strerror}")], 0
    try:
        sums = reader.sums([path])[path]
    except WeightsUnreadable as error:
        return [*findings, WeightFinding(path.name, error.offset, error.reason)], 0
    n_bytes = path.stat().st_size
    if len(sums) != len(expected):
        what = f"it has {len(sums)} blocks, {len(expected)} in the manifest"
        return [*findings, WeightFinding(path.name, None, what)], n_bytes
    faults = (damage(path, int(block)) for block in np.flatnonzero(sums != expected))
    return [*findings, *(WeightFinding(path.name, fault.offset, fault.reason) for fault in faults)], n_bytes
