"""What vLLM 0.32's own OffloadingConnector, its scheduler's half, offers a request when kvtier is behind its CPU tier.

Its workers' half runs on GPUs only. Here a step is what its manager is called with at the end of one.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.request import Request

from kvtier.connectors.vllm_tiering import identity
from tests.objects.rig import content, flip_byte_of
from tests.vllm_tiering.rig import ROW_BYTES, ROWS, UNTAGGED, Offloader, expected, tier_config, write_model
from tests.waiting import wait_until

BLOCK_TOKENS, CHUNK_TOKENS = 16, 32
PROMPT = list(range(6 * CHUNK_TOKENS + 8))
LAYERS = [f"model.layers.{number}.self_attn.attn" for number in range(3)]
_numbers = itertools.count()


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(identity, "FINGERPRINTS", tmp_path / "fingerprints")
    init_none_hash(sha256)
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model", 1.0)
    return tmp_path / "model"


class Half:
    """The connector of one engine's scheduler."""

    def __init__(self, connector: OffloadingConnector) -> None:
        self.connector = connector
        self.offloader = Offloader(connector.scheduler.manager)

    def begin(self) -> Request:
        request = Request(
            f"prompt {next(_numbers)}",
            PROMPT,
            SamplingParams(max_tokens=1),
            pooling_params=None,
            block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
        )
        self.connector.on_new_request(request)
        return request

    def offered(self, request: Request) -> int:
        """Tokens that vLLM would load for it instead of computing them."""
        offers: list[int | None] = []

        def is_known() -> bool:
            offers.append(self.connector.get_num_new_matched_tokens(request, 0)[0])
            self.offloader.step()
            return offers[-1] is not None

        wait_until(is_known, "an offer")
        return offers[-1] or 0

    def chunks(self, request: Request) -> list[OffloadKey]:
        return list(self.connector.scheduler._req_status[request.request_id].group_states[0].offload_keys)


@contextmanager
def half(model: Path, root: Path) -> Iterator[Half]:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": ROWS * ROW_BYTES,
        "block_size": CHUNK_TOKENS,
        "secondary_tiers": [tier_config(root, UNTAGGED)],
    }
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra)
    engine = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        max_model_len=512,
        block_size=BLOCK_TOKENS,
        kv_transfer_config=transfer,
    ).create_engine_config()
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=2, head_size=32, dtype=torch.bfloat16)
    page, blocks = spec.page_size_bytes, 32
    tensor = KVCacheTensor(len(LAYERS) * page * blocks, LAYERS, layer_stride=page * blocks, block_stride=page)
    cache = KVCacheConfig(blocks, [tensor], [KVCacheGroupSpec(LAYERS, spec)])
    connector = OffloadingConnector(engine, KVConnectorRole.SCHEDULER, cache)
    try:
        yield Half(connector)
    finally:
        connector.shutdown()


def test_a_prompt_is_offered_after_a_restart_up_to_what_is_damaged(model: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with half(model, root) as first:
        request = first.begin()
        assert first.offered(request) == 0
        chunks = first.chunks(request)
        assert len(chunks) == 6
        first.offloader.store(chunks)
    with half(model, root) as second:
        assert second.offered(second.begin()) == 6 * CHUNK_TOKENS
        assert second.offloader.load(chunks) == expected(chunks)
    flip_byte_of(root, content(chunks[3], ROW_BYTES))
    with half(model, root) as third:
        request = third.begin()
        assert third.offered(request) == third.offered(request) == 3 * CHUNK_TOKENS
        assert third.offloader.load(chunks[:3]) == expected(chunks[:3])


def test_other_weights_under_the_same_path_are_offered_nothing(model: Path, tmp_path: Path) -> None:
    with half(model, tmp_path / "root") as before:
        request = before.begin()
        before.offered(request)
        before.offloader.store(before.chunks(request))
    write_model(model, 2.0)
    with half(model, tmp_path / "root") as after:
        assert after.offered(after.begin()) == 0
