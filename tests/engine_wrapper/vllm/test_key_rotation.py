"""Keys turn in vLLM's layers as the model's configuration says, or nothing is reused."""

import json

import pytest
from safetensors.torch import load_file, save_file
from vllm.model_executor.models import qwen2

from tests.conftest import save_tiny_model
from tests.engine_wrapper.vllm.conftest import DONOR, MOVED


def assert_refused(served, caplog):
    served.ask(DONOR, max_tokens=1)
    served.settle()
    served.forget()
    assert served.ask(MOVED, max_tokens=1).cached == 0
    assert (served.runtime.mode.value, dict(served.faults)) == ("stock", {"self_check": 1})
    assert "(rope_unknown): keys that turn as the model's configuration says, by 2032 positions in " in caplog.text


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({}, {"is_neox_style": False}),
        ({"rope_type": "linear", "factor": 1.001}, {}),
        ({"partial_rotary_factor": 0.5}, {}),
    ],
    ids=str,
)
def test_layers_that_rotate_otherwise_are_served_as_stock(engine, monkeypatch, caplog, parameters, named):
    stock = qwen2.get_rope

    def other(*arguments, rope_parameters, **options):
        return stock(*arguments, rope_parameters={**rope_parameters, **parameters}, **options, **named)

    monkeypatch.setattr(qwen2, "get_rope", other)
    assert_refused(engine("position_fix"), caplog)


def as_mistral_publishes(folder, theta):
    """The model in the folder, with its weights and parameters in Mistral's own form beside those of Transformers."""
    told = json.loads((folder / "config.json").read_text())
    names = {"dim": "hidden_size", "n_layers": "num_hidden_layers", "n_heads": "num_attention_heads"}
    names |= {"n_kv_heads": "num_key_value_heads", "hidden_dim": "intermediate_size", "norm_eps": "rms_norm_eps"}
    names |= {each: each for each in ("head_dim", "vocab_size", "max_position_embeddings")}
    parameters = {name: told[own] for name, own in names.items()} | {"rope_theta": theta}
    (folder / "params.json").write_text(json.dumps(parameters))
    del told["rope_parameters"]
    (folder / "config.json").write_text(json.dumps(told | {"rope_theta": 10000.0}))
    weights = load_file(folder / "model.safetensors")
    save_file(weights, folder / "consolidated.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("theta", [10000.0, 20000.0])
def test_parameters_that_vllm_reads_in_the_place_of_config_json_are_those_that_count(engine, tmp_path, caplog, theta):
    sizes = {"head_dim": 32, "vocab_size": 2000, "max_position_embeddings": 2048}
    model = as_mistral_publishes(save_tiny_model("mistral", tmp_path, **sizes), theta)
    served = engine("position_fix", model=model, tokenizer_mode="hf", load_format="safetensors")
    assert served.llm.llm_engine.model_config.hf_config.rope_theta == theta
    if theta != 10000.0:
        assert_refused(served, caplog)
        return
    served.ask(DONOR, max_tokens=1)
    assert served.runtime.mode.value == "wrapper"
