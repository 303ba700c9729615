"""What a drafter loses that has no KV of moved tokens: why vLLM's EAGLE, MTP and draft models are refused.

In `python -m benchmarks.evidence.drafts --model smollm2` a model drafts its own greedy answers token by token, and
would have all accepted if KV of moved tokens were there. EAGLE and MTP, which read hidden rows too, may lose less."""

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.program import Count, run_counted
from semblend_trt.plan import PlanSpan
from validation import models
from validation.calibration.deviations import DeviationCollector
from validation.cases import Tokeniser
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import FamilyRequest, write_cases
from validation.results import Results

_ANSWER_TOKENS, _PROMPT_TOKENS, _MIN_SPAN = 48, 1_024, 64


@torch.inference_mode()
def accepted_share(model: Any, prompt: list[int], spans: Iterable[PlanSpan]) -> float:
    """Return the share of the greedy answer's tokens that the model drafts without KV of the spans that are moved."""
    answered = model.generate(torch.tensor([prompt]), max_new_tokens=_ANSWER_TOKENS, do_sample=False)
    count, kept = answered.shape[1] - len(prompt), np.ones(answered.shape[1], dtype=bool)
    for span in spans:
        kept[span.target_start : span.target_end] = span.exact
    places = torch.from_numpy(np.flatnonzero(kept))
    logits = model(answered[:, places], position_ids=places[None], use_cache=False).logits
    return float((logits[0, -count - 1 : -1].argmax(-1) == answered[0, -count:]).float().mean())


def run(groups: int, rows: Results, model: str) -> None:
    """Draft for prompts of each family, and add its row."""
    runner = models.load(str(models.smollm2_folder()) if model == models.SMOLLM2 else model or None, "cpu", "float32")
    engines = EmbeddedEngines(runner)
    tokeniser, collector = Tokeniser(engines, _ANSWER_TOKENS), DeviationCollector(runner.model, engines, _MIN_SPAN)
    for family in ("volatile", "instruction", "needle", "two_hop"):
        cases = tokeniser.tokenise_all(write_cases(engines, FamilyRequest((family,), groups, 1, _PROMPT_TOKENS)))
        planned = [(each.prompt, plan.spans) for each in cases if (plan := collector.plan_of(each))]
        shares, how = [accepted_share(runner.model, *each) for each in planned], f"{len(planned)} prompts"
        rows.add(f"drafts_accepted_{family}", float(np.mean(shares)), "share", how, better="higher")


_MODEL = {"default": "", "help": f"folder or id, or {models.SMOLLM2} (default: the shipped model)"}
main = partial(run_counted, {"drafts": run}, __doc__, (Count("groups", 12, "prompts a family"),), model=_MODEL)


if __name__ == "__main__":
    main()
