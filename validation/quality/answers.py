"""What one arm's engine answered to one prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens by where they came from, and what the connector says about it.

    `cached` are the engine's own exact prefix, `offered` those of the plan's spans, `checked` those compared with their
    donor's KV, `reused` those whose KV stayed the donor's, `recomputed` the offered ones that did not.
    `largest_kept`: largest deviation of a checked token that is reused.
    """

    cached: int = 0
    offered: int = 0
    checked: int = 0
    reused: int = 0
    recomputed: int = 0
    largest_kept: float = 0.0
    outcome: str | None = None
    reason: str | None = None

    @classmethod
    def of(cls, settled: Mapping[str, Any]) -> Reuse:
        """What the audit log's event `request_settled` tells; what is not known of a check counts as nothing."""
        offered, reused = int(settled["offered_tokens"]), int(settled["reused_tokens"])
        return cls(
            cached=int(settled["exact_prefix_tokens"]),
            offered=offered,
            checked=int(settled["checked_tokens"] or 0),
            reused=reused,
            recomputed=offered - reused,
            largest_kept=float(settled["largest_kept"] or 0.0),
            outcome=settled["outcome"],
            reason=settled["reason"],
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` and `text` are the greedy answer, or, where a reference was forced, the likeliest token at each of its
    positions. `loss`: mean negative log-likelihood of the forced reference in nats a token, None without one.
    `first`: float32 [vocabulary], log-probabilities of the first token.
    """

    case_id: str
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    loss: float | None
    first: npt.NDArray[np.float32]
    reuse: Reuse


def logits_of(output: Any, case_id: str) -> torch.Tensor:
    """The logits [tokens, vocabulary] of a finished request; raises SemBlendError when it failed."""
    [completion] = output.outputs
    if completion.generation_logits is None:
        raise SemBlendError(f"Case {case_id}: the engine gave no answer: {output.error or completion.finish_reason}.")
    logits: torch.Tensor = completion.generation_logits
    return logits


def first_distribution(logits: torch.Tensor) -> npt.NDArray[np.float32]:
    """Log-probabilities of the first row, float32 [vocabulary], on the host."""
    row = torch.log_softmax(logits[0].double(), dim=-1).float().cpu()
    return np.asarray(row.numpy(), dtype=np.float32)


def loss_of(logits: torch.Tensor, forced: Sequence[int]) -> float:
    """Mean negative log-likelihood of the forced tokens in nats; row i predicts token i."""
    target = torch.as_tensor(forced, dtype=torch.int64, device=logits.device)
    return float(torch.nn.functional.cross_entropy(logits[: len(forced)].double(), target))


def divergence(reference: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """KL(reference || other) in nats between two rows of log-probabilities; never below 0."""
    ours = reference.astype(np.float64)
    return max(0.0, float((np.exp(ours) * (ours - other.astype(np.float64))).sum()))
