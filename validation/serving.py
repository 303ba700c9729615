"""One arm's engine at work: donors, prompts, and prompts whose answer is forced."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from validation.cases import Tokeniser
    from validation.engines import ArmEngine


@dataclass(frozen=True, slots=True)
class ServedDonor:
    """A donor may itself be served from earlier donors' KV; then it leaves no exact prefix in the engine."""

    request_id: int
    reused_tokens: int

    def settled(self, event: Mapping[str, Any]) -> ServedDonor:
        """With what the audit log's event `request_settled` tells."""
        return replace(self, reused_tokens=int(event["reused_tokens"]))


@dataclass(frozen=True, slots=True)
class Served:
    """One request's result; `logits` [answer tokens, vocab] are those that chose each token, `ttft_s` seconds."""

    request_id: int
    prompt_tokens: int
    tokens: list[int]
    text: str
    logits: torch.Tensor
    ttft_s: float
    exact_prefix_tokens: int
    reused_tokens: int
    computed_tokens: int
    outcome: str | None
    reason: str | None

    def settled(self, event: Mapping[str, Any]) -> Served:
        """With what the audit log's event `request_settled` tells."""
        return replace(
            self,
            exact_prefix_tokens=int(event["exact_prefix_tokens"]),
            reused_tokens=int(event["reused_tokens"]),
            computed_tokens=self.computed_tokens + int(event["computed_holes"]),
            outcome=event["outcome"],
            reason=event["reason"],
        )


class Server:
    """Serves one request after the other and waits after each until everything it leaves behind can be found."""

    def __init__(self, engine: ArmEngine, tokeniser: Tokeniser) -> None:
        self._engine, self._tokeniser = engine, tokeniser

    def serve_donors(self, donors: tuple[list[int], ...], salt: str | None) -> list[ServedDonor]:
        served = []
        for donor in donors:
            [output] = self._engine.generate([donor], SamplingParams(max_tokens=1), cache_salt=salt)
            served.append(ServedDonor(output.request_id, output.reused_tokens))
            self._engine.settle()
        return served

    def serve(self, prompt: list[int], salt: str | None, forced: tuple[int, ...] | None = None) -> Served:
        """Answers greedily, or with the `forced` tokens. Raises SemBlendError when the engine gives no answer."""
        [output] = self._engine.generate([prompt], self._tokeniser.sampling(forced), cache_salt=salt)
        self._engine.settle()
        [completion] = output.outputs
        if completion.generation_logits is None or output.time_to_first_token is None:
            raise SemBlendError(f"The engine gave no answer: {output.error or completion.finish_reason}.")
        return Served(
            request_id=output.request_id,
            prompt_tokens=len(prompt),
            tokens=list(completion.token_ids),
            text=self._tokeniser.text(completion.token_ids),
            logits=completion.generation_logits,
            ttft_s=output.time_to_first_token,
            exact_prefix_tokens=output.cached_tokens,
            reused_tokens=output.reused_tokens,
            computed_tokens=output.computed_tokens,
            outcome=output.reuse_outcome,
            reason=output.reuse_reason,
        )
