"""One arm's result on one case beside cold's, as a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semblend_trt.errors import SemBlendError
from validation import metrics
from validation.arms import COLD, COLD_AGAIN
from validation.samples import Sample

if TYPE_CHECKING:
    from collections.abc import Mapping

    from validation.cases import Case
    from validation.serving import Served


def check_cold(case: Case, served: Mapping[str, Served]) -> None:
    """Raises SemBlendError when a cold arm found KV for the timed case of a group: nothing could be compared then."""
    for name in (COLD, COLD_AGAIN):
        if case.is_timed and name in served and served[name].exact_prefix_tokens + served[name].reused_tokens:
            raise SemBlendError(
                f"Case {case.id}: the arm {name} found {served[name].exact_prefix_tokens} cached tokens although "
                "nothing was served under its salt before; the engine does not isolate salts."
            )


def compare(
    case: Case,
    arm: str,
    repeat: int,
    served: Mapping[str, Served],
    perplexities: Mapping[str, float],
    expected_exact_tokens: int,
) -> Sample:
    """`served` and `perplexities` are by arm; `expected_exact_tokens` see Sample."""
    ours, cold, reference = served[arm], served[COLD], case.reference
    rouge1_cold, rouge_l_cold = metrics.rouge_f1(ours.text, cold.text)
    rouge_reference = (None, None) if reference is None else metrics.rouge_f1(ours.text, reference.strip())
    return Sample(
        case_id=case.id,
        workload=case.workload,
        size=case.size,
        expects=case.expects.value,
        arm=arm,
        repeat=repeat,
        timed=case.is_timed,
        answer=ours.text,
        reference=reference,
        ttft_s=ours.ttft_s,
        speedup=cold.ttft_s / ours.ttft_s if case.is_timed else None,
        prompt_tokens=ours.prompt_tokens,
        answer_tokens=len(ours.tokens),
        exact_prefix_tokens=ours.exact_prefix_tokens,
        expected_exact_tokens=expected_exact_tokens,
        reused_tokens=ours.reused_tokens,
        computed_tokens=ours.computed_tokens,
        outcome=ours.outcome,
        reason=ours.reason,
        exact_match=metrics.exact_match(ours.text, reference) if case.known_answer and reference else None,
        rouge1_cold=rouge1_cold,
        rouge_l_cold=rouge_l_cold,
        token_f1_cold=metrics.token_f1(ours.text, cold.text),
        rouge1_reference=rouge_reference[0],
        rouge_l_reference=rouge_reference[1],
        token_f1_reference=None if reference is None else metrics.token_f1(ours.text, reference),
        perplexity=perplexities[arm],
        perplexity_ratio=perplexities[arm] / perplexities[COLD],
        first_token_kl=metrics.kl_divergence(cold.logits[0], ours.logits[0]),
        token_agreement=metrics.token_agreement(ours.tokens, cold.tokens),
    )
