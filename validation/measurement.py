"""Serves every case in every arm and turns what came back into samples."""

from __future__ import annotations

import itertools
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation import metrics
from validation.arms import COLD, COLD_AGAIN, EXACT_PREFIX, Arm
from validation.audit_log import AuditCounts, concerns, read_events, settled
from validation.cases import MAX_FORCED_TOKENS, Tokeniser, groups
from validation.comparison import check_cold, compare
from validation.engines import EngineSettings
from validation.serving import Server

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from validation.cases import Case, TokenisedCase
    from validation.engines import Engines
    from validation.samples import Sample
    from validation.serving import Served, ServedDonor

    OnStep = Callable[[str], None]

MIN_HOST_BYTES = 2 << 30
WARM_UP_SALT = "warm-up"
WARM_UP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class MeasurementSettings:
    """`max_tokens` an answer; `min_span` tokens for the connector; `repeats` with new engines each time.

    Raises ConfigurationError without the arms that everything is compared with.
    """

    model: str
    arms: tuple[Arm, ...]
    max_tokens: int
    min_span: int
    repeats: int = 1

    def __post_init__(self) -> None:
        names = [arm.name for arm in self.arms]
        missing = [name for name in (COLD, COLD_AGAIN, EXACT_PREFIX) if name not in names]
        if missing or len(set(names)) < len(names):
            raise ConfigurationError(
                f"The arms are {', '.join(names)}; each may be named once, and {COLD}, {COLD_AGAIN} and {EXACT_PREFIX} "
                "must be among them."
            )


@dataclass(frozen=True, slots=True)
class Measured:
    """All samples, each policy arm's audit counts, and its audit events with `arm` and `repeat` added."""

    samples: list[Sample]
    audit: dict[str, AuditCounts]
    events: list[dict[str, Any]]


@dataclass(slots=True)
class _Round:
    """What the arms of one repeat served: each group's donors by group and arm, answers by case and arm. Of their
    logits only the first row is kept."""

    donors: dict[tuple[str, str], list[ServedDonor]] = field(default_factory=dict)
    served: dict[str, dict[str, Served]] = field(default_factory=dict)
    perplexities: dict[str, dict[str, float]] = field(default_factory=dict)

    def settle(self, arm: str, ended: Sequence[Mapping[str, Any]]) -> None:
        """Takes from the audit log what the arm's engine does not tell; `ended` in the order of the requests."""
        for (group, name), donors in self.donors.items():
            if name == arm:
                self.donors[group, name] = [donor.settled(ended[donor.request_id - 1]) for donor in donors]
        for by_arm in self.served.values():
            by_arm[arm] = by_arm[arm].settled(ended[by_arm[arm].request_id - 1])


class Measurement:
    """All arms over one model's weights: side by side where engines share them, else one arm after the other.

    Raises ConfigurationError when a case does not fit the model's context, before anything is served.
    """

    def __init__(self, engines: Engines, cases: Sequence[Case], settings: MeasurementSettings) -> None:
        self._engines, self._settings = engines, settings
        self._tokeniser = Tokeniser(engines, settings.max_tokens)
        self._groups = groups(list(cases))
        self._tokens = {case.id: self._tokeniser.tokenise(case) for case in cases}

    @property
    def steps(self) -> int:
        """How often `run` reports progress."""
        return self._settings.repeats * len(self._turns) * sum(len(group) for group in self._groups)

    @property
    def _turns(self) -> list[tuple[Arm, ...]]:
        """The arms that are served together. Others' answers are compared with cold's, so that it comes first."""
        arms = sorted(self._settings.arms, key=lambda arm: arm.name != COLD)
        return [(arm,) for arm in arms] if self._engines.starts_slowly else [self._settings.arms]

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
                events += self._serve(arms, repeat, found, on_step)
            samples += self._compared(repeat, found)
        counts = {
            arm.name: AuditCounts.of(events, arm.name) for arm in self._settings.arms if arm.variables is not None
        }
        return Measured(samples, counts, events)

    # -- engines ---------------------------------------------------------------------------------------------------

    def _serve(self, arms: tuple[Arm, ...], repeat: int, found: _Round, on_step: OnStep) -> list[dict[str, Any]]:
        """Serves all cases under arms whose engines run together; returns what their audit logs tell of them."""
        with tempfile.TemporaryDirectory(prefix="validation-") as folder:
            # An arm with a connector writes an audit log.
            audit = {arm.name: Path(folder) / f"{arm.name}.jsonl" for arm in arms}
            with ExitStack() as stack:
                servers = {arm: self._server(stack, arm, audit[arm.name]) for arm in arms}
                warm_up = {arm.name: self._warm_up(arm, server) for arm, server in servers.items()}
                for index, group in enumerate(self._groups):
                    self._serve_group(servers, group, repeat, index, found, on_step)
            told = {arm.name: read_events(audit[arm.name]) for arm in arms if arm.variables is not None}
        if self._engines.starts_slowly:
            for name, events in told.items():
                last = max(by_arm[name].request_id for by_arm in found.served.values())
                found.settle(name, settled(events, last))
        return [
            {**event, "arm": name, "repeat": repeat}
            for name, events in told.items()
            for event in events
            if not concerns(event, warm_up[name])
        ]

    def _server(self, stack: ExitStack, arm: Arm, audit_path: Path) -> Server:
        settings = EngineSettings(
            model=self._settings.model,
            pool_tokens=self._pool_tokens(),
            host_bytes=self._host_bytes(),
            min_span=self._settings.min_span,
        )
        engine = self._engines.open(arm, settings, audit_path)
        stack.callback(engine.shutdown)
        return Server(engine, self._tokeniser)

    def _pool_tokens(self) -> int:
        """Room for one group's donors and two of its requests; 128 covers the last block of a request."""
        room = self._settings.max_tokens + MAX_FORCED_TOKENS + 128
        return max(
            sum(len(donor) + room for donor in self._tokens[group[0].id].donors)
            + 2 * max(len(self._tokens[case.id].prompt) + room for case in group)
            for group in self._groups
        )

    def _host_bytes(self) -> int:
        """Twice the largest group's donors at least, so that no group drops its own."""
        donors = max(sum(map(len, tokens.donors)) for tokens in self._tokens.values())
        return max(MIN_HOST_BYTES, 2 * donors * self._engines.token_bytes)

    def _warm_up(self, arm: Arm, server: Server) -> frozenset[int]:
        """Serves a shifted text under a salt of its own, so that first-call costs fall on nobody; the request ids."""
        donor = self.longest_prompt[:WARM_UP_TOKENS]
        donors = server.serve_donors((donor,), WARM_UP_SALT) if arm.serves_donors else []
        served = server.serve(donor[-1:] + donor, WARM_UP_SALT)
        return frozenset([served.request_id, *(each.request_id for each in donors)])

    # -- one group -------------------------------------------------------------------------------------------------

    def _serve_group(
        self,
        servers: Mapping[Arm, Server],
        group: list[Case],
        repeat: int,
        index: int,
        found: _Round,
        on_step: OnStep,
    ) -> None:
        # Alternating the order keeps a machine that slows down over time from favouring one arm.
        arms = tuple(servers)
        turn = (index + repeat) % len(arms)
        order = arms[turn:] + arms[:turn]
        for arm in order:
            if arm.serves_donors:
                donors = self._tokens[group[0].id].donors
                found.donors[group[0].group, arm.name] = servers[arm].serve_donors(donors, None)
        for case in group:
            salts = {arm: f"{case.group}/{repeat}" if arm.isolated else None for arm in order}
            tokens = self._tokens[case.id]
            served = found.served.setdefault(case.id, {})
            for arm in order:
                served[arm.name] = servers[arm].serve(tokens.prompt, salts[arm])
            check_cold(case, served)
            target = tokens.forced or tuple(served[COLD].tokens)
            perplexities = found.perplexities.setdefault(case.id, {})
            for arm in order:
                ours = served[arm.name]
                perplexities[arm.name] = _perplexity(servers[arm], tokens.prompt, salts[arm], ours, target)
                served[arm.name] = replace(ours, logits=ours.logits[:1].clone())
            on_step(case.id)

    def _compared(self, repeat: int, found: _Round) -> list[Sample]:
        samples = []
        for case in itertools.chain(*self._groups):
            served, tokens = found.served[case.id], self._tokens[case.id]
            cached = served[EXACT_PREFIX].exact_prefix_tokens
            for arm in self._settings.arms:
                donors = found.donors.get((case.group, arm.name), [])
                expected = min(_exact_prefix(tokens, donors), cached)
                samples.append(compare(case, arm.name, repeat, served, found.perplexities[case.id], expected))
        return samples


def _perplexity(server: Server, prompt: list[int], salt: str | None, served: Served, target: tuple[int, ...]) -> float:
    """Perplexity of `target` as the answer; what was generated is not run again where it begins with it."""
    logits = served.logits[: len(target)]
    if tuple(served.tokens[: len(target)]) != target:
        logits = server.serve(prompt, salt, forced=target).logits
    return metrics.perplexity(logits, target)


def _exact_prefix(tokens: TokenisedCase, donors: Sequence[ServedDonor]) -> int:
    """Tokens that the prompt shares from position 0 on with a donor that the arm computed exactly."""
    shared = (tokens.shared_prefix(index) for index, donor in enumerate(donors) if donor.reused_tokens == 0)
    return max(shared, default=0)
