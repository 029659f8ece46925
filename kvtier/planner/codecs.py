"""Bytes of a chunk with each codec, computed by the codecs, the records and the arenas themselves."""

from collections.abc import Sequence
from typing import NamedTuple, get_args

from kvtier.build import make_codec, set_shape
from kvtier.codecs.base import slab_bytes
from kvtier.codecs.transform.codec import TransformCodec
from kvtier.codecs.transform.table import PRESET_BITS
from kvtier.config.settings import HbmSettings, Settings
from kvtier.errors import ConfigError
from kvtier.format.geometry import Geometry, RankShare
from kvtier.format.record import record_bytes
from kvtier.planner.capacity import ChunkBytes, EngineSizes, read_by
from kvtier.worker.arenas import HBM_SPARE_BYTES, hbm_slots
from kvtier.worker.context import arena_slot_bytes

CODECS: tuple[str, ...] = get_args(Settings.model_fields["codec"].annotation)  # by the names of the settings


def chunks_of_codecs(geometry: Geometry, shares: Sequence[RankShare]) -> tuple[dict[str, ChunkBytes], dict[str, str]]:
    """Return by codec the bytes of a chunk, and the reasons of codecs with which an engine would not start. Raises
    ConfigError if none works."""
    sizes, refused = {}, {}
    for name in CODECS:
        try:
            sizes[name] = _chunk_of(name, geometry, shares)
        except ConfigError as fault:
            if name == "raw":  # it takes any KV: the fault is with the rest
                raise
            refused[name] = fault.fix if fault.key == "codec" else f"{fault.key}: {fault.fix}"
    return sizes, refused


def _chunk_of(name: str, geometry: Geometry, shares: Sequence[RankShare]) -> ChunkBytes:
    settings = Settings.model_validate({"root": "/not-used", "codec": name, "chunk_tokens": geometry.chunk_tokens})
    codec = TransformCodec(name, None) if name in PRESET_BITS else make_codec(settings)
    codec.check(geometry)
    set_shape(settings, geometry, codec, shares)  # refuses what does not fit into records or segments
    writers = [(share.rank, share.writes) for share in shares if share.writes]
    slabs = {rank: slab_bytes(codec, geometry, extent) for rank, extent in writers}
    reads = [read_by(share, shares, slabs) for share in shares]
    return ChunkBytes(
        tokens=geometry.chunk_tokens,
        encoded=codec.layers_bytes(geometry, range(geometry.layers)) * geometry.kv_heads,
        file=sum(record_bytes(extent, slabs[rank]) for rank, extent in writers),
        slot=max(arena_slot_bytes(geometry, codec, share) for share in shares),
        read=max(reads),
        read_in_all=sum(reads),
    )


class Staging(NamedTuple):
    """Memory of each GPU beside the engine's share that start-up takes, and that it leaves free. fault: the reason why
    start-up would stop."""

    n_bytes: int
    spare_bytes: int
    fault: str | None


def staging_of(chunk: ChunkBytes, staging_bytes: int | None, step_tokens: int, engine: EngineSizes) -> Staging:
    """Compute the staging of a codec. staging_bytes: the setting hbm.staging_bytes; step_tokens: most tokens of a step
    of the engine."""
    hbm = HbmSettings(staging_bytes=staging_bytes)
    n_bytes = staging_bytes or 0
    try:
        slots = hbm_slots(hbm, chunk.slot, -(-step_tokens // chunk.tokens)).within(hbm, engine.outside_bytes)
        n_bytes = slots.n_bytes
        slots.check_fits(hbm, engine.outside_bytes, engine.gpu_bytes)
    except ConfigError as fault:
        return Staging(n_bytes, HBM_SPARE_BYTES, f"{fault.key}: {fault.fix}")
    return Staging(n_bytes, HBM_SPARE_BYTES, None)
