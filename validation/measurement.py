"""Serves every case in every arm and turns what came back into samples."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation import metrics
from validation.arms import COLD, COLD_AGAIN, EXACT_PREFIX, Arm
from validation.audit_log import AuditCounts, concerns, read_events
from validation.cases import groups
from validation.comparison import check_cold, compare
from validation.embedded_engine import open_engine
from validation.engines import EngineSettings
from validation.serving import Server
from validation.tokenised import MAX_FORCED_TOKENS, Tokeniser

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Any

    from engine_wrapper.embedded.model_runner import ModelRunner
    from validation.cases import Case
    from validation.samples import Sample
    from validation.serving import Served, ServedDonor
    from validation.tokenised import TokenisedCase

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


class Measurement:
    """All arms over one model's weights.

    Raises ConfigurationError when a case does not fit the model's context, before anything is served.
    """

    def __init__(self, runner: ModelRunner, cases: Sequence[Case], settings: MeasurementSettings) -> None:
        self._runner, self._settings = runner, settings
        self._tokeniser = Tokeniser(runner, settings.max_tokens)
        self._groups = groups(list(cases))
        self._tokens = {case.id: self._tokeniser.tokenise(case) for case in cases}

    @property
    def steps(self) -> int:
        """How often `run` reports progress."""
        return self._settings.repeats * sum(len(group) for group in self._groups)

    @property
    def _connected(self) -> list[Arm]:
        """Arms with a connector, which writes an audit log."""
        return [arm for arm in self._settings.arms if arm.variables is not None]

    @property
    def longest_prompt(self) -> list[int]:
        return max((tokens.prompt for tokens in self._tokens.values()), key=len)

    def run(self, on_step: OnStep = lambda _: None) -> Measured:
        """Serves everything; `on_step` gets the id of each case that is done. Raises SemBlendError."""
        samples: list[Sample] = []
        events: list[dict[str, Any]] = []
        with tempfile.TemporaryDirectory(prefix="validation-") as folder:
            for repeat in range(self._settings.repeats):
                audit = {arm.name: Path(folder) / f"{arm.name}-{repeat}.jsonl" for arm in self._connected}
                with ExitStack() as stack:
                    servers = {arm: self._server(stack, arm, audit.get(arm.name)) for arm in self._settings.arms}
                    warm_up = {arm.name: self._warm_up(arm, server) for arm, server in servers.items()}
                    for index, group in enumerate(self._groups):
                        samples.extend(self._measure(servers, group, repeat, index, on_step))
                for name, path in audit.items():
                    served = [event for event in read_events(path) if not concerns(event, warm_up[name])]
                    events.extend({**event, "arm": name, "repeat": repeat} for event in served)
        counts = {arm.name: AuditCounts.of(events, arm.name) for arm in self._connected}
        return Measured(samples, counts, events)

    # -- engines ---------------------------------------------------------------------------------------------------

    def _server(self, stack: ExitStack, arm: Arm, audit_path: Path | None) -> Server:
        settings = EngineSettings(
            model=self._settings.model,
            pool_tokens=self._pool_tokens(),
            host_bytes=self._host_bytes(),
            min_span=self._settings.min_span,
        )
        engine = open_engine(arm, settings, self._runner, None if audit_path is None else str(audit_path))
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
        facts = self._runner.facts
        token_bytes = 2 * facts.num_layers * facts.kv_heads * facts.head_dim * self._runner.dtype.itemsize
        return max(MIN_HOST_BYTES, 2 * donors * token_bytes)

    def _warm_up(self, arm: Arm, server: Server) -> frozenset[int]:
        """Serves a shifted text under a salt of its own, so that first-call costs fall on nobody; the request ids."""
        donor = self.longest_prompt[:WARM_UP_TOKENS]
        donors = server.serve_donors((donor,), WARM_UP_SALT) if arm.serves_donors else []
        served = server.serve(donor[-1:] + donor, WARM_UP_SALT)
        return frozenset([served.request_id, *(each.request_id for each in donors)])

    # -- one group -------------------------------------------------------------------------------------------------

    def _measure(
        self, servers: Mapping[Arm, Server], group: list[Case], repeat: int, index: int, on_step: OnStep
    ) -> list[Sample]:
        # Alternating the order keeps a machine that slows down over time from favouring one arm.
        arms = self._settings.arms
        turn = (index + repeat) % len(arms)
        order = arms[turn:] + arms[:turn]
        donors = {
            arm.name: servers[arm].serve_donors(self._tokens[group[0].id].donors, None)
            for arm in order
            if arm.serves_donors
        }
        samples: list[Sample] = []
        for case in group:
            salts = {arm: f"{case.group}/{repeat}" if arm.isolated else None for arm in order}
            tokens = self._tokens[case.id]
            served = {arm.name: servers[arm].serve(tokens.prompt, salts[arm]) for arm in order}
            check_cold(case, served)
            target = tokens.forced or tuple(served[COLD].tokens)
            perplexities = {
                arm.name: _perplexity(servers[arm], tokens.prompt, salts[arm], served[arm.name], target)
                for arm in order
            }
            cached = served[EXACT_PREFIX].exact_prefix_tokens
            for arm in arms:
                expected = min(_exact_prefix(tokens, donors.get(arm.name, [])), cached)
                samples.append(compare(case, arm.name, repeat, served, perplexities, expected))
            on_step(case.id)
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
