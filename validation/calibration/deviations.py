"""Deviations of donors' KV from fresh KV, token by token and in every layer, where a plan would place it.

A check at layer c compares KV behind layers 0 to c - 1, which compute all tokens as a cold run does. So two cold runs,
of the donor and of the prompt, give the deviations of every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine_wrapper.sequence_work import choose, sample_of, stretches, suspects_of
from kernels.deviation import Move, deviation
from kernels.layout import KvGeometry, PagedKv
from semblend_trt.config import load_settings
from semblend_trt.discovery.planner import LookupRequest, Planner
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.plan import WINDOW_TOKENS, EngineMode
from semblend_trt.policy import ReusePolicy
from validation.cases import groups
from validation.engines import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from semblend_trt.connector.model_facts import ModelFacts
    from semblend_trt.plan import SemanticKvPlan, SpanCheck
    from validation.cases import Case, TokenisedCase

_BLOCK_SIZE = 32
_NAMESPACE = "calibration"
# Without cuDNN's attention, which compiles for each length of a text: tens of milliseconds on a card.
_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@dataclass(frozen=True, slots=True)
class PromptDeviations:
    """One prompt's plan. `values`: float32 [layers, checked tokens], the larger of K's and V's deviation, span by span;
    `lengths`: tokens of each span; `exact_tokens` of the `promised` tokens need no check."""

    family: str
    values: npt.NDArray[np.float32]
    lengths: tuple[int, ...]
    exact_tokens: int
    promised: int

    def window_means(self, layer: int) -> npt.NDArray[np.float64]:
        """Mean deviation of each window of each span, float64 [windows]."""
        return self._means(layer, np.concatenate([np.arange(length) % WINDOW_TOKENS == 0 for length in self.lengths]))

    def span_means(self, layer: int) -> npt.NDArray[np.float64]:
        """Mean deviation of each span, float64 [spans]."""
        return self._means(layer, np.concatenate([np.arange(length) == 0 for length in self.lengths]))

    def kept(self, check: SpanCheck | None, head_tokens: int) -> npt.NDArray[np.bool_]:
        """Which tokens keep the donor's KV, bool [checked tokens]: those that pass `check`, or all without one, but for
        the first `head_tokens` of every span."""
        return self.kept_and_compared(check, head_tokens)[0]

    def kept_and_compared(
        self, check: SpanCheck | None, head_tokens: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which tokens keep the donor's KV, and which are compared with it, by the sample or behind it: bool [checked
        tokens] each. The deviations of a sample's tokens are taken as if they were computed over fresh KV."""
        kept = np.concatenate([np.arange(length) >= head_tokens for length in self.lengths])
        compared = np.zeros_like(kept)
        if check is None or not kept.any():
            return kept, compared
        lengths = [length - head_tokens for length in self.lengths if length > head_tokens]
        deviations, exact = self.values[check.layer, kept], self.exact_tokens
        sampled, suspects = np.zeros(len(deviations), dtype=bool), np.ones(len(deviations), dtype=bool)
        if check.sample_every:
            first = sample_of(lengths, check.sample_every, seed=0)
            sampled[first] = True
            suspects = suspects_of(check, first, deviations[first], lengths, exact, self.promised)
            exact += int(np.count_nonzero(~suspects))
        compared[kept] = sampled | suspects
        computed = np.zeros_like(suspects)
        if suspects.any():
            ends = np.cumsum(lengths).tolist()
            spans = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
            parts = [len(part) for part in stretches(spans, suspects)]
            computed[suspects] = choose(check, deviations[suspects], parts, exact, self.promised).computed
        kept[kept] = ~computed
        return kept, compared

    def _means(self, layer: int, is_first: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        starts = np.flatnonzero(is_first)
        sums = np.add.reduceat(self.values[layer].astype(np.float64), starts)
        means: npt.NDArray[np.float64] = sums / np.diff(starts, append=is_first.size)
        return means


class DeviationCollector:
    """Collects the deviations of prompts in `model`, a Transformers model of either version."""

    def __init__(self, model: Any, facts: ModelFacts, min_span: int) -> None:
        self._geometry = KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, _BLOCK_SIZE)
        self._rotation = facts.rotation
        self._model = model
        with environment({}):
            self._settings = load_settings(policy=ReusePolicy.POSITION_FIX, min_span_tokens=min_span)

    def collect(self, cases: Sequence[Case], tokens_of: Callable[[Case], TokenisedCase]) -> list[PromptDeviations]:
        """Deviations of the first prompt of each group, where there is anything to check."""
        found = []
        for group in groups(list(cases)):
            tokens = tokens_of(group[0])
            prompt = self._prompt(group[0].workload, tokens)
            found += [] if prompt is None else [prompt]
        return found

    def _prompt(self, family: str, tokens: TokenisedCase) -> PromptDeviations | None:
        plan = self._plan(tokens)
        checked = [] if plan is None else [span for span in plan.spans if not span.exact]
        if plan is None or not checked:
            return None
        *donors, fresh = self._prefill([*tokens.donors, tokens.prompt])
        moves = [Move(donors[int(span.donor_id)], span.donor_start, span.target_start, span.length) for span in checked]
        # [layers, kv_factor, tokens]; the larger of K and V decides
        layers = [deviation(moves, fresh, layer, self._rotation) for layer in range(self._geometry.num_layers)]
        values = torch.stack(layers).amax(dim=1).cpu().numpy().astype(np.float32)
        lengths = tuple(span.length for span in checked)
        return PromptDeviations(family, values, lengths, plan.reused_tokens - sum(lengths), plan.matched_tokens)

    def _plan(self, tokens: TokenisedCase) -> SemanticKvPlan | None:
        index = SpanIndex()
        for number, donor in enumerate(tokens.donors):
            index.add(_NAMESPACE, str(number), np.asarray(donor, dtype=np.int32))
        planner = Planner(index, self._settings, ReusePolicy.POSITION_FIX, self._geometry.num_layers)
        lookup = LookupRequest(
            request_id=0,
            namespace_key=_NAMESPACE,
            tokens=np.asarray(tokens.prompt, dtype=np.int32),
            num_computed_tokens=0,
            block_size=_BLOCK_SIZE,
            mode=EngineMode.WRAPPER,
            publication_guard=True,
        )
        return planner.plan(lookup).plan

    def _prefill(self, texts: Sequence[Sequence[int]]) -> list[PagedKv]:
        """Computes each text cold, into blocks of its own."""
        geometry = self._geometry
        counts = [geometry.blocks_for(len(text)) for text in texts]
        inner = (geometry.kv_heads, geometry.block_size, geometry.head_dim)
        shape = (sum(counts), geometry.num_layers, 2, *inner)
        pool = torch.zeros(shape, dtype=self._model.dtype, device=self._model.device)
        filled, first = [], 0
        for text, count in zip(texts, counts, strict=True):
            for layer, pair in enumerate(self._computed(text)):
                for factor, rows in enumerate(pair):  # [kv_heads, tokens, head_dim]
                    padded = torch.nn.functional.pad(rows, (0, 0, 0, count * geometry.block_size - len(text)))
                    blocks = padded.unflatten(1, (count, geometry.block_size)).transpose(0, 1)
                    pool[first : first + count, layer, factor] = blocks
            filled.append(PagedKv(pool.flatten(3), torch.arange(first, first + count), geometry))
            first += count
        return filled

    @torch.inference_mode()
    def _computed(self, text: Sequence[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, [kv_heads, tokens, head_dim], from a cold run without a head."""
        token_ids = torch.tensor([list(text)], device=self._model.device)
        with sdpa_kernel(_ATTENTION):
            cache = self._model.base_model(token_ids, use_cache=True).past_key_values
        # Transformers 4.53 keeps its caches in two lists, later ones in layers.
        layers = getattr(cache, "layers", None)
        found = (
            zip(cache.key_cache, cache.value_cache, strict=True)
            if layers is None
            else ((layer.keys, layer.values) for layer in layers)
        )
        return [(keys[0], values[0]) for keys, values in found]
