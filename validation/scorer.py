"""A second language model that reads the answers: how likely does it find them after the prompt?"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from semblend_trt.errors import ConfigurationError
from semblend_trt.model_tokenizer import reason_of
from validation.metrics import perplexity

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from validation.cases import Case
    from validation.samples import Sample

# The end of a prompt holds the question; more of it makes scoring slow and changes little.
MAX_PROMPT_TOKENS = 1_024


class Scorer:
    """Perplexity of answers under another causal language model with its own tokenizer, in float32."""

    def __init__(self, model: str, device: str) -> None:
        """Loads the model by path or hub id; raises ConfigurationError when that fails."""
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(model)
            self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
        except (OSError, ValueError, KeyError) as error:
            raise ConfigurationError(f"--ppl-model {model!r} cannot be loaded: {reason_of(error)}") from error
        self._device = device
        self._context = int(getattr(self._model.config, "max_position_embeddings", MAX_PROMPT_TOKENS))

    @torch.inference_mode()
    def score(self, prompt: str, answer: str) -> float | None:
        """Perplexity of `answer` behind the end of `prompt`; None for an answer without a token."""
        target = self._tokenizer.encode(answer, add_special_tokens=False)[: self._context // 2]
        if not target:
            return None
        room = min(MAX_PROMPT_TOKENS, self._context - len(target))
        before = self._tokenizer.encode(prompt)[-room:]
        if not before:
            return None
        ids = torch.tensor([before + target], device=self._device)
        logits = self._model(ids, use_cache=False).logits[0, len(before) - 1 : -1].float()
        return perplexity(logits, target)


def scored(
    samples: Sequence[Sample], cases: Sequence[Case], scorer: Scorer, on_step: Callable[[str], None] = lambda _: None
) -> list[Sample]:
    """The samples with `scored_perplexity`; equal answers to one prompt are scored once."""
    prompts = {case.id: case.prompt for case in cases}
    known: dict[tuple[str, str], float | None] = {}
    done = []
    for sample in samples:
        key = (sample.case_id, sample.answer)
        if key not in known:
            known[key] = scorer.score(prompts[sample.case_id], sample.answer)
        done.append(replace(sample, scored_perplexity=known[key]))
        on_step(sample.case_id)
    return done
