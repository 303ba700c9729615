"""Engines and models as tests describe them."""

import json
from types import SimpleNamespace

from semblend_trt.connector.contract import from_llm_args
from semblend_trt.connector.model_facts import model_facts

# All that a namespace is made from.
KNOWN = {"dtype": "auto", "attn_backend": "TRTLLM", "load_format": "auto"}
KNOWN |= {f"{kind}_parallel_size": 1 for kind in ("tensor", "pipeline", "context")}
KNOWN |= {"kv_cache_config": SimpleNamespace(dtype="auto", tokens_per_block=32)}


def sizes(layers, kv_heads=2, **more):
    """The fields of a model's configuration that say how large it is, and more."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads}
    return {"num_hidden_layers": layers, "hidden_size": 64, "max_position_embeddings": 4096} | heads | more


def change_config(folder, **changes):
    """Lays `changes` over the configuration of a model's folder; a change of None removes the field."""
    path = folder / "config.json"
    fields = json.loads(path.read_text("utf-8")) | changes
    kept = {name: value for name, value in fields.items() if name not in changes or value is not None}
    path.write_text(json.dumps(kept), "utf-8")


def facts_of(folder, config):
    """The facts of a model of this configuration; a field of `...` is left out."""
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return model_facts(folder)


def engine(model="", **llm_args):
    """The engine of these fields of TensorRT-LLM's LlmArgs, and of no others."""
    return from_llm_args(SimpleNamespace(model=str(model), **llm_args))


def known_engine(model, **llm_args):
    """The engine of a model, of which a namespace leaves nothing unknown, with these fields otherwise."""
    return engine(model, **KNOWN | llm_args)
