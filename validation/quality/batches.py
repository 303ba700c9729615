"""Serves the groups of an arm in batches: donors of many groups first, then their prompts together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.sampling import SamplingParams
from validation.arms import COLD_AGAIN
from validation.cases import groups
from validation.engines import EngineSettings, open_engine
from validation.quality.answers import Answer, Reuse, first_distribution, logits_of, loss_of
from validation.tokenised import MAX_FORCED_TOKENS, Tokeniser

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from engine_wrapper.embedded.llm import LLM
    from engine_wrapper.embedded.model_runner import ModelRunner
    from validation.arms import Arm
    from validation.cases import Case
    from validation.tokenised import TokenisedCase

OnStep = Callable[[str], None]

# What a request's last block and the next one may take beyond its tokens.
_BLOCK_ROOM = 128


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """`groups` are served together, `batch_size` requests at once; `host_bytes` hold at least their donors."""

    model: str
    max_tokens: int = 16
    min_span: int = 64
    groups: int = 32
    batch_size: int = 32
    host_bytes: int = 4 << 30


class BatchServer:
    """Cases of one model, served under any arm.

    Raises ConfigurationError when a case does not fit the model's context, before anything is served.
    """

    def __init__(self, runner: ModelRunner, cases: Sequence[Case], settings: BatchSettings) -> None:
        self._runner, self._settings = runner, settings
        self._tokeniser = Tokeniser(runner, settings.max_tokens)
        self._groups = groups(list(cases))
        self._tokens = {case.id: self._tokeniser.tokenise(case) for case in cases}

    @property
    def num_cases(self) -> int:
        return len(self._tokens)

    def tokens_of(self, case: Case) -> TokenisedCase:
        return self._tokens[case.id]

    def answers(self, arm: Arm, on_step: OnStep = lambda _: None) -> dict[str, Answer]:
        """Every case's answer under `arm`, by id; `on_step` gets the id of each. Raises SemBlendError."""
        # A second cold run meets the prompts in other batches, so that it shows what batching alone changes.
        order = self._groups[::-1] if arm.name == COLD_AGAIN else self._groups
        engine = open_engine(arm, self._engine_settings(), self._runner, None)
        found: dict[str, Answer] = {}
        try:
            for first in range(0, len(order), self._settings.groups):
                for answer in self._chunk(engine, arm, order[first : first + self._settings.groups]):
                    found[answer.case_id] = answer
                    on_step(answer.case_id)
        finally:
            engine.shutdown()
        return found

    def _chunk(self, engine: LLM, arm: Arm, chunk: Sequence[list[Case]]) -> Iterator[Answer]:
        if arm.serves_donors:
            donors = [donor for group in chunk for donor in self._tokens[group[0].id].donors]
            engine.generate(donors, SamplingParams(max_tokens=1))
            engine.settle()
        # One question of every group at a time: in a cold arm the next ones find the first one's KV.
        for together in zip_longest(*chunk):
            cases = [case for case in together if case is not None]
            salts = [case.group if arm.isolated else None for case in cases]
            params = [self._tokeniser.sampling(self._forced(case)) for case in cases]
            outputs = engine.generate([self._tokens[case.id].prompt for case in cases], params, salts)
            engine.settle()
            for case, output in zip(cases, outputs, strict=True):
                yield self._answer(engine, case, output)

    def _forced(self, case: Case) -> tuple[int, ...] | None:
        """The reference of a text without one right answer: it is scored, not answered."""
        return None if case.known_answer else self._tokens[case.id].forced

    def _answer(self, engine: LLM, case: Case, output: Any) -> Answer:
        logits = logits_of(output, case.id)
        forced = self._forced(case)
        tokens = output.outputs[0].token_ids if forced is None else logits.argmax(dim=-1).tolist()
        return Answer(
            case_id=case.id,
            prompt_tokens=len(self._tokens[case.id].prompt),
            tokens=tuple(tokens),
            text=self._tokeniser.text(tokens),
            loss=None if forced is None else loss_of(logits, forced),
            first=first_distribution(logits),
            reuse=_reuse_of(engine, output),
        )

    def _engine_settings(self) -> EngineSettings:
        room = max(self._settings.max_tokens, MAX_FORCED_TOKENS) + _BLOCK_ROOM
        longest = max(len(text) for tokens in self._tokens.values() for text in (tokens.prompt, *tokens.donors)) + room
        at_once = min(self._settings.groups, len(self._groups))
        return EngineSettings(
            model=self._settings.model,
            # Twice: for those that run, and for what the groups' first prompts leave to their further questions.
            pool_tokens=2 * at_once * longest,
            host_bytes=self._host_bytes(),
            min_span=self._settings.min_span,
            batch_size=self._settings.batch_size,
        )

    def _host_bytes(self) -> int:
        """At least twice the donors of the groups that are served together, and their prompts, which are kept too."""
        facts = self._runner.facts
        token_bytes = 2 * facts.num_layers * facts.kv_heads * facts.head_dim * self._runner.dtype.itemsize
        tokens = [
            sum(map(len, self._tokens[group[0].id].donors)) + sum(len(self._tokens[case.id].prompt) for case in group)
            for group in self._groups
        ]
        return max(self._settings.host_bytes, 2 * max(tokens) * self._settings.groups * token_bytes)


def _reuse_of(engine: LLM, output: Any) -> Reuse:
    """What the connector settled for the request; without a plan nothing was offered."""
    settled = None if engine.connector_scheduler is None else engine.connector_scheduler.outcomes.of(output.request_id)
    evidence = {} if settled is None else settled.evidence

    def tokens(name: str, otherwise: int = 0) -> int:
        found = evidence.get(name)
        return otherwise if found is None else int(found)

    reused = tokens("reused_tokens", output.reused_tokens)
    offered = tokens("offered_tokens", reused)
    return Reuse(
        cached=output.cached_tokens,
        offered=offered,
        checked=tokens("checked_tokens"),
        reused=reused,
        recomputed=offered - reused,
        largest_kept=float(evidence.get("largest_kept") or 0.0),
        outcome=output.reuse_outcome if settled is None else settled.outcome.value,
        reason=output.reuse_reason if settled is None else settled.reason,
    )
