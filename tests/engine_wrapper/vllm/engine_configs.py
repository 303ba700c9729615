"""vLLM's own configuration of an engine on the shipped model, made once and copied."""

import copy
from functools import cache
from pathlib import Path

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

MODEL = Path(__file__).parents[3] / "validation/assets/model"


def engine_config(changes=None, **extra):
    """An engine's configuration, with `extra` as the connector's extra one and `changes` by their paths."""
    config = copy.deepcopy(_made())
    config.kv_transfer_config = transfer_config(**extra)
    for path, value in (changes or {}).items():
        *places, name = path.split(".")
        holder = config
        for place in places:
            holder = getattr(holder, place)
        object.__setattr__(holder, name, value)
    return config


def transfer_config(**extra):
    return KVTransferConfig(
        kv_connector="ExampleConnector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config=extra,
    )


def made_for(model, **arguments):
    """What vLLM makes of a model's folder."""
    made = EngineArgs(
        model=str(model),
        max_model_len=2048,
        kv_transfer_config=transfer_config(),
        # As for our connector, which asks vLLM for it.
        compilation_config={"cudagraph_mode": "PIECEWISE"},
        **arguments,
    )
    return made.create_engine_config()


@cache
def _made():
    return made_for(MODEL, dtype="float32")
