"""The engines that serve cases under an arm: their interface, what they have in common, and their audit log."""

import json
import os
import tempfile
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock

import torch

from engine_wrapper.embedded.request import CompletionOutput, RequestOutput, SamplingParams, one_each
from semblend_trt.connector.model_facts import ModelFacts, model_facts
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import open_input
from semblend_trt.model_tokenizer import load_tokenizer
from validation.arms import Arm

if TYPE_CHECKING:
    from engine_wrapper.embedded.llm import LLM

# One arm's running engine; both have the same methods, and number requests from 1 on.
ArmEngine: TypeAlias = "LLM | ServingEngine"
# One for all prompts, or one for each.
AllParams = SamplingParams | Sequence[SamplingParams]
AllSalts = Sequence[str | None] | str | None

EMBEDDED, TRTLLM, VLLM, SGLANG = "embedded", "trtllm", "vllm", "sglang"


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """`pool_tokens` holds the donors and prompts served together; `batch_size`: most requests at once.
    `host_bytes` holds many donors, as each could be reused where it must not be."""

    model: str
    pool_tokens: int
    host_bytes: int
    min_span: int
    batch_size: int = 8


class Engines(ABC):
    """Open engines over one model. `token_bytes`: most bytes of a token's KV. `notes`: limits of a timed run.

    Engines that start slowly run one at a time, and get all requests at once.
    `prefix_unit`: an engine's own exact prefix is a multiple of it, in tokens.
    `has_other_dtype`: an arm can have its weights and KV in another type than the other arms."""

    tokenizer: Any
    facts: ModelFacts
    token_bytes: int
    starts_slowly = True
    has_other_dtype = False
    prefix_unit = 1
    notes: tuple[str, ...] = ()

    @abstractmethod
    def open(self, arm: Arm, settings: EngineSettings, audit_path: Path) -> ArmEngine:
        """Return the arm's engine, whose connector logs to `audit_path`. The caller shuts it down."""


class LoadingEngines(Engines):
    """Engines of a `package` that each load the weights of a folder or a hub id, one after the other.
    Raises ConfigurationError if package or model cannot be read, UnsupportedModelError if its KV cannot be moved."""

    package = ""  # for TensorRT-LLM, whose import itself is tried

    def __init__(self, model: str, dtype: str = "auto", *, tells_kv_scales: bool = True) -> None:
        if self.package and find_spec(self.package) is None:
            raise ConfigurationError(
                f"{self.package} cannot be imported here; install it with `pip install 'semblend-trt[{self.package}]'`."
            )
        self._model, self._dtype = model, dtype
        self.facts = model_facts(model, None, tells_kv_scales)
        self.tokenizer = load_tokenizer(model)
        self.token_bytes = token_bytes(self.facts, torch.float32)


def token_bytes(facts: ModelFacts, dtype: torch.dtype) -> int:
    return 2 * facts.num_layers * facts.kv_heads * facts.head_dim * dtype.itemsize


def connector_variables(arm: Arm, settings: EngineSettings, audit_path: str) -> dict[str, str]:
    """Return the variables that set the arm's connector; {} without one."""
    if arm.variables is None:
        return {}
    room = {"SEMBLEND_MIN_SPAN": str(settings.min_span), "SEMBLEND_HOST_BYTES": str(settings.host_bytes)}
    return {**arm.variables, **room, "SEMBLEND_AUDIT_PATH": audit_path}


def audit_counts(events: Iterable[dict[str, Any]], arm: str) -> dict[str, Any]:
    """Count the events whose `arm` is `arm`, under the names of the SemBlend package's validation.
    `materialized_units`: tokens times layers moved."""
    ours = [event for event in events if event["arm"] == arm]
    lookups, materialized = ([e for e in ours if e["event"] == name] for name in ("lookup", "materialized"))
    reasons = Counter(event["rejection_reason"] for event in lookups if event.get("rejection_reason"))
    return {
        "events": len(ours),
        "donor_registrations": sum(event["event"] == "donor_registered" and not event.get("error") for event in ours),
        "semantic_hits": sum(bool(event["found"]) for event in lookups),
        "materializations": len(materialized),
        "materialized_units": sum(event["materialized"] for event in materialized),
        "incremental_matched_tokens": sum(event["num_new_matched_tokens"] for event in lookups),
        "rope_corrections": sum(bool(event["requires_rope_correction"]) for event in materialized),
        "rejection_reasons": dict(sorted(reasons.items())),
    }


@dataclass(slots=True)
class AuditFile:
    """An audit file, and its events in order when it was read; none if no file was written."""

    path: Path
    events: list[dict[str, Any]] = field(default_factory=list)

    def read(self) -> list[dict[str, Any]]:
        """Read and return the events whose lines are complete."""
        if self.path.exists():
            with open_input(self.path) as file:
                self.events = [json.loads(line) for line in file if line.endswith(b"\n")]
        return self.events


def ended_requests(events: Iterable[dict[str, Any]], asked: int = 0) -> list[dict[str, Any]]:
    """Return the events that end requests, by request. Raises SemBlendError for fewer than `asked`."""
    ended = [event for event in events if event["event"] == "request_settled"]
    if len(ended) < asked:
        raise SemBlendError(
            f"The connector's audit log has the end of {len(ended)} requests, but {asked} were served; without it "
            "nothing shows what was reused. The engine's log says why, or the disk of the temporary folder was slow."
        )
    return sorted(ended, key=lambda event: int(event["request_id"]))


@contextmanager
def opened(engines: Engines, arm: Arm, settings: EngineSettings) -> Iterator[tuple[ArmEngine, AuditFile]]:
    """Open the arm's engine and its audit file, which is read to its end when the engine has ended."""
    with tempfile.TemporaryDirectory(prefix="validation-") as folder:
        audit = AuditFile(Path(folder) / "audit.jsonl")
        engine = engines.open(arm, settings, audit.path)
        try:
            yield engine, audit
        finally:
            engine.shutdown()
        audit.read()


def forced_answer(tokens: Sequence[int]) -> SamplingParams:
    """Return how to answer with these tokens, one by one, with logits."""
    return SamplingParams(len(tokens), forced_token_ids=tuple(tokens), ignore_eos=True, return_generation_logits=True)


@dataclass(slots=True)
class Asked:
    """One request. An engine whose logits can be read keeps `rows` of them, float32 [vocabulary], and the time of the
    first token, in seconds from `began`."""

    number: int
    prompt: list[int]
    params: SamplingParams
    salt: str | None
    rows: list[torch.Tensor] = field(default_factory=list, init=False)
    began: float = field(default_factory=time.perf_counter, init=False)
    first_token: float | None = field(default=None, init=False)

    @property
    def forced(self) -> tuple[int, ...]:
        """The tokens that the answer has to be; () for a free one."""
        return tuple(self.params.forced_token_ids or ())

    @property
    def stops(self) -> list[int] | None:
        """The tokens that end the answer; None is the model's own."""
        return None if self.params.stop_token_ids is None else list(self.params.stop_token_ids)

    def take(self, logits: torch.Tensor, answered: int) -> None:
        """Keep the logits, [vocabulary], after `answered` tokens; to force the next one, leave that alone in them."""
        del self.rows[answered:]  # rows of a step that the engine computes again
        self.rows.append(logits.float().cpu().clone())
        if answered < len(self.forced):
            token = self.forced[answered]
            kept = logits[token].clone()
            logits[:] = -torch.inf
            logits[token] = kept

    def has_token(self) -> None:
        """Note the time of the first token."""
        if self.first_token is None:
            self.first_token = time.perf_counter() - self.began

    def answered(
        self, tokens: Sequence[int], reason: str | None, cached: int | None = 0, logits: torch.Tensor | None = None
    ) -> RequestOutput:
        """Return the answer without text. `logits`: float32 [tokens, vocabulary], by default those that were kept."""
        logits = torch.stack(self.rows[: len(tokens)]) if self.rows else logits
        return RequestOutput(
            request_id=self.number,
            prompt=None,
            prompt_token_ids=self.prompt,
            outputs=[CompletionOutput("", list(tokens), reason, logits)],
            cached_tokens=cached or 0,
            reused_tokens=0,
            computed_tokens=len(self.prompt) - (cached or 0),
            time_to_first_token=self.first_token,
            finished=True,
        )


class ServingEngine(ABC):
    """An engine of `title`, which serves numbered requests."""

    title: str
    _asked = 0  # requests so far

    def generate(
        self, prompts: Sequence[list[int]], sampling_params: AllParams, cache_salt: AllSalts = None
    ) -> list[RequestOutput]:
        """Answer all prompts together; the outputs have no text. Raises SemBlendError."""
        params = one_each("sampling_params", sampling_params, len(prompts), SamplingParams)
        salts = one_each("cache_salt", cache_salt, len(prompts), str)
        numbers = range(self._asked + 1, self._asked + 1 + len(prompts))
        asked = [Asked(*each) for each in zip(numbers, map(list, prompts), params, salts, strict=True)]
        self._asked += len(asked)
        try:
            return self._answers(asked)
        except (RuntimeError, ValueError, TypeError) as error:
            raise SemBlendError(f"{self.title} gave no answer: {error}") from error

    @abstractmethod
    def _answers(self, asked: Sequence[Asked]) -> list[RequestOutput]:
        """Answer the requests together, in their order."""

    @abstractmethod
    def settle(self) -> None:
        """Wait until what was served can be a donor, and, if engines start quickly, is in the audit log."""

    @abstractmethod
    def shutdown(self) -> None:
        """End the engine and free its memory; its audit log is complete then."""


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set our variables to exactly `variables` meanwhile, so that the caller's do not leak into an arm. By
    default reuse need save no time: what it does to answers is looked at."""
    others = {name: each for name, each in os.environ.items() if not name.startswith(("SEMBLEND_", "TRTLLM_SEMBLEND_"))}
    with mock.patch.dict(os.environ, others | {"SEMBLEND_MIN_SAVING": "0", **variables}, clear=True):
        yield
