"""The public face: prompts in, outputs and streams out, bad input refused at the door."""

import shutil

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.request import largest_of
from semblend_trt.errors import CapacityError, ConfigurationError
from tests.builders.engine import token_ids, unfinished
from tests.random_models import FAMILIES
from tests.semblend_trt.samples import unknown_fields

FOUR = SamplingParams(max_tokens=4, ignore_eos=True)
TEXT = "The quick brown fox jumps over the lazy dog."


def test_one_output_for_each_prompt_in_order(make_llm):
    llm = make_llm()
    ids = llm.tokenizer.encode(TEXT)
    text, tokens, array = llm.generate([TEXT, ids, np.array(ids)], FOUR)
    assert token_ids(text) == token_ids(tokens) == token_ids(array)
    assert (text.prompt, tokens.prompt) == (TEXT, None)
    assert text.prompt_token_ids == tokens.prompt_token_ids == ids
    assert [output.request_id for output in (text, tokens, array)] == [1, 2, 3]
    for prompts in (TEXT, ids, np.array(ids), [np.array(ids)], tuple(ids)):
        assert [token_ids(output) for output in llm.generate(prompts, FOUR)] == [token_ids(text)]


def test_the_models_end_token_stops_unless_ignored(make_llm, monkeypatch):
    (plain,) = make_llm().generate([TEXT], FOUR)
    monkeypatch.setattr(ModelRunner, "eos_token_ids", frozenset({token_ids(plain)[2]}))
    stopped, ignored = make_llm().generate([TEXT] * 2, [SamplingParams(max_tokens=4), FOUR])
    assert (stopped.outputs[0].finish_reason, token_ids(stopped)[-1]) == ("stop", token_ids(plain)[2])
    assert len(token_ids(stopped)) <= 3
    assert token_ids(ignored) == token_ids(plain)


@pytest.mark.promise("engines", "The embedded engine serves all families on a CPU; `generate_async` streams")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_family_and_dtype_runs(tiny_model_paths, family, dtype):
    with LLM(model=tiny_model_paths[family], dtype=dtype, device="cpu", max_num_tokens=32) as llm:
        (cold,) = llm.generate([TEXT], FOUR)
        assert (len(token_ids(cold)), llm.executor.pool.dtype) == (4, getattr(torch, dtype))
        if dtype == "float32":
            assert token_ids(llm.generate([TEXT], FOUR)[0]) == token_ids(cold)


@pytest.mark.promise("engines", "The embedded engine serves all families...")
def test_a_stream_gives_one_output_for_every_token(make_llm):
    llm = make_llm()
    (whole,) = llm.generate([TEXT], FOUR)
    assert whole.time_to_first_token > 0
    parts = list(llm.generate_async(TEXT, FOUR))
    assert [token_ids(part) for part in parts] == [token_ids(whole)[: n + 1] for n in range(4)]
    assert [part.finished for part in parts] == [False, False, False, True]
    assert [part.outputs[0].finish_reason for part in parts] == [None, None, None, "length"]
    assert parts[-1].outputs[0].text == whole.outputs[0].text
    (final,) = llm.generate_async(TEXT, FOUR, streaming=False)
    assert token_ids(final) == token_ids(whole)


@pytest.mark.parametrize(
    ("prompts", "arguments", "message"),
    [
        ("", {}, "prompt is empty"),
        ([], {}, "prompt is empty"),
        ([[]], {}, "prompt is empty"),
        ([TEXT, ""], {}, "prompt is empty"),
        ([[1, 2, 257]], {}, r"token id 257; the model's ids are 0\.\.256"),
        ([[1, -1]], {}, "token id -1"),
        ([[1, 1 << 70]], {}, f"token id {1 << 70}"),
        ([[1, "a"]], {}, "nothing mixed"),
        ([TEXT, [1] * 1021], {}, "1021 tokens with 4 new ones exceeds max_seq_len 1024"),
        ([TEXT, [1] * 510], {}, "needs 65 blocks of 8 tokens, the KV pool has 64"),
        ([TEXT, TEXT], {"sampling_params": [FOUR]}, "1 entries for 2 prompts"),
        ([TEXT], {"sampling_params": {"max_tokens": 3}}, "give one SamplingParams"),
        ([TEXT, TEXT], {"cache_salt": ["a", 5]}, "give one str"),
        ([TEXT], {"lora_request": "red"}, "'red' is not in lora_config"),
        ([TEXT], {"lora_request": ""}, "'' is not in lora_config"),
        ([TEXT], {"lora_request": ["red"]}, r"\['red'\] is not in lora_config"),
        ([TEXT], {"sampling_params": SamplingParams(2, forced_token_ids=(1, 300))}, "forced_token_ids holds 300"),
    ],
)
def test_what_cannot_run_is_refused_with_its_whole_list(make_llm, prompts, arguments, message):
    llm = make_llm(cache={"max_tokens": 512})
    with pytest.raises((ConfigurationError, CapacityError), match=message):
        llm.generate(prompts, **{"sampling_params": FOUR, **arguments})
    assert (unfinished(llm.executor), len(llm.generate([TEXT], FOUR))) == (0, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"colour": "red"}, r"LlmArgs\.colour: Extra inputs are not permitted"),
        ({"max_batch_size": 0}, r"LlmArgs\.max_batch_size: .*\(given: 0\)"),
        ({"max_num_tokens": 4}, "max_num_tokens 4 is below max_batch_size 8"),
        ({"max_num_tokens": 16}, "max_num_tokens 16 is below tokens_per_block 32"),
        ({"tensor_parallel_size": 2}, r"LlmArgs\.tensor_parallel_size"),
        ({"max_seq_len": 2000}, "exceeds the model's context of 1024"),
        ({"model": ""}, r"LlmArgs\.model: .*at least 1 character"),
        ({"kv_cache_config": KvCacheConfig(max_tokens=1 << 50)}, "does not fit into the memory of cpu"),
        ({"kv_cache_config": KvCacheConfig(max_tokens=16)}, "holds no block of 32 tokens"),
        ({"kv_connector_config": {"connector_module": "x"}}, "connector_scheduler_class: Field required"),
    ],
)
def test_arguments_out_of_range_are_one_sentence(tiny_qwen2_path, tiny_runner, fields, message):
    with pytest.raises((ConfigurationError, CapacityError), match=message) as caught:
        LLM(**{"model": tiny_qwen2_path, "runner": tiny_runner, **fields})
    assert "\n" not in str(caught.value)


def test_a_runner_of_another_model_is_refused(tiny_runner, tiny_llama_path, tiny_qwen2_path, tmp_path):
    copy = shutil.copytree(tiny_qwen2_path, tmp_path / tiny_qwen2_path.name)
    for other in (tiny_llama_path, copy):
        with pytest.raises(ConfigurationError, match="and the runner holds"):
            LLM(model=other, runner=tiny_runner)
    link = tmp_path / "link"
    link.symlink_to(tiny_qwen2_path)
    LLM(model=link, runner=tiny_runner).shutdown()


def test_files_that_changed_behind_a_runner_are_refused(tiny_qwen2_path, tmp_path):
    folder = shutil.copytree(tiny_qwen2_path, tmp_path / "model")
    runner = ModelRunner(folder, device="cpu")
    LLM(model=folder, runner=runner).shutdown()
    shutil.copy(folder / "model.safetensors", folder / "tuned")
    (folder / "tuned").replace(folder / "model.safetensors")
    with pytest.raises(ConfigurationError, match="have changed since they were loaded"):
        LLM(model=folder, runner=runner)


def test_a_model_in_memory_is_not_taken_for_the_files_beside_its_configuration(tiny_qwen2_path, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen2_path)
    connector = KvCacheConnectorConfig.ours()

    def namespace_of(runner):
        with LLM(model=tiny_qwen2_path, runner=runner, device="cpu", kv_connector_config=connector) as llm:
            return llm.connector_scheduler.namespace

    monkeypatch.setenv("SEMBLEND_HOST_BYTES", "1000000")
    loaded, adopted = ModelRunner(tiny_qwen2_path, device="cpu"), ModelRunner(tiny_qwen2_path, model=model)
    assert unknown_fields(namespace_of(loaded)) == []
    assert unknown_fields(namespace_of(adopted)) == ["model_revision"]
    monkeypatch.setenv("SEMBLEND_MODEL_REVISION", "mine")
    assert unknown_fields(namespace_of(adopted)) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0; it must be an integer >= 1"),
        ({"max_tokens": 2.5}, "max_tokens is 2.5"),
        ({"max_tokens": True}, "max_tokens is True"),
        ({"stop_token_ids": 5}, "stop_token_ids is 5; it must be a list of token ids"),
        ({"stop_token_ids": [3, -1]}, "stop_token_ids holds -1"),
        ({"forced_token_ids": []}, "forced_token_ids has 0 tokens; it must have 1 to max_tokens"),
        ({"forced_token_ids": [1, 2, 3], "max_tokens": 2}, "forced_token_ids has 3 tokens"),
    ],
)
def test_a_field_out_of_range_is_refused(fields, message):
    with pytest.raises(ConfigurationError) as refusal:
        SamplingParams(**fields)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_the_first_of_equal_logits_is_taken_in_every_row(device):
    logits = torch.randn(7, 50_257, generator=torch.Generator().manual_seed(0))
    for row in range(7):
        logits[row, [100 * row + 5, 40_000, 50_256]] = 9.5
    assert largest_of(logits.to(device)) == [(9.5, 100 * row + 5) for row in range(7)]
