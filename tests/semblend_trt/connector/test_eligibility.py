"""Requests whose KV may not be shared are refused by name."""

from types import SimpleNamespace

import pytest

from semblend_trt.connector.eligibility import (
    IneligibleRequest,
    cache_salt_of,
    check_eligible,
    engine_refusal,
)


def request(**attributes):
    return SimpleNamespace(**attributes)


def test_plain_request_is_eligible():
    check_eligible(request(sampling_config=SimpleNamespace(beam_width=1), is_generation_only_request=lambda: False))


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"is_dummy_request": True}, "dummy_request"),
        ({"is_generation_only_request": True}, "generation_only"),
        ({"is_generation_only_request": lambda: True}, "generation_only"),
        ({"sampling_config": SimpleNamespace(beam_width=2)}, "beam_search"),
        ({"multimodal_hashes": [[1, 2]]}, "multimodal"),
        ({"py_multimodal_data": {"image": 1}}, "multimodal"),
        ({"draft_tokens": [5]}, "speculative_decoding"),
        ({"py_return_context_logits": True}, "context_logits"),
    ],
)
def test_refusals(attributes, reason):
    with pytest.raises(IneligibleRequest) as refusal:
        check_eligible(request(**attributes))
    assert refusal.value.reason == reason


@pytest.mark.parametrize(
    ("attributes", "salt"),
    [({"cache_salt": "a"}, "a"), ({"cache_salt": None}, None), ({"cache_salt_id": 7}, "7"), ({"cache_salt": ""}, "")],
)
def test_salt_of_either_name(attributes, salt):
    assert cache_salt_of(request(**attributes)) == salt


@pytest.mark.known_defect(21)
def test_engine_without_salt_attribute_is_refused():
    with pytest.raises(IneligibleRequest) as refusal:
        cache_salt_of(request())
    assert refusal.value.reason == "salt_unknown"


@pytest.mark.known_defect(25)
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({}, None),
        ({"kv_cache_config": SimpleNamespace(host_cache_size=0, max_attention_window=None)}, None),
        ({"kv_cache_config": SimpleNamespace(host_cache_size=1 << 30)}, "host_offload"),
        ({"kv_cache_config": SimpleNamespace(max_attention_window=[4096])}, "attention_window"),
        ({"speculative_config": object()}, "speculative_decoding"),
        ({"enable_attention_dp": True}, "attention_dp"),
        ({"model_kwargs": {"rms_norm_eps": 0.05}}, "model_kwargs"),
        ({"model_kwargs": {}}, None),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel"),
        ({"context_parallel_size": 4}, "context_parallel"),
        ({"pipeline_parallel_size": None, "context_parallel_size": 1}, None),
        ({"cache_transceiver_config": SimpleNamespace(backend="UCX")}, "disaggregated"),
        ({"cache_transceiver_config": None, "attn_backend": "TRTLLM"}, None),
        ({"attn_backend": "FLASHINFER"}, "attention_backend"),
        ({"attn_backend": "FLASHINFER", "contract": "1.2"}, "attention_backend"),
        ({"attn_backend": "flashinfer", "contract": "1.3rc"}, None),
        ({"attn_backend": "VANILLA", "contract": "main"}, "attention_backend"),
        ({"attn_backend": "FLASHINFER_STAR_ATTENTION", "contract": "main"}, "attention_backend"),
    ],
)
def test_engines_whose_blocks_cannot_be_trusted(arguments, reason):
    assert engine_refusal(request(**arguments)) == reason
