"""From vLLM's requests to keys and frontiers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvtier.connectors.vllm import requests
from kvtier.connectors.vllm.lora import Adapters
from kvtier.connectors.vllm.requests import view_of, why_items_are_not_cached
from kvtier.connectors.vllm.save_progress import final_frontier, step_frontier
from kvtier.runtime.repeated_log import RepeatedLog

from .adapter_files import lora, write

CHUNK = 64


def request(**changes: Any) -> SimpleNamespace:
    tokens = list(range(300))
    plain = {
        "request_id": "r",
        "all_token_ids": tokens,
        "prompt_token_ids": tokens[:200],
        "prompt_embeds": None,
        "num_tokens": 300,
        "num_prompt_tokens": 200,
        "num_computed_tokens": 299,
        "kv_transfer_params": None,
        "lora_request": None,
        "cache_salt": None,
        "mm_features": [],
        "skip_reading_prefix_cache": False,
        "resumable": False,
    }
    return SimpleNamespace(**plain | changes)


def view(**changes: Any) -> Any:
    return view_of(request(**changes), CHUNK, Adapters())


def image(identifier: str, offset: int, length: int) -> SimpleNamespace:
    return SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=offset, length=length))


@pytest.mark.parametrize(
    ("changes", "may_load", "may_save"),
    [
        ({}, True, True),
        ({"kv_transfer_params": {"kvtier_load": False}}, False, True),
        *[({"kv_transfer_params": {"kvtier_save": value}}, True, False) for value in (False, "no", "false", 0, None)],
        ({"kv_transfer_params": {"someone_elses": False}}, True, True),
        ({"skip_reading_prefix_cache": True}, False, True),
        ({"prompt_embeds": object()}, False, False),
        ({"prompt_token_ids": None}, False, False),
        ({"resumable": True}, False, False),
        ({"mm_features": [image("", 3, 10)]}, False, False),
    ],
)
def test_what_a_request_allows(changes: dict[str, Any], may_load: bool, may_save: bool) -> None:
    seen = view(**changes)
    assert (seen.may_load, seen.may_save) == (may_load, may_save)
    assert changes or seen.extras == {}


def test_a_salt_is_in_the_first_chunk_only() -> None:
    assert list(view(cache_salt="tenant").extras) == [0]
    assert view(cache_salt="tenant").extras != view(cache_salt="other").extras


def test_multimodal_items_are_in_every_chunk_they_touch() -> None:
    """By identifier and by place within the chunk."""
    extras = view(mm_features=[image("cat", 60, 80)]).extras
    assert sorted(extras) == [0, 1, 2]
    assert extras != view(mm_features=[image("dog", 60, 80)]).extras
    assert extras[0] != view(mm_features=[image("cat", 61, 80)]).extras[0]
    assert len({*extras.values()}) == 3
    assert sorted(view(mm_features=[image("cat", 0, 64)]).extras) == [0]


def test_lora_is_known_by_its_weights_not_its_name(tmp_path: Path) -> None:
    one, same, other = (write(tmp_path / name, value) for name, value in (("1", 1.0), ("2", 1.0), ("3", 2.0)))
    assert view(lora_request=lora(one)).extras == view(lora_request=lora(same, 7, "b")).extras
    assert view(lora_request=lora(one)).extras != view(lora_request=lora(other)).extras
    assert list(view(lora_request=lora(one)).extras) == [0]


def test_adapters_that_cannot_be_told_apart_are_passed_by(tmp_path: Path) -> None:
    for unknown in (lora(tmp_path / "nowhere"), lora(write(tmp_path / "a", 1.0), load_inplace=True)):
        seen = view(lora_request=unknown)
        assert (seen.may_load, seen.may_save) == (False, False)


@pytest.mark.parametrize(
    ("computed", "scheduled", "known", "generated", "expected"),
    [
        (0, 128, 300, True, 128),  # a part of a prefill
        (256, 44, 300, True, 300),  # its end
        (299, 1, 300, True, 300),  # decoding: the last token's KV is made in this step
        (299, 4, 300, True, 300),  # with three drafts behind it, not yet verified
        (303, 1, 300, True, 300),  # asynchronous: placeholders are counted as computed
        (299, 1, 300, False, 200),  # generated tokens are not wanted
    ],
)
def test_frontier_of_a_step(computed: int, scheduled: int, known: int, generated: bool, expected: int) -> None:
    assert step_frontier(request(num_tokens=known), computed, scheduled, generated) == expected


@pytest.mark.parametrize(
    ("computed", "known", "generated", "expected"),
    [
        (299, 300, True, 299),  # stopped
        (303, 300, True, 299),  # stopped with drafts or an asynchronous step in flight
        (200, 200, True, 200),  # a prompt alone (pooling)
        (200, 201, True, 200),  # one token generated
        (128, 200, True, 128),  # aborted in its prefill
        (0, 250, True, 0),  # ended while preempted
        (299, 300, False, 200),
    ],
)
def test_frontier_at_the_end(computed: int, known: int, generated: bool, expected: int) -> None:
    assert final_frontier(request(num_tokens=known, num_computed_tokens=computed), generated) == expected


def test_a_misspelt_switch_opts_out_of_everything(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "_repeated", RepeatedLog())  # other tests of this process may have logged the kind
    view = view_of(request(kv_transfer_params={"kvtier_saev": False}), 64, Adapters())
    assert (view.may_load, view.may_save) == (False, False)
    assert caplog.text.count("kvtier_saev") == 1


@pytest.mark.parametrize(
    ("multimodal", "prefix_caching", "expected"),
    [(4, True, True), (4, False, True), (0, True, True), (0, False, False), (None, False, True)],
)
def test_items_without_a_hash_are_passed_by(multimodal: float | None, prefix_caching: bool, expected: bool) -> None:
    """Text goes on beside them."""
    items = None if multimodal is None else SimpleNamespace(mm_processor_cache_gb=multimodal)
    model = SimpleNamespace(multimodal_config=items)
    cache = SimpleNamespace(enable_prefix_caching=prefix_caching)
    caches_items = not why_items_are_not_cached(SimpleNamespace(model_config=model, cache_config=cache))
    assert caches_items is expected
    shown = view_of(request(mm_features=[image("renderer0-mm-1-image-0", 3, 10)]), CHUNK, Adapters(), caches_items)
    assert (shown.may_load, shown.may_save) == (expected, expected)
    text = view_of(request(), CHUNK, Adapters(), caches_items)
    assert (text.may_load, text.may_save) == (True, True)


@pytest.mark.parametrize(("prefix_caching", "cache_gb"), [(True, 4), (False, 4), (True, 0), (False, 0)])
def test_vllm_hashes_items_where_we_say_so(prefix_caching: bool, cache_gb: float) -> None:
    """vLLM's own naming of the first image of a process: two images, two processes, and is the name the same?"""
    base = pytest.importorskip("vllm.renderers.base").BaseRenderer
    if not hasattr(base, "_process_mm_uuids"):
        pytest.skip("this release names them elsewhere")
    from PIL import Image
    from vllm.multimodal.parse import MultiModalDataParser, parse_mm_uuids
    from vllm.multimodal.processing.inputs import ProcessorInputs

    model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=cache_gb))
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching))

    def name_of(color: str) -> str:
        renderer = SimpleNamespace(model_config=model, config=config)
        renderer._validate_mm_uuids = base._validate_mm_uuids.__get__(renderer)
        data = {"image": Image.new("RGB", (8, 8), color)}
        items = MultiModalDataParser().parse_mm_data(data)
        named = base._process_mm_uuids(renderer, data, items, parse_mm_uuids(None), "renderer0-mm-1")
        inputs = ProcessorInputs([1], items, named, hf_processor_mm_kwargs={})
        return str(inputs.get_mm_hashes("model", "blake3")["image"][0])

    assert (name_of("red") != name_of("blue")) is not bool(why_items_are_not_cached(config))


@pytest.mark.parametrize("is_prefix_lm", [True, False])
def test_images_whose_tokens_see_each_other_are_passed_by(is_prefix_lm: bool) -> None:
    """A hit that ends in one has vLLM split it; the next test shows that."""
    model = SimpleNamespace(multimodal_config=SimpleNamespace(mm_processor_cache_gb=4), is_mm_prefix_lm=is_prefix_lm)
    config = SimpleNamespace(model_config=model, cache_config=SimpleNamespace(enable_prefix_caching=True))
    assert ("attend to their later tokens" in why_items_are_not_cached(config)) is is_prefix_lm
    assert not why_items_are_not_cached(SimpleNamespace(model_config=SimpleNamespace(is_mm_prefix_lm=True)))


def test_vllm_keeps_an_image_whole_only_from_before_it() -> None:
    """The scheduler of the installed release: an image of 256 tokens from 100 on, and 40 tokens left in the step."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.v1.core.sched.scheduler import Scheduler

    place = PlaceholderRange(offset=100, length=256)
    feature = MultiModalFeatureSpec(data=None, modality="image", identifier="i", mm_position=place, mm_hash="i")
    cache = SimpleNamespace(
        get_cached_num_encoder_embeds=lambda *_: None,
        check_and_update_cache=lambda *_: False,
        can_allocate=lambda *_: True,
        allocate=lambda *_: None,
    )
    scheduler = SimpleNamespace(
        is_encoder_decoder=False,
        encoder_cache_manager=cache,
        ec_connector=None,
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=True),
        _reject_on_encoder_cache_embed_mismatch=lambda *_: False,
    )
    asked = SimpleNamespace(mm_features=[feature], has_encoder_inputs=True, request_id="r")

    def scheduled(computed: int, n_tokens: int) -> int:
        return int(Scheduler._try_schedule_encoder_inputs(scheduler, asked, computed, n_tokens, 10**6)[1])  # type: ignore[arg-type]

    assert scheduled(0, 140) == 100  # none of it
    if scheduled(256, 40) != 40 or scheduled(100, 40) != 40:
        pytest.fail("this vLLM keeps them whole: requests with such images need not pass by with it any more")
