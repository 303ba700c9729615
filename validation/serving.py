"""Answers of an arm's engine, and what its connector's audit log tells of each request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.errors import SemBlendError
from validation import metrics
from validation.engines import ended_requests

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch

    from validation.arms import Arm
    from validation.cases import Tokeniser
    from validation.engines import ArmEngine, AuditFile


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where a prompt's tokens came from, in tokens, and how the request ended for the connector.

    `cached`: the engine's own exact prefix; `offered`: the plan's spans; `sampled`, and `checked` behind it: compared
    with the donor's KV; `reused`: the donor's KV was kept; `recomputed`: offered and not reused. `largest_kept`:
    largest deviation of a token that was compared and is reused. `generation`: the highest of the plan's donors.
    `spans`: where its runs begin in the prompt, and their lengths.
    """

    cached: int = 0
    offered: int = 0
    checked: int = 0
    reused: int = 0
    recomputed: int = 0
    largest_kept: float = 0.0
    sampled: int = 0
    outcome: str | None = None
    reason: str | None = None
    generation: int = 0
    spans: tuple[tuple[int, int], ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether the KV is a cold run's: nothing was placed, or a check has rejected all of it."""
        return not self.reused and bool(self.checked or self.sampled or not self.offered)

    @classmethod
    def of(cls, event: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Reuse:
        """From the audit events `request_settled` and, where a plan was carried out, `plan_dispatched`; what is not
        known of a check counts as 0."""
        return cls(
            cached=event["exact_prefix_tokens"],
            offered=event["offered_tokens"],
            checked=event["checked_tokens"] or 0,
            reused=event["reused_tokens"],
            recomputed=event["offered_tokens"] - event["reused_tokens"],
            largest_kept=event["largest_kept"] or 0.0,
            sampled=event["sampled_tokens"] or 0,
            outcome=event["outcome"],
            reason=event["reason"],
            generation=0 if plan is None else plan["generation"],
            spans=() if plan is None else tuple((start, length) for _, _, start, length in plan["spans"]),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one prompt.

    `tokens` and `text`: the greedy answer, or the likeliest token at each position of a forced answer. `logits`
    [tokens, vocabulary] are those behind `tokens`. `loss`: mean negative log-likelihood of a forced answer, nats a
    token. `likelihood`: see Sample. `ttft_s`: seconds to the first token, None where it is not known.
    """

    request_id: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    logits: torch.Tensor
    loss: float | None
    ttft_s: float | None
    reuse: Reuse
    likelihood: float | None = None

    @property
    def computed_tokens(self) -> int:
        return self.prompt_tokens - self.reuse.cached - self.reuse.reused

    def with_first_row(self) -> Answer:
        """The answer with the logits of its first token only, on the host."""
        return replace(self, logits=self.logits[:1].float().cpu().clone())


@dataclass(slots=True)
class ArmServer:
    """One arm's running engine. Each call waits until what it served can be found by the next."""

    arm: Arm
    engine: ArmEngine
    tokeniser: Tokeniser
    audit: AuditFile

    def serve_donors(self, donors: Sequence[list[int]], salt: str | None = None) -> list[int]:
        """Serves all donors together, where the arm serves any; the numbers of their requests."""
        if not (self.arm.serves_donors and donors):
            return []
        outputs = self.engine.generate(donors, SamplingParams(max_tokens=1), salt)
        self.engine.settle()
        return [output.request_id for output in outputs]

    def answers(
        self,
        prompts: Sequence[list[int]],
        salts: Sequence[str | None],
        forced: Sequence[tuple[int, ...] | None],
    ) -> list[Answer]:
        """Answers all prompts together, greedily or with the `forced` tokens. Raises SemBlendError."""
        params = [self.tokeniser.sampling(each) for each in forced]
        outputs = self.engine.generate(prompts, params, salts)
        self.engine.settle()
        return [self._answer(output, target) for output, target in zip(outputs, forced, strict=True)]

    def reuse(self, asked: int = 0) -> dict[int, Reuse]:
        """The reuse of each request by its number, as far as the audit file was read; empty without a connector.

        Raises SemBlendError when the audit log tells of fewer than `asked` requests.
        """
        if self.arm.variables is None:
            return {}
        events = self.audit.events
        ended = enumerate(ended_requests(events, asked), start=1)
        plans = {each["request_id"]: each for each in events if each["event"] == "plan_dispatched"}
        return {number: Reuse.of(event, plans.get(event["request_id"])) for number, event in ended}

    def _answer(self, output: Any, forced: tuple[int, ...] | None) -> Answer:
        [completion] = output.outputs
        logits = completion.generation_logits
        if logits is None:
            raise SemBlendError(f"The engine gave no answer: {output.error or completion.finish_reason}.")
        tokens = completion.token_ids if forced is None else logits.argmax(dim=-1).tolist()
        return Answer(
            request_id=output.request_id,
            prompt_tokens=len(output.prompt_token_ids),
            tokens=tuple(tokens),
            text=self.tokeniser.text(tokens),
            logits=logits,
            loss=None if forced is None else metrics.loss(logits, forced),
            ttft_s=output.time_to_first_token,
            reuse=Reuse(cached=output.cached_tokens),
        )
