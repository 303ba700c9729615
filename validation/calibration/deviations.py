"""Deviations of donors' KV from fresh KV, token by token and in every layer, where a plan would place it.

A check at layer c compares KV after layers 0 to c - 1, which compute all tokens as a cold run does. So two cold runs,
of the donor and of the prompt, give the deviations of every layer.

A planter ranks plants by what a policy misses, as another inside a tenant could serve them (arXiv 2607.19957). It has
the model and its reuse profile, and computes what the check would see. It wants tokens that are kept and yet deviate:
KV close to the victim's own changes no answer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DynamicCache

from engine_wrapper.deviation_check import choose, sample_of, stretches, suspects_of, windows_of
from engine_wrapper.sparse_forward import cache_keyword, latent_rows
from kernels.deviation import FreshRows, Move, deviation
from kernels.kv_move import kv_move
from kernels.layout import PagedKv, indexable, layer_view
from kernels.rope import saturated
from semblend_trt.config import load_settings
from semblend_trt.discovery.planner import LookupRequest, Planner
from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.plan import WINDOW_TOKENS, EngineMode, SemanticKvPlan, SpanCheck
from semblend_trt.policy import ReusePolicy
from semblend_trt.reuse_profile import ReuseProfile
from validation.cases import Case, TokenisedCase, Tokeniser, groups
from validation.engines import Engines, environment
from validation.families.catalog import FamilyRequest, shortest_prompts, write_cases
from validation.models import full_layers_of

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
        """Return the mean deviation of each window of each span, float64 [windows]."""
        return self._means(layer, np.diff(windows_of(self.lengths, WINDOW_TOKENS), prepend=-1) > 0)

    def span_means(self, layer: int) -> npt.NDArray[np.float64]:
        """Return the mean deviation of each span, float64 [spans]."""
        return self._means(layer, np.concatenate([np.arange(length) == 0 for length in self.lengths]))

    def _means(self, layer: int, is_first: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
        starts = np.flatnonzero(is_first)
        sums = np.add.reduceat(self.values[layer].astype(np.float64), starts)
        return np.asarray(sums / np.diff(starts, append=is_first.size), dtype=np.float64)

    def kept_and_compared(
        self, check: SpanCheck | None, head_tokens: int
    ) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which tokens keep the donor's KV, and which are compared with it, by the sample or after it: bool
        [checked tokens] each. The deviations of a sample's tokens are taken as if they were computed over fresh KV."""
        kept = np.concatenate([np.arange(length) >= head_tokens for length in self.lengths])
        compared = np.zeros_like(kept)
        if check is None or not kept.any():
            return kept, compared
        lengths = [length - head_tokens for length in self.lengths if length > head_tokens]
        deviations, exact = self.values[check.layer, kept], self.exact_tokens
        sampled, suspects, parts = np.zeros(len(deviations), dtype=bool), np.ones(len(deviations), dtype=bool), lengths
        if check.sample_every:
            first = sample_of(lengths, check.sample_every, check.window_tokens, seed=0)
            sampled[first] = True
            suspects = suspects_of(check, first, deviations[first], lengths, exact, self.promised)
            exact += int(np.count_nonzero(~suspects))
            if not suspects.all():
                ends = np.cumsum(lengths).tolist()
                spans = [range(end - length, end) for end, length in zip(ends, lengths, strict=True)]
                parts = [len(part) for part in stretches(spans, suspects)]
        compared[kept] = sampled | suspects
        computed = np.zeros_like(suspects)
        if suspects.any():
            computed[suspects] = choose(check, deviations[suspects], parts, exact, self.promised).computed
        kept[kept] = ~computed
        return kept, compared


class DeviationCollector:
    """Collects the deviations of prompts in `model`, a Transformers model of either version.

    They are those of an engine that keeps KV in `kv_dtype`; None is the model's own. fp8 is stored by a scale of 1."""

    def __init__(self, model: Any, engines: Engines, min_span: int, kv_dtype: torch.dtype | None = None) -> None:
        self._engines, facts = engines, engines.facts
        self._geometry = replace(facts.sizes(1), block_size=_BLOCK_SIZE)
        self._rotation, self._model, self._kv_dtype = facts.rotation, model, kv_dtype
        with environment({}):
            self._settings = load_settings(policy=ReusePolicy.POSITION_FIX, min_span_tokens=min_span)

    def collect(self, cases: Sequence[Case]) -> list[PromptDeviations | None]:
        """Return the deviations of the first prompt of each group; None where there is nothing to check."""
        firsts = [group[0] for group in groups(cases)]
        tokens = Tokeniser(self._engines, max_tokens=1).tokenise_all(firsts)
        return [self._of_prompt(case.workload, each) for case, each in zip(firsts, tokens, strict=True)]

    def hardest(self, plants: Sequence[Case], profile: ReuseProfile, count: int) -> list[Case]:
        """Return the `count` plants, each a group, of which the profile's policy misses most."""
        ranked = zip(missed(self.collect(plants), profile), plants, strict=True)
        return [plant for _, plant in sorted(ranked, key=lambda pair: -pair[0])[:count]]

    def _of_prompt(self, family: str, tokens: TokenisedCase) -> PromptDeviations | None:
        if (plan := self.plan_of(tokens)) is None:
            return None
        *donors, fresh = map(self._computed, tokens.texts)
        checked = [span for span in plan.spans if not span.exact]
        moves = [Move(donors[int(span.donor_id)], span.donor_start, span.target_start, span.length) for span in checked]
        if self._kv_dtype is not None:
            # An engine compares what it has placed, which rounds K.
            pool = torch.empty(fresh.pool.shape, dtype=fresh.pool.dtype, device=fresh.pool.device)
            placed = replace(fresh, pool=pool)
            kv_move(moves, placed, self._rotation)
            moves = [Move(placed, move.target_start, move.target_start, move.length) for move in moves]
        # [layers, kv_factor, tokens]; the larger of K and V decides
        layers = [
            deviation(moves, _rows_of(fresh, layer), layer, self._rotation.of_layer(layer))
            for layer in range(self._geometry.num_layers)
        ]
        values = torch.stack(layers).amax(dim=1).cpu().numpy().astype(np.float32)
        lengths = tuple(span.length for span in checked)
        return PromptDeviations(family, values, lengths, plan.reused_tokens - sum(lengths), plan.matched_tokens)

    def plan_of(self, tokens: TokenisedCase) -> SemanticKvPlan | None:
        """Return the plan of reuse without a check; None where no KV would be moved."""
        index = SpanIndex()
        for number, donor in enumerate(tokens.donors):
            index.add(_NAMESPACE, str(number), np.asarray(donor, dtype=np.int32))
        planner = Planner(index, self._settings, ReusePolicy.POSITION_FIX, self._geometry.num_layers)
        prompt = np.asarray(tokens.prompt, dtype=np.int32)
        lookup = LookupRequest(0, _NAMESPACE, prompt, 0, _BLOCK_SIZE, EngineMode.WRAPPER, publication_guard=True)
        plan = planner.plan(lookup).plan
        return None if plan is None or all(span.exact for span in plan.spans) else plan

    @torch.inference_mode()
    def _computed(self, text: Sequence[int]) -> PagedKv:
        """Return K and V of the text from a cold run without a head, in blocks of its own."""
        # Tokens after the text's end fill the last block up; no earlier token sees them.
        count = self._geometry.blocks_for(len(text))
        padded = torch.tensor([[*text, *[0] * (count * _BLOCK_SIZE - len(text))]], device=self._model.device)
        with sdpa_kernel(_ATTENTION):
            # A cache that knows nothing of the model keeps all tokens of layers with a window, too.
            cache, decoder = DynamicCache(), self._model.base_model
            decoder(padded, use_cache=True, **{cache_keyword(type(decoder).forward): cache})
        pairs = ((layer.keys, layer.values) for layer in cache.layers)
        # [layers, kv_factor, 1, kv_heads, tokens, head_dim]
        rows = torch.stack(
            [torch.stack(pair if self._geometry.kv_factor == 2 else [latent_rows(*pair)]) for pair in pairs]
        )
        pool = rows[:, :, 0].unflatten(3, (count, _BLOCK_SIZE)).permute(3, 0, 1, 2, 4, 5).flatten(3)
        pool = pool if self._kv_dtype is None else saturated(pool, self._kv_dtype)
        return PagedKv(pool, torch.arange(count), self._geometry)


def _rows_of(kv: PagedKv, layer: int) -> FreshRows:
    """Return a copy of K and V, or the latent, of one layer at all positions."""
    planes = (indexable(layer_view(kv.pool, kv.geometry, layer, kind)) for kind in range(kv.geometry.kv_factor))
    return FreshRows(*(each[kv.block_ids].transpose(1, 2).flatten(0, 1).view(kv.pool.dtype) for each in planes))


# The planter's family, and the plants that one is chosen from.
PLANTED = "planted"
TRIES = 8


def write_plants(model: Engines, asked: FamilyRequest) -> list[Case]:
    """Return prompts of one question each, as short as possible, so that all that is reused is planted."""
    return write_cases(model, replace(asked, questions=1, tokens=shortest_prompts(model, asked.form)))


def missed(plants: Iterable[PromptDeviations | None], profile: ReuseProfile) -> list[float]:
    """Return for each plant the deviations of all tokens that the profile's policy keeps, summed over the layers that
    it leaves out."""
    terms, above, sums = profile.terms, slice(full_layers_of(profile), None), list[float]()
    for each in plants:
        sums.append(0.0)
        if each is not None and terms is not None:
            kept, _ = each.kept_and_compared(terms.check, terms.head_tokens)
            sums[-1] = float(np.nansum(each.values[above, kept], dtype=np.float64))
    return sums
