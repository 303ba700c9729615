"""Answers of an arm's engine, and what its connector's audit log tells of each request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.errors import SemBlendError
from validation import metrics
from validation.arms import COLD_AGAIN
from validation.audit_log import ended_requests
from validation.cases import MAX_FORCED_TOKENS, Tokeniser, groups
from validation.engines import EngineSettings, opened

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from validation.arms import Arm
    from validation.cases import Case, TokenisedCase
    from validation.engines import ArmEngine, Engines

OnStep = Callable[[str], None]

# Tokens that a request's last block and the next one may take beyond its own.
BLOCK_ROOM = 128


@dataclass(frozen=True, slots=True)
class Reuse:
    """Where a prompt's tokens came from, in tokens, and how the request ended for the connector.

    `cached`: the engine's own exact prefix; `offered`: the plan's spans; `checked`: compared with the donor's KV;
    `reused`: the donor's KV was kept; `recomputed`: offered and not reused. `largest_kept`: largest deviation of a
    checked token that is reused.
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
    def of(cls, event: Mapping[str, Any]) -> Reuse:
        """From the audit event `request_settled`; what is not known of a check counts as 0."""
        return cls(
            cached=event["exact_prefix_tokens"],
            offered=event["offered_tokens"],
            checked=event["checked_tokens"] or 0,
            reused=event["reused_tokens"],
            recomputed=event["offered_tokens"] - event["reused_tokens"],
            largest_kept=event["largest_kept"] or 0.0,
            outcome=event["outcome"],
            reason=event["reason"],
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer to one prompt.

    `tokens` and `text`: the greedy answer, or the likeliest token at each position of a forced answer. `logits`
    [tokens, vocabulary] are those behind `tokens`. `loss`: mean negative log-likelihood of a forced answer, nats a
    token. `ttft_s`: seconds to the first token, None where it is not known.
    """

    request_id: int
    prompt_tokens: int
    tokens: tuple[int, ...]
    text: str
    logits: torch.Tensor
    loss: float | None
    ttft_s: float | None
    reuse: Reuse

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
    events: list[dict[str, Any]] = field(default_factory=list)

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
        """The reuse of each request by its number, once the engine has ended; empty without a connector.

        Raises SemBlendError when the audit log tells of fewer than `asked` requests.
        """
        if self.arm.variables is None:
            return {}
        return {number: Reuse.of(event) for number, event in enumerate(ended_requests(self.events, asked), start=1)}

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


@contextmanager
def served(engines: Engines, arm: Arm, settings: EngineSettings, tokeniser: Tokeniser) -> Iterator[ArmServer]:
    """Opens the arm's engine; its audit log is read at the end."""
    with opened(engines, arm, settings) as (engine, events):
        yield ArmServer(arm, engine, tokeniser, events)


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """`groups` groups are served together, at most `batch_size` requests at once; `host_bytes` is a minimum."""

    model: str
    max_tokens: int = 16
    min_span: int = 64
    groups: int = 32
    batch_size: int = 32
    host_bytes: int = 4 << 30


class BatchServer:
    """Cases of one model, served in batches under any arm: donors of many groups first, then their prompts together.

    Raises ConfigurationError when a case does not fit the model's context, before anything is served.
    """

    def __init__(self, engines: Engines, cases: Sequence[Case], settings: BatchSettings) -> None:
        self._engines, self._settings, self._cases = engines, settings, cases
        self._tokeniser = Tokeniser(engines, settings.max_tokens)
        self._tokens = {case.id: self._tokeniser.tokenise(case) for case in cases}

    def tokens_of(self, case: Case) -> TokenisedCase:
        return self._tokens[case.id]

    def answers(
        self, arm: Arm, cases: Sequence[Case] | None = None, on_step: OnStep = lambda _: None
    ) -> dict[str, Answer]:
        """The answers of all cases, or of `cases`, under `arm` by id; `on_step` gets the id of each.

        One engine serves them all. Raises SemBlendError.
        """
        order = groups(self._cases if cases is None else cases)
        # A second cold run has other batches, so that it shows what batching alone changes.
        order = order[::-1] if arm.name == COLD_AGAIN else order
        found: dict[str, Answer] = {}
        with served(self._engines, arm, self._engine_settings(order), self._tokeniser) as server:
            for first in range(0, len(order), self._settings.groups):
                for case_id, answer in self._chunk(server, order[first : first + self._settings.groups]):
                    found[case_id] = answer.with_first_row()
                    on_step(case_id)
        reuse = server.reuse(max((answer.request_id for answer in found.values()), default=0))
        # The times of batched prompts are not those of one prompt.
        return {
            name: replace(each, ttft_s=None, reuse=reuse.get(each.request_id, each.reuse))
            for name, each in found.items()
        }

    def _chunk(self, server: ArmServer, chunk: Sequence[list[Case]]) -> Iterator[tuple[str, Answer]]:
        """Each case's id and answer."""
        server.serve_donors([donor for group in chunk for donor in self._tokens[group[0].id].donors])
        # One question of every group at a time: in a cold arm the next questions find the first one's KV.
        for together in zip_longest(*chunk):
            cases = [case for case in together if case is not None]
            tokens = [self._tokens[case.id] for case in cases]
            answers = server.answers(
                [each.prompt for each in tokens],
                [case.group if server.arm.isolated else None for case in cases],
                # Without one right answer, the reference is scored.
                [None if case.known_answer else each.forced for case, each in zip(cases, tokens, strict=True)],
            )
            yield from zip((case.id for case in cases), answers, strict=True)

    def _engine_settings(self, order: Sequence[list[Case]]) -> EngineSettings:
        settings, tokens = self._settings, [[self._tokens[case.id] for case in group] for group in order]
        room = max(settings.max_tokens, MAX_FORCED_TOKENS) + BLOCK_ROOM
        longest = room + max(len(text) for group in tokens for each in group for text in (each.prompt, *each.donors))
        # A group's donors, and its prompts, which are kept too.
        kept = max(sum(map(len, group[0].donors)) + sum(len(each.prompt) for each in group) for group in tokens)
        return EngineSettings(
            model=settings.model,
            # Twice: for running requests, and for the KV that a group's first prompt leaves to the next questions.
            pool_tokens=2 * min(settings.groups, len(order)) * longest,
            host_bytes=max(settings.host_bytes, 2 * kept * settings.groups * self._engines.token_bytes),
            min_span=settings.min_span,
            batch_size=settings.batch_size,
        )
