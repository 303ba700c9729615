"""Serve cases under arms as samples: timed, one prompt at a time; or in batches, without times."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.errors import SemBlendError
from validation import metrics
from validation.arms import COLD, COLD_AGAIN, COLD_ARM, EXACT_PREFIX, Arm
from validation.cases import MAX_FORCED_TOKENS, Case, Tokeniser, equal_start, groups
from validation.engines import ArmEngine, AuditFile, Engines, EngineSettings, ended_requests, opened
from validation.samples import Answer, Reuse, Sample, sample_of

OnStep = Callable[[str], None]
Cases = Sequence[Case]
Salts = Sequence[str | None]
Forced = Sequence[tuple[int, ...] | None]

# A request's last block and the next one may hold more tokens than its own.
BLOCK_ROOM = 128
WARM_UP_SALT = "warm-up"


@dataclass(slots=True)
class ArmServer:
    """One arm's running engine. When a call returns, the next one can find what it served."""

    arm: Arm
    engine: ArmEngine
    tokeniser: Tokeniser
    audit: AuditFile

    def serve_donors(self, donors: Sequence[list[int]], salts: str | Salts | None = None) -> list[int]:
        """Serve all donors together if the arm serves any, and return their request numbers."""
        if not (self.arm.serves_donors and donors):
            return []
        outputs = self.engine.generate(donors, SamplingParams(max_tokens=1), salts)
        self.engine.settle()
        return [output.request_id for output in outputs]

    def answers(self, prompts: Sequence[list[int]], salts: Salts, forced: Forced) -> list[Answer]:
        """Answer all prompts together, greedily or with the `forced` tokens. Raises SemBlendError."""
        outputs = self.engine.generate(prompts, [self.tokeniser.sampling(each) for each in forced], salts)
        self.engine.settle()
        found = []
        for output, target in zip(outputs, forced, strict=True):
            [completion] = output.outputs
            logits = completion.generation_logits
            if logits is None:
                raise SemBlendError(f"The engine gave no answer: {output.error or completion.finish_reason}.")
            tokens = completion.token_ids if target is None else logits.argmax(dim=-1).tolist()
            answer = Answer(
                request_id=output.request_id,
                prompt_tokens=len(output.prompt_token_ids),
                tokens=tuple(tokens),
                text=self.tokeniser.text(tokens),
                logits=logits,
                loss=None if target is None else metrics.loss(logits, target),
                ttft_s=output.time_to_first_token,
                reuse=Reuse(exact_prefix_tokens=output.cached_tokens),
            )
            found.append(answer)
        return found

    def reuse(self, asked: int) -> dict[int, Reuse]:
        """Return the reuse of each request by its number; {} without a connector. Raises SemBlendError for too few."""
        if self.arm.variables is None:
            return {}
        ended = enumerate(ended_requests(self.audit.events, asked), start=1)
        plans = {each["request_id"]: each for each in self.audit.events if each["event"] == "plan_dispatched"}
        return {number: Reuse.of(event, plans.get(event["request_id"])) for number, event in ended}


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """`max_tokens`: of an answer. `min_span`: in tokens. `batch`: groups served together, and most requests at once."""

    model: str
    max_tokens: int = 16
    min_span: int = 64
    batch: int = 32


class _CaseServer:
    """Cases of one model. Raises ConfigurationError when one does not fit the model's context."""

    def __init__(self, engines: Engines, cases: Cases, settings: ServingSettings) -> None:
        self._engines, self._settings = engines, settings
        self._tokeniser = Tokeniser(engines, settings.max_tokens)
        self._cases = list(cases)
        self._tokens = dict(zip([case.id for case in cases], self._tokeniser.tokenise_all(cases), strict=True))

    @contextmanager
    def _served(self, arm: Arm, settings: EngineSettings) -> Iterator[ArmServer]:
        with opened(self._engines, arm, settings) as (engine, audit):
            yield ArmServer(arm, engine, self._tokeniser, audit)


class BatchServer(_CaseServer):
    """Serve cases in batches under any arm: donors of many groups first, then their prompts together.
    Every arm is forced along cold's own greedy answer, and its tokens are the likeliest there; the first arm that
    answers a case is its cold. A prompt with a reference is then served again for the reference's loss, and for the
    text of a changed answer."""

    def __init__(self, engines: Engines, cases: Cases, settings: ServingSettings) -> None:
        super().__init__(engines, cases, settings)
        self._colds: dict[str, Answer] = {}
        self._cold: dict[str, Answer] = {}

    def samples(self, arm: Arm, cases: Cases | None = None, on_step: OnStep = lambda _: None) -> list[Sample]:
        """Return the answers to `cases` (default: all) compared with cold's, asked once. Raises SemBlendError."""
        cases = self._cases if cases is None else cases
        if missing := [case for case in cases if case.id not in self._cold]:
            asked = self._cases if self._engines.starts_slowly and not self._cold else missing
            self._cold |= self.answers(COLD_ARM, asked, on_step if arm.name == COLD else lambda _: None)
        answers = self._cold if arm.name == COLD else self.answers(arm, cases, on_step)
        layers = self._engines.facts.num_layers
        return [sample_of(arm, case, answers[case.id], self._cold[case.id], layers) for case in cases]

    def answers(self, arm: Arm, cases: Cases | None = None, on_step: OnStep = lambda _: None) -> dict[str, Answer]:
        """Return the answers to `cases` (default: all) by id; `on_step` gets each id. Raises SemBlendError."""
        order = groups(self._cases if cases is None else cases)
        # A second cold run has other batches, so that it shows what batching alone changes.
        order = order[::-1] if arm.name == COLD_AGAIN else order
        found: dict[str, Answer] = {}
        if arm.variables is not None:
            # No time is measured, and what is found must not depend on how busy the machine is.
            arm = replace(arm, variables={"SEMBLEND_LOOKUP_DEADLINE_MS": "10000", **arm.variables})
        with self._served(arm, self._engine_settings(order)) as server:
            for first in range(0, len(order), self._settings.batch):
                for case_id, answer in self._chunk(server, order[first : first + self._settings.batch]):
                    found[case_id] = answer
                    on_step(case_id)
        reuse = server.reuse(max((answer.request_id for answer in found.values()), default=0))
        for name, each in found.items():
            # The times of batched prompts are not those of one prompt.
            found[name] = replace(each, ttft_s=None, reuse=reuse.get(each.request_id, each.reuse))
        return found

    def _chunk(self, server: ArmServer, chunk: Sequence[list[Case]]) -> Iterator[tuple[str, Answer]]:
        # A group's donors one after the other: each may itself be served from earlier ones.
        salts = [group[0].group if server.arm.isolated else None for group in chunk]
        for donors in zip_longest(*(self._tokens[group[0].id].donors for group in chunk)):
            own = [(donor, salt) for donor, salt in zip(donors, salts, strict=True) if donor is not None]
            server.serve_donors([donor for donor, _ in own], [salt for _, salt in own])
        # One question of every group at a time: in a cold arm the next questions find the first one's KV.
        for together in zip_longest(*chunk):
            cases = [case for case in together if case is not None]
            yield from zip((case.id for case in cases), self._judge(server, cases), strict=True)

    def _asked(self, server: ArmServer, cases: Cases, forced: Forced) -> list[Answer]:
        salts = [case.group if server.arm.isolated else None for case in cases]
        return server.answers([self._tokens[case.id].prompt for case in cases], salts, forced)

    def _judge(self, server: ArmServer, cases: Cases) -> list[Answer]:
        colds = [self._colds.get(case.id) for case in cases]
        found = self._asked(server, cases, [None if cold is None else cold.tokens for cold in colds])
        for index, (case, answer) in enumerate(zip(cases, found, strict=True)):
            # Cold is asked first: its answer is the one along which the other arms are forced.
            if case.id not in self._colds:
                # Log-probabilities in float16 on the host have half of float32's bytes. Taken as logits, what that
                # rounds away changes the KL in second order only.
                rows = answer.logits[: len(answer.tokens)].float().log_softmax(dim=-1).half().cpu()
                self._colds[case.id] = replace(answer, logits=rows)
            cold = self._colds[case.id]
            kl = metrics.kl_divergence(cold.logits.to(answer.logits.device), answer.logits[: len(cold.tokens)])
            text = cold.text if answer.tokens == cold.tokens else answer.text
            found[index] = replace(answer, text=text, loss=None, answer_kl=kl).with_first_row()
        more = [(index, forced) for index, case in enumerate(cases) if (forced := self._tokens[case.id].forced)]
        # After a token that is not cold's, the arm's own answer goes on in another way.
        changed = [index for index, _ in more if found[index].tokens != self._colds[cases[index].id].tokens]
        asked = [*more, *((index, None) for index in changed)]
        again = [cases[index] for index, _ in asked]
        answers = self._asked(server, again, [forced for _, forced in asked]) if asked else []
        for (index, forced), answer in zip(asked, answers, strict=True):
            changes = {"text": answer.text} if forced is None else {"loss": answer.loss}
            found[index] = replace(found[index], **changes)
        return found

    def _engine_settings(self, order: Sequence[list[Case]]) -> EngineSettings:
        settings, tokens = self._settings, [[self._tokens[case.id] for case in group] for group in order]
        room = max(settings.max_tokens, MAX_FORCED_TOKENS) + BLOCK_ROOM
        longest = room + max(len(text) for group in tokens for each in group for text in each.texts)
        kept = max(sum(map(len, group[0].donors)) + sum(len(each.prompt) for each in group) for group in tokens)
        return EngineSettings(
            model=settings.model,
            # Twice: for running requests, and for the KV of a group's first prompt, which the next questions find.
            pool_tokens=2 * min(settings.batch, len(order)) * longest,
            host_bytes=max(4 << 30, 2 * kept * settings.batch * self._engines.token_bytes),
            min_span=settings.min_span,
            batch_size=settings.batch,
        )


def concerns(event: dict[str, Any], request_ids: frozenset[int]) -> bool:
    """Return whether the event is about one of the requests or the donor that one of them became."""
    donor = str(event.get("donor_id")).rpartition("-")[2]
    return event.get("request_id") in request_ids or donor in map(str, request_ids)


@dataclass(slots=True)
class _Round:
    """One repeat: donors' request numbers by group and arm, answers by case and arm, reuse by arm and request."""

    donors: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    answers: dict[str, dict[str, Answer]] = field(default_factory=dict)
    reuse: dict[str, dict[int, Reuse]] = field(default_factory=dict)


class Measurement(_CaseServer):
    """The timed run of all `arms`, with cold, cold_again and exact_prefix. Every repeat opens new engines.
    The engines run side by side if they share weights, else one after the other."""

    def __init__(self, engines: Engines, cases: Cases, settings: ServingSettings, arms: tuple[Arm, ...]) -> None:
        super().__init__(engines, cases, settings)
        self._arms = arms
        # cold comes first: the other arms' answers are compared with its own.
        cold_first = sorted(arms, key=lambda arm: arm.name != COLD)
        self._turns = [(arm,) for arm in cold_first] if engines.starts_slowly else [arms]

    @property
    def steps(self) -> int:
        """How often `run` reports progress in each repeat."""
        return len(self._turns) * len(self._cases)

    @property
    def longest_prompt(self) -> list[int]:
        return max((tokens.prompt for tokens in self._tokens.values()), key=len)

    def run(self, repeats: int = 1, on_step: OnStep = lambda _: None) -> tuple[list[Sample], list[dict[str, Any]]]:
        """Serve everything `repeats` times; `on_step` gets the id of each case that is done. Return all samples, and
        all audit events with `arm` and `repeat` added. Raises SemBlendError."""
        samples, events = list[Sample](), list[dict[str, Any]]()
        for repeat in range(repeats):
            found = _Round()
            for arms in self._turns:
                events += self._serve(arms, repeat, found, on_step)
            samples += self._compared(repeat, found)
        return samples, events

    def _serve(self, arms: tuple[Arm, ...], repeat: int, found: _Round, on_step: OnStep) -> list[dict[str, Any]]:
        """Serve all cases under arms whose engines run together, and return their audit events."""
        with ExitStack() as stack:
            settings = self._engine_settings()
            servers = [stack.enter_context(self._served(arm, settings)) for arm in arms]
            warm_up = []
            for server in servers:
                # A shifted text under a salt of its own, before anything is timed.
                donor = self.longest_prompt[:512]
                donors = server.serve_donors([donor], WARM_UP_SALT)
                [answer] = server.answers([donor[-1:] + donor], [WARM_UP_SALT], [None])
                warm_up.append(frozenset([answer.request_id, *donors]))
            for index, group in enumerate(groups(self._cases)):
                # The order alternates, so that a machine that slows down over time favours no arm.
                turn = (index + repeat) % len(servers)
                self._serve_group(servers[turn:] + servers[:turn], group, repeat, found, on_step)
        events = []
        for server, requests in zip(servers, warm_up, strict=True):
            name = server.arm.name
            found.reuse[name] = server.reuse(max(by_arm[name].request_id for by_arm in found.answers.values()))
            about = [event for event in server.audit.events if not concerns(event, requests)]
            events += [{**event, "arm": name, "repeat": repeat} for event in about]
        return events

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
            host_bytes=max(2 << 30, 2 * donors * self._engines.token_bytes),
            min_span=self._settings.min_span,
        )

    def _serve_group(self, servers: list[ArmServer], group: Cases, repeat: int, found: _Round, on_step: OnStep) -> None:
        for server in servers:
            # One after the other: a donor may itself be served from earlier ones.
            donors = [number for each in self._tokens[group[0].id].donors for number in server.serve_donors([each])]
            found.donors[group[0].group, server.arm.name] = donors
        named = {server.arm.name: server for server in servers}
        for case in group:
            tokens, answers = self._tokens[case.id], found.answers.setdefault(case.id, {})
            salts = {name: f"{case.group}/{repeat}" if server.arm.isolated else None for name, server in named.items()}
            for name, server in named.items():
                [answers[name]] = server.answers([tokens.prompt], [salts[name]], [None])
                if case.is_timed and name in (COLD, COLD_AGAIN) and (cached := answers[name].reuse.exact_prefix_tokens):
                    raise SemBlendError(
                        f"Case {case.id}: the arm {name} found {cached} cached tokens although nothing was served "
                        "under its salt before; the engine does not isolate salts."
                    )
            target = tokens.forced or answers[COLD].tokens
            for name, server in named.items():
                ours = answers[name]
                # An answer that begins with the scored text has its logits already.
                begins = ours.tokens[: len(target)] == target
                scored = ours if begins else server.answers([tokens.prompt], [salts[name]], [target])[0]
                answers[name] = replace(ours.with_first_row(), loss=metrics.loss(scored.logits, target))
            on_step(case.id)

    def _compared(self, repeat: int, found: _Round) -> list[Sample]:
        samples, layers, unit = [], self._engines.facts.num_layers, self._engines.prefix_unit
        for case in self._cases:
            answers = {
                name: replace(answer, reuse=found.reuse[name].get(answer.request_id, answer.reuse))
                for name, answer in found.answers[case.id].items()
            }
            for arm in self._arms:
                reuse, donors = found.reuse[arm.name], enumerate(found.donors[case.group, arm.name])
                # Only a donor that the arm computed exactly leaves an exact prefix, in whole units of the engine.
                exact = [index for index, number in donors if number not in reuse or reuse[number].is_exact]
                tokens = self._tokens[case.id]
                shared = max((equal_start(tokens.donors[index], tokens.prompt) for index in exact), default=0)
                expected = min(shared - shared % unit, answers[EXACT_PREFIX].reuse.exact_prefix_tokens)
                samples.append(sample_of(arm, case, answers[arm.name], answers[COLD], layers, repeat, expected))
        return samples
