"""Serves the groups of an arm in batches: donors of many groups first, then their prompts together."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.sampling import SamplingParams
from validation.arms import COLD_AGAIN
from validation.audit_log import read_events, settled
from validation.cases import MAX_FORCED_TOKENS, Tokeniser, groups
from validation.engines import EngineSettings
from validation.quality.answers import Answer, Reuse, first_distribution, logits_of, loss_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from validation.arms import Arm
    from validation.cases import Case, TokenisedCase
    from validation.engines import ArmEngine, Engines

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

    def __init__(self, engines: Engines, cases: Sequence[Case], settings: BatchSettings) -> None:
        self._engines, self._settings, self._cases = engines, settings, cases
        self._tokeniser = Tokeniser(engines, settings.max_tokens)
        self._tokens = {case.id: self._tokeniser.tokenise(case) for case in cases}

    @property
    def num_cases(self) -> int:
        return len(self._tokens)

    def tokens_of(self, case: Case) -> TokenisedCase:
        return self._tokens[case.id]

    def answers(
        self, arm: Arm, cases: Sequence[Case] | None = None, on_step: OnStep = lambda _: None
    ) -> dict[str, Answer]:
        """The answers of all cases, or of `cases`, under `arm` by id; `on_step` gets the id of each.

        One engine serves them all. Raises SemBlendError.
        """
        order = groups(list(self._cases if cases is None else cases))
        # A second cold run meets the prompts in other batches, so that it shows what batching alone changes.
        order = order[::-1] if arm.name == COLD_AGAIN else order
        found: dict[int, Answer] = {}
        with tempfile.TemporaryDirectory(prefix="answers-") as folder:
            audit = Path(folder) / "audit.jsonl"
            engine = self._engines.open(arm, self._engine_settings(order), audit)
            try:
                for first in range(0, len(order), self._settings.groups):
                    for number, answer in self._chunk(engine, arm, order[first : first + self._settings.groups]):
                        found[number] = answer
                        on_step(answer.case_id)
            finally:
                engine.shutdown()
            if arm.variables is not None:
                ended = settled(read_events(audit), max(found, default=0))
                found = {number: replace(each, reuse=Reuse.of(ended[number - 1])) for number, each in found.items()}
        return {answer.case_id: answer for answer in found.values()}

    def _chunk(self, engine: ArmEngine, arm: Arm, chunk: Sequence[list[Case]]) -> Iterator[tuple[int, Answer]]:
        """Each case's answer, with the number of its request."""
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
                yield output.request_id, self._answer(case, output)

    def _forced(self, case: Case) -> tuple[int, ...] | None:
        """The reference of a text without one right answer: it is scored, not answered."""
        return None if case.known_answer else self._tokens[case.id].forced

    def _answer(self, case: Case, output: Any) -> Answer:
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
            reuse=Reuse(cached=output.cached_tokens),
        )

    def _engine_settings(self, order: Sequence[list[Case]]) -> EngineSettings:
        room = max(self._settings.max_tokens, MAX_FORCED_TOKENS) + _BLOCK_ROOM
        served = [self._tokens[case.id] for group in order for case in group]
        longest = max(len(text) for tokens in served for text in (tokens.prompt, *tokens.donors)) + room
        at_once = min(self._settings.groups, len(order))
        return EngineSettings(
            model=self._settings.model,
            # Twice: for those that run, and for what the groups' first prompts leave to their further questions.
            pool_tokens=2 * at_once * longest,
            host_bytes=self._host_bytes(order),
            min_span=self._settings.min_span,
            batch_size=self._settings.batch_size,
        )

    def _host_bytes(self, order: Sequence[list[Case]]) -> int:
        """At least twice the donors of the groups that are served together, and their prompts, which are kept too."""
        tokens = [
            sum(map(len, self._tokens[group[0].id].donors)) + sum(len(self._tokens[case.id].prompt) for case in group)
            for group in order
        ]
        return max(self._settings.host_bytes, 2 * max(tokens) * self._settings.groups * self._engines.token_bytes)
