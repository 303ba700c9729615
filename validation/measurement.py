"""The timed run: every case in every arm, one prompt at a time, as samples."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import SemBlendError
from validation import metrics
from validation.arms import COLD, COLD_AGAIN, EXACT_PREFIX, Arm
from validation.audit_log import AuditCounts, concerns
from validation.cases import MAX_FORCED_TOKENS, Case, Tokeniser, groups
from validation.engines import EngineSettings
from validation.samples import Sample, sample_of
from validation.serving import BLOCK_ROOM, ArmServer, served

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.engines import Engines
    from validation.serving import Answer, OnStep, Reuse

MIN_HOST_BYTES = 2 << 30
WARM_UP_SALT = "warm-up"
WARM_UP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """`arms` include cold, cold_again and exact_prefix, each once. `max_tokens`: of an answer; `min_span`: the
    connector's, in tokens; `repeats`: each with new engines."""

    model: str
    arms: tuple[Arm, ...]
    max_tokens: int
    min_span: int
    repeats: int = 1


@dataclass(frozen=True, slots=True)
class Measured:
    """All samples, each connector arm's audit counts, and its audit events with `arm` and `repeat` added."""

    samples: list[Sample]
    audit: dict[str, AuditCounts]
    events: list[dict[str, Any]]


@dataclass(slots=True)
class _Round:
    """One repeat: `donors` are request numbers by group and arm; `answers` by case and arm; `reuse`, from the audit
    log, by arm and request."""

    donors: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    answers: dict[str, dict[str, Answer]] = field(default_factory=dict)
    reuse: dict[str, dict[int, Reuse]] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)


class Measurement:
    """All arms over one model: with their engines side by side where they share weights, else one after the other.

    Raises ConfigurationError when a case does not fit the model's context, before anything is served.
    """

    def __init__(self, engines: Engines, cases: Sequence[Case], settings: MeasurementSettings) -> None:
        self._engines, self._settings, self._cases = engines, settings, cases
        self._tokeniser = Tokeniser(engines, settings.max_tokens)
        self._tokens = {case.id: self._tokeniser.tokenise(case) for case in cases}
        # cold comes first: the other arms' answers are compared with its own.
        cold_first = sorted(settings.arms, key=lambda arm: arm.name != COLD)
        self._turns = [(arm,) for arm in cold_first] if engines.starts_slowly else [settings.arms]

    @property
    def steps(self) -> int:
        """How often `run` reports progress."""
        return self._settings.repeats * len(self._turns) * len(self._cases)

    @property
    def longest_prompt(self) -> list[int]:
        return max((tokens.prompt for tokens in self._tokens.values()), key=len)

    def run(self, on_step: OnStep = lambda _: None) -> Measured:
        """Serves everything; `on_step` gets the id of each case that is done. Raises SemBlendError."""
        samples: list[Sample] = []
        events: list[dict[str, Any]] = []
        for repeat in range(self._settings.repeats):
            found = _Round()
            for arms in self._turns:
                self._serve(arms, repeat, found, on_step)
            samples += self._compared(repeat, found)
            events += found.events
        counts = {
            arm.name: AuditCounts.of(events, arm.name) for arm in self._settings.arms if arm.variables is not None
        }
        return Measured(samples, counts, events)

    def _serve(self, arms: tuple[Arm, ...], repeat: int, found: _Round, on_step: OnStep) -> None:
        """Serves all cases under arms whose engines run together."""
        with ExitStack() as stack:
            settings = self._engine_settings()
            servers = [stack.enter_context(served(self._engines, arm, settings, self._tokeniser)) for arm in arms]
            warm_up = [self._warm_up(server) for server in servers]
            for index, group in enumerate(groups(self._cases)):
                # The order alternates, so that a machine that slows down over time favours no arm.
                turn = (index + repeat) % len(servers)
                self._serve_group(servers[turn:] + servers[:turn], group, repeat, found, on_step)
        for server, requests in zip(servers, warm_up, strict=True):
            name = server.arm.name
            found.reuse[name] = server.reuse(max(by_arm[name].request_id for by_arm in found.answers.values()))
            about = [event for event in server.events if not concerns(event, requests)]
            found.events += [{**event, "arm": name, "repeat": repeat} for event in about]

    def _engine_settings(self) -> EngineSettings:
        tokens = [[self._tokens[case.id] for case in group] for group in groups(self._cases)]
        room = self._settings.max_tokens + MAX_FORCED_TOKENS + BLOCK_ROOM
        # For one group's donors and two of its requests.
        needed = [
            sum(len(donor) + room for donor in group[0].donors) + 2 * max(len(each.prompt) + room for each in group)
            for group in tokens
        ]
        # Twice the largest group's donors at least, so that no group drops its own.
        donors = max(sum(map(len, each.donors)) for group in tokens for each in group)
        return EngineSettings(
            model=self._settings.model,
            pool_tokens=max(needed),
            host_bytes=max(MIN_HOST_BYTES, 2 * donors * self._engines.token_bytes),
            min_span=self._settings.min_span,
        )

    def _warm_up(self, server: ArmServer) -> frozenset[int]:
        """Serves a shifted text under a salt of its own, before anything is timed; returns the request ids."""
        donor = self.longest_prompt[:WARM_UP_TOKENS]
        donors = server.serve_donors([donor], WARM_UP_SALT)
        [answer] = server.answers([donor[-1:] + donor], [WARM_UP_SALT], [None])
        return frozenset([answer.request_id, *donors])

    def _serve_group(
        self, servers: list[ArmServer], group: list[Case], repeat: int, found: _Round, on_step: OnStep
    ) -> None:
        for server in servers:
            # One after the other: a donor may itself be served from earlier ones.
            donors = [number for each in self._tokens[group[0].id].donors for number in server.serve_donors([each])]
            found.donors[group[0].group, server.arm.name] = donors
        for case in group:
            tokens, answers = self._tokens[case.id], found.answers.setdefault(case.id, {})
            salts = {server.arm.name: f"{case.group}/{repeat}" if server.arm.isolated else None for server in servers}
            for server in servers:
                [answers[server.arm.name]] = server.answers([tokens.prompt], [salts[server.arm.name]], [None])
            _check_cold(case, answers)
            target = tokens.forced or answers[COLD].tokens
            for server in servers:
                ours = answers[server.arm.name]
                # An answer that begins with the scored text need not be run again.
                if ours.tokens[: len(target)] == target:
                    loss: float | None = metrics.loss(ours.logits, target)
                else:
                    [forced] = server.answers([tokens.prompt], [salts[server.arm.name]], [target])
                    loss = forced.loss
                answers[server.arm.name] = replace(ours.with_first_row(), loss=loss)
            on_step(case.id)

    def _compared(self, repeat: int, found: _Round) -> list[Sample]:
        samples = []
        for case in self._cases:
            answers = {
                name: replace(answer, reuse=found.reuse[name].get(answer.request_id, answer.reuse))
                for name, answer in found.answers[case.id].items()
            }
            for arm in self._settings.arms:
                expected = min(self._exact_prefix(case, arm, found), answers[EXACT_PREFIX].reuse.cached)
                num_layers = self._engines.facts.num_layers
                samples.append(sample_of(arm, case, answers[arm.name], answers[COLD], num_layers, repeat, expected))
        return samples

    def _exact_prefix(self, case: Case, arm: Arm, found: _Round) -> int:
        """Tokens that the prompt shares from position 0 on with a donor that the arm computed exactly."""
        reuse, donors = found.reuse[arm.name], found.donors[case.group, arm.name]
        exact = [index for index, number in enumerate(donors) if number not in reuse or reuse[number].reused == 0]
        return max((self._tokens[case.id].shared_prefix(index) for index in exact), default=0)


def _check_cold(case: Case, answers: dict[str, Answer]) -> None:
    """Raises SemBlendError when a cold arm found KV for the timed case of a group."""
    for name in (COLD, COLD_AGAIN):
        if case.is_timed and name in answers and answers[name].reuse.cached:
            raise SemBlendError(
                f"Case {case.id}: the arm {name} found {answers[name].reuse.cached} cached tokens although nothing was "
                "served under its salt before; the engine does not isolate salts."
            )
