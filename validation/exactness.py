"""Does the wrapper compute what the model computes without it? Without a plan, and with all layers recomputed."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine_wrapper.embedded.model_runner import ModelRunner
from engine_wrapper.embedded.request import SamplingParams
from engine_wrapper.self_check import plan_over
from engine_wrapper.token_schedule import SequenceSlice
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.plan import SemanticKvPlan
from validation.arms import BOUNDARY, COLD, WRAPPER_WITHOUT_PLAN, Arm, ArmChoices, arms_of, is_reusing
from validation.engines import Engines, EngineSettings, ended_requests, forced_answer, opened

_BLOCK_SIZE = 32
# Float32 logits over a large vocabulary are big; these rows meet every position of a block.
MAX_TOKENS = 512
# Two chunks, and a span with a token before and after it.
MIN_TOKENS = 4
# Answer tokens whose logits are compared in an engine that gives no prompt logits.
_ANSWER_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Exactness:
    """Largest absolute difference of the wrapper's logits from those of `against`.
    `noise`: how much those differ when the engine itself computes the same prompt in other chunks."""

    difference: float
    against: str
    noise: float = 0.0


def plain_difference(runner: ModelRunner, token_ids: Sequence[int]) -> Exactness:
    """Compare the wrapper with the plain Hugging Face forward on the first MAX_TOKENS of `token_ids`.

    It compares all rows without a plan, at once and in two chunks. With a plan that recomputes every layer, it compares
    the rows after a span of garbage KV: they must not depend on it. Raises ConfigurationError below MIN_TOKENS."""
    tokens = [int(token) for token in token_ids[:MAX_TOKENS]]
    if len(tokens) < MIN_TOKENS:
        raise ConfigurationError(
            f"The longest prompt has {len(tokens)} tokens; the wrapper is compared with the plain model on at least "
            f"{MIN_TOKENS}, so bring a longer one."
        )
    facts = runner.facts
    geometry = replace(facts.sizes(1), block_size=_BLOCK_SIZE)
    plain = _plain_logits(runner.model, tokens)  # [tokens, vocab]
    blocks = tuple(range(-(-len(tokens) // geometry.block_size)))
    shape = (len(blocks), geometry.num_layers, geometry.kv_factor, geometry.row_elements)
    pool = torch.empty(shape, dtype=runner.dtype, device=runner.device)
    wrapped = runner.share()
    wrapped.attach_pool(pool, geometry)

    def rows(begin: int, end: int, plan: SemanticKvPlan | None = None) -> torch.Tensor:
        return wrapped.forward([SequenceSlice(0, begin, tuple(tokens[begin:end]), blocks, plan)], all_rows=True)

    # A row that is read before it is written shows as NaN without a plan, as a large value under one.
    pool.fill_(float("nan"))
    without_plan = rows(0, len(tokens))
    pool.fill_(float("nan"))
    cut = len(tokens) // 3
    chunks = torch.cat([rows(0, cut), rows(cut, len(tokens))])
    pool.fill_(100.0)
    end, layers = 3 * len(tokens) // 4, facts.num_layers
    plan = plan_over(tokens, geometry, end // 2, end, None)
    plan = replace(plan, execution=replace(plan.execution, recompute_boundary_layer=layers))
    recomputed = rows(plan.prefix_end, len(tokens), plan)
    differences = (without_plan - plain, chunks - plain, recomputed - plain[plan.prefix_end :])
    return Exactness(max(map(_largest, differences)), "the plain Hugging Face forward, float32")


def stock_difference(
    engines: Engines, model: str, engine: str, token_ids: Sequence[int], min_span: int, also: Sequence[str] = ()
) -> Exactness:
    """Compare the wrapper with the `engine` without it: without a plan, and under one that recomputes every layer.

    A donor holds half of the prompt at other positions. The prompt is `token_ids`, repeated or cut to fit; `also` names
    further arms. Raises SemBlendError when the engine executes no plan."""
    count = min(MAX_TOKENS, engines.facts.max_positions - _ANSWER_TOKENS)
    tokens = list(itertools.islice(itertools.cycle(token_ids), count))
    settings = EngineSettings(model, 4 * MAX_TOKENS, 1 << 30, min_span)
    layers = engines.facts.num_layers
    arms = arms_of((COLD, WRAPPER_WITHOUT_PLAN, f"{BOUNDARY}_{layers}", *also), ArmChoices(layers, boundary=layers))
    (cold, again), *ours = (_answer_logits(engines, arm, tokens, settings) for arm in arms)
    found = max(_largest(computed - cold) for computed, _ in ours)
    return Exactness(found, f"{engine} without the wrapper", _largest(again - cold))


def _answer_logits(engines: Engines, arm: Arm, tokens: list[int], settings: EngineSettings) -> list[torch.Tensor]:
    """Return logits of a forced answer, float32 [tokens, vocabulary]: at first, and with the engine's own prefix."""
    quarter = len(tokens) // 4
    donor = [*tokens[:-quarter:-1], *tokens[quarter : 3 * quarter]]
    outputs: list[Any] = []
    with opened(engines, arm, settings) as (engine, audit):
        engine.generate([donor], SamplingParams(max_tokens=1))
        for _ in range(2):
            engine.settle()
            outputs += engine.generate([tokens], forced_answer(tokens[:_ANSWER_TOKENS]))
    if is_reusing(arm.name) and not any(event["event"] == "materialized" for event in audit.events):
        ended = {event["request_id"]: event["reason"] for event in ended_requests(audit.events)}
        reason = ended.get(outputs[0].request_id) or "the engine's log says why"
        raise SemBlendError(f"The engine executes no plan ({reason}), so that nothing can be said of reuse in it.")
    return [output.outputs[0].generation_logits for output in outputs]


def _largest(difference: torch.Tensor) -> float:
    return float(difference.abs().nan_to_num(float("inf")).max())


@torch.inference_mode()
def _plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    before = model.config._attn_implementation
    # Transformers has no SDPA for attention with sinks.
    model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    try:
        logits: torch.Tensor = model(torch.tensor([tokens], device=model.device), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)
    return logits
