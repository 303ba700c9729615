"""Which engines and requests of vLLM are refused, on its own configurations and requests."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import vllm
from vllm import PoolingParams
from vllm.config import CUDAGraphMode
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from benchmarks.evidence.models import published
from engine_wrapper.vllm import refusals
from engine_wrapper.vllm.refusals import LATENT_BACKENDS, engine_refusal_of, request_refusal, sample_refusal
from semblend_trt.doctor.model import KnownModel
from semblend_trt.reasons import TEXTS, Scope
from tests.builders.vllm import engine_config, made_for, needs_vision, request

REASONS = set(TEXTS[Scope.VLLM])
SHAPE = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}


def caches(*specs):
    groups = [KVCacheGroupSpec([f"layers.{number}"], spec) for number, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=4, kv_cache_tensors=[], kv_cache_groups=groups)


def text_alone(value):
    return SimpleNamespace(language_model_only=value)


DRAFTERS = [SimpleNamespace(method=each) for each in ("eagle3", "mtp", "draft_model", "ngram_gpu", object)]
ONE_GROUP = caches(FullAttentionSpec(**SHAPE))
# Of a model with a window, or chunks, in some layers, whose cache holds all tokens all the same.
WINDOWED = caches(FullAttentionSpec(**SHAPE, sliding_window=64))
CHUNKED = caches(FullAttentionSpec(**SHAPE, attention_chunk_size=64))
LATENT = caches(kv_cache_interface.MLAAttentionSpec(**SHAPE | {"num_kv_heads": 1, "head_size": 576}))
REFUSED = [
    ("kv_role", "kv_transfer_config.kv_role", ("kv_producer", "kv_consumer", None)),
    ("load_failure_policy", "kv_transfer_config.kv_load_failure_policy", ("fail", None)),
    ("other_connector", "kv_transfer_config.kv_connector", ("MultiConnector",)),
    ("other_connector", "cache_config.kv_offloading_size", (4.0,)),
    ("encoder_connector", "ec_transfer_config", (object(),)),
    ("tensor_parallel", "parallel_config.tensor_parallel_size", (0, None, "1", True)),
    ("pipeline_parallel", "parallel_config.pipeline_parallel_size", (2,)),
    ("data_parallel", "parallel_config.data_parallel_size", (2,)),
    ("context_parallel", "parallel_config.prefill_context_parallel_size", (2, None)),
    ("context_parallel", "parallel_config.decode_context_parallel_size", (2,)),
    ("executor", "parallel_config.distributed_executor_backend", ("mp", "ray", "external_launcher", object)),
    ("ubatching", "parallel_config.enable_dbo", (True, "yes")),
    ("ubatching", "parallel_config.ubatch_size", (2,)),
    ("pooling", "model_config.runner_type", ("pooling", "draft")),
    ("multimodal", "model_config.multimodal_config", (object(), *map(text_alone, (False, 1, "yes", None)))),
    ("encoder_decoder", "model_config.is_encoder_decoder", (True,)),
    ("diffusion", "model_config.is_diffusion", (True,)),
    ("sliding_window", "cache_config.sliding_window", (128,)),
    ("sliding_window", "model_config.model_arch_config.rswa_window", (128,)),
    ("non_causal", "attention_config.use_non_causal", (True,)),
    ("attention_backend", "attention_config.backend", (AttentionBackendEnum.FLASHINFER, "AUTO")),
    ("attention_backend", "attention_config.backend", (AttentionBackendEnum.FLASHMLA,)),
    ("prompt_embeds", "model_config.enable_prompt_embeds", (True,)),
    ("routed_experts", "model_config.enable_return_routed_experts", (True,)),
    ("model_kwargs", "model_config.hf_overrides", ({"rope_theta": 1.0}, lambda config: config)),
    ("model_kwargs", "model_config.model_class_overrides", ({"a": "b:c"},)),
    ("model_kwargs", "model_config.hf_config_path", ("/elsewhere",)),
    ("model_kwargs", "model_config.config_format", ("mistral",)),
    ("speculative_decoding", "speculative_config", DRAFTERS),
    ("weight_transfer", "weight_transfer_config", (object(),)),
    ("sleep_mode", "model_config.enable_sleep_mode", (True,)),
    ("sequence_parallel", "compilation_config.pass_config.enable_sp", (True,)),
    ("full_cuda_graphs", "compilation_config.cudagraph_mode", (CUDAGraphMode.FULL, "FULL", 2)),
    ("kv_cache_dtype", "cache_config.cache_dtype", ("fp8_e5m2", "fp8_per_token_head", "nvfp4", "bfloat16", None)),
    ("kv_cache_dtype", "cache_config.cache_dtype", ("fp8_ds_mla",)),  # latent rows with scales among their channels
    ("kv_scales", "cache_config.calculate_kv_scales", (True,)),
    ("kv_scales", "cache_config.kv_cache_dtype_skip_layers", (["0"], ["sliding_window"])),
    ("kv_sharing_fast_prefill", "cache_config.kv_sharing_fast_prefill", (True,)),
]
TAKEN = [
    *(({}, cache) for cache in (ONE_GROUP, WINDOWED, CHUNKED, LATENT, None)),
    *(({"compilation_config.cudagraph_mode": each}, ONE_GROUP) for each in CUDAGraphMode if each.name != "FULL"),
    *(({"attention_config.backend": e}, LATENT) for e in AttentionBackendEnum if e.name in LATENT_BACKENDS),
    ({"parallel_config.tensor_parallel_size": 2, "parallel_config.distributed_executor_backend": "mp"}, ONE_GROUP),
    *(({"speculative_config": SimpleNamespace(method=each)}, ONE_GROUP) for each in ("ngram", "suffix")),
    ({"lora_config": object()}, ONE_GROUP),
    ({"model_config.multimodal_config": text_alone(True)}, ONE_GROUP),
]


@pytest.mark.parametrize(("changes", "cache"), TAKEN)
def test_what_is_run_in_production_is_not_refused(changes, cache):
    assert engine_refusal_of(engine_config(changes), cache) is None


@pytest.mark.promise("engines", "docs/models.md has the code's own answers...")
@pytest.mark.parametrize("has_images", [False, pytest.param(True, marks=needs_vision)])
def test_no_popular_model_that_is_served_is_refused_by_its_configuration_in_vllm(tmp_path, has_images):
    """Of each type one model: vLLM looks at its code first, which takes time."""
    served = {model.config["model_type"]: model for model in published() if isinstance(model.answer(), KnownModel)}
    asked = {name: model for name, model in served.items() if ("text_config" in model.config) == has_images}
    assert asked
    for model_type, model in asked.items():
        folder = tmp_path / model_type
        folder.mkdir()
        model.save(folder)
        alone = {"language_model_only": True} if has_images else {}
        config = made_for(folder, skip_tokenizer_init=True, **alone)
        assert engine_refusal_of(config, ONE_GROUP) is None, model.name


@pytest.mark.promise("engines", "Gemma 3's full attention and windows...")
@pytest.mark.promise("engines", "What vLLM's version, flags or a request do not allow is refused by name")
@pytest.mark.parametrize(
    ("reason", "path", "value"), [(reason, path, value) for reason, path, values in REFUSED for value in values]
)
def test_an_engine_is_refused_by_name(reason, path, value):
    assert engine_refusal_of(engine_config({path: value}), ONE_GROUP) == reason


@pytest.mark.parametrize(
    ("reason", "name", "value"),
    [
        ("hybrid_model", "is_hybrid", True),
        ("hybrid_model", "is_attention_free", True),
        ("diffusion", "is_diffusion", property(lambda self: getattr(None, "not this way"))),
        ("diffusion", "is_diffusion", property(lambda self: 1 / 0)),
    ],
)
def test_a_property_of_the_model_and_one_that_cannot_be_read_are_refusals(monkeypatch, reason, name, value):
    config = engine_config()
    monkeypatch.setattr(type(config.model_config), name, value)
    assert engine_refusal_of(config, ONE_GROUP) == reason


@pytest.mark.parametrize(
    ("reason", "path"),
    [
        (None, "parallel_config.decode_context_parallel_size"),
        (None, "cache_config.kv_sharing_fast_prefill"),
        ("tensor_parallel", "parallel_config.tensor_parallel_size"),
        ("kv_cache_dtype", "cache_config.cache_dtype"),
    ],
)
def test_a_field_is_off_in_a_version_without_it_and_one_of_every_version_must_be_there(reason, path):
    (part, name), config = path.split("."), engine_config()
    bare = SimpleNamespace(**{key: value for key, value in vars(getattr(config, part)).items() if key != name})
    object.__setattr__(config, part, bare)
    assert engine_refusal_of(config, ONE_GROUP) == reason


OF_A_REQUEST = SimpleNamespace(prompt_token_ids=[1], num_output_tokens=None)


@pytest.mark.parametrize("unknown", [None, object(), SimpleNamespace(model_config=None), OF_A_REQUEST])
def test_what_is_of_no_known_shape_is_refused(unknown):
    assert {engine_refusal_of(unknown, unknown), request_refusal(unknown)} <= REASONS


@pytest.mark.parametrize("version", ["0.27.9", "0.9.2", "dev", None, "0.28.0", "0.32.1", "1.0.0"])
def test_older_and_unnumbered_versions_are_refused(monkeypatch, version):
    monkeypatch.setattr(vllm, "__version__", version)
    is_known = version in ("0.28.0", "0.32.1", "1.0.0")
    assert engine_refusal_of(engine_config(), ONE_GROUP) == (None if is_known else "vllm_version")


@pytest.mark.parametrize(
    ("reason", "cache"),
    [
        ("cache_groups", caches()),
        ("cache_groups", caches(FullAttentionSpec(**SHAPE), FullAttentionSpec(**SHAPE))),
        ("cache_groups", SimpleNamespace(kv_cache_groups=7)),
        ("sliding_window", caches(SlidingWindowSpec(**SHAPE, sliding_window=64))),
        ("cache_spec", caches(kv_cache_interface.ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64))),
        ("cache_spec", caches(type("PackedSpec", (FullAttentionSpec,), {})(**SHAPE))),
        ("cache_spec", caches(None)),
        ("non_causal", caches(FullAttentionSpec(**SHAPE, non_causal=True))),
    ],
)
def test_other_caches_are_refused(reason, cache):
    assert engine_refusal_of(engine_config(), cache) == reason


def test_a_connector_that_another_one_builds_is_refused(monkeypatch):
    child = {"kv_connector": "SemBlendConnector", "kv_connector_module_path": "engine_wrapper.vllm"}
    options = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    config = engine_config(connectors=[{**child, **options}])
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    outer = MultiConnector(config, KVConnectorRole.WORKER, ONE_GROUP)
    inner = outer._connectors[0]
    for called, reason in ((inner, "pool_layout"), (outer, "other_connector")):
        inner._runtime.refusal = None
        monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", called)
        called.register_kv_caches({})
        assert inner._runtime.refusal == reason


def resumed():
    after = request()
    after.append_output_token_ids(5)
    return after


@pytest.mark.promise("engines", "What vLLM's version, flags or a...")
@pytest.mark.parametrize(
    ("reason", "asked"),
    [
        (None, request()),
        (None, request(sampling={"logprobs": 5, "n": 2}, cache_salt="s", priority=3)),
        (None, request(sampling={"structured_outputs": StructuredOutputsParams(json="{}")})),
        ("pooling", request(sampling_params=None, pooling_params=PoolingParams(task="embed"))),
        ("multimodal", request(mm_features=[object()])),
        ("prompt_embeds", request(prompt_token_ids=None, prompt_embeds=torch.zeros(3, 8))),
        ("prompt_logprobs", request(sampling={"prompt_logprobs": 0})),
        ("skip_reading_prefix_cache", request(sampling={"skip_reading_prefix_cache": True})),
        ("streamed_prompt", request(resumable=True)),
        ("resumed_with_output", resumed()),
        ("prompt_ids_missing", request(prompt_token_ids=[])),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_request_is_refused_by_name(reason, asked):
    assert request_refusal(asked) == reason


# A layer's attention, as far as it is asked about.
Attention = type("Attention", (SimpleNamespace,), {})
PLAIN = {"alibi_slopes": None, "logits_soft_cap": 0, "kv_sharing_target_layer_name": None, "attn_type": "decoder"}


def attention(kind=Attention, **changes):
    given = PLAIN | changes
    backend = SimpleNamespace(forward_includes_kv_cache_update=given.pop("updates", False))
    return kind(impl=SimpleNamespace(**given), query_quant=given.get("query_quant"), attn_backend=backend)


@pytest.mark.promise("engines", "In vLLM a check's sample finds...")
@pytest.mark.parametrize(
    ("reason", "layer"),
    [
        (None, attention()),
        (None, attention(logits_soft_cap=0.0, chunk_lookback=-1)),
        (None, attention(logits_soft_cap=None)),
        (None, attention(sinks=torch.zeros(4), sliding_window=(127, 0))),
        (None, attention(attn_type=AttentionType.DECODER)),
        ("alibi", attention(alibi_slopes=torch.ones(4))),
        ("logits_soft_cap", attention(logits_soft_cap=50.0)),
        ("chunk_lookback", attention(chunk_lookback=1)),
        ("kv_sharing", attention(kv_sharing_target_layer_name="layers.0")),
        ("non_causal", attention(attn_type=AttentionType.ENCODER_ONLY)),
        ("query_quantisation", attention(query_quant=object())),
        ("kv_cache_update", attention(updates=True)),
        ("attention", attention(SimpleNamespace)),
        ("non_causal", object()),
        ("latent_attention", SimpleNamespace(kv_lora_rank=512)),
    ],
)
def test_attention_that_our_kernel_does_not_know_has_no_sample(reason, layer):
    assert sample_refusal(layer) == reason
    if reason is None:
        return
    page = (Path(__file__).parents[3] / "docs" / "vllm.md").read_text(encoding="utf-8")
    assert f"`{reason}`" in page.split("## Samples")[1].split("\n## ")[0]


def test_every_reason_has_a_sentence():
    named = {reason for rules in (refusals._ENGINE, refusals._CACHE, refusals._REQUEST) for reason in rules}
    named |= {"settings_invalid", "vllm_version", "cache_groups", "cache_spec", "prompt_ids_missing"}
    named |= {"model_runner", "layer_call", "recovery", "lora", "tensor_parallel"}
    assert named == REASONS
