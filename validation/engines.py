"""The engines that serve cases under an arm: their interface, and what they have in common."""

from __future__ import annotations

import os
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from unittest import mock

from engine_wrapper.embedded.request import CompletionOutput, RequestOutput, one_each
from engine_wrapper.embedded.sampling import SamplingParams
from validation.audit_log import AuditFile

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch

    from semblend_trt.connector.model_facts import ModelFacts
    from validation.arms import Arm

EMBEDDED, TRTLLM, VLLM = "embedded", "trtllm", "vllm"
_VARIABLE_PREFIXES = ("SEMBLEND_", "TRTLLM_SEMBLEND_")


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings of all engines of a run.

    `pool_tokens` holds the donors and prompts that are served together; `host_bytes` holds many donors, since each is a
    chance of reuse where none belongs. `batch_size`: most requests that run at once.
    """

    model: str
    pool_tokens: int
    host_bytes: int
    min_span: int
    batch_size: int = 8

    def holds(self, needed: EngineSettings) -> bool:
        """Whether an engine with these settings has the room that is needed."""
        return self.pool_tokens >= needed.pool_tokens and self.host_bytes >= needed.host_bytes


class ServedModel(Protocol):
    """A model as the writing and scoring of cases sees it."""

    @property
    def tokenizer(self) -> Any: ...

    @property
    def facts(self) -> ModelFacts: ...


class ArmEngine(Protocol):
    """One arm's running engine, with the embedded engine's methods. Requests are numbered from 1 on."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        cache_salt: Sequence[str | None] | str | None = None,
    ) -> Sequence[RequestOutput]:
        """Answers all prompts together. Raises SemBlendError."""
        ...

    def settle(self) -> None:
        """Waits until what was served can be found as a donor, and, if engines start quickly, is in the audit log."""
        ...

    def shutdown(self) -> None:
        """Ends the engine; from then on its audit log is complete."""
        ...


class Engines(ServedModel, Protocol):
    """Opens engines over one model. `token_bytes`: most bytes of a token's KV. Engines that start slowly run one at a
    time, and each is asked everything at once. `prefix_unit`: an engine's own exact prefix is a multiple of so many
    tokens."""

    @property
    def token_bytes(self) -> int: ...

    @property
    def starts_slowly(self) -> bool: ...

    @property
    def prefix_unit(self) -> int: ...

    @property
    def notes(self) -> tuple[str, ...]:
        """Limits of a timed run with these engines, a sentence each."""
        ...

    def open(self, arm: Arm, settings: EngineSettings, audit_path: Path) -> ArmEngine:
        """The arm's engine, whose connector writes its audit log there. The caller shuts it down."""
        ...


def connector_variables(arm: Arm, settings: EngineSettings, audit_path: str) -> dict[str, str]:
    """The variables that set the arm's connector; none without one."""
    if arm.variables is None:
        return {}
    return {
        **arm.variables,
        "SEMBLEND_MIN_SPAN": str(settings.min_span),
        "SEMBLEND_HOST_BYTES": str(settings.host_bytes),
        "SEMBLEND_AUDIT_PATH": audit_path,
    }


@contextmanager
def opened(engines: Engines, arm: Arm, settings: EngineSettings) -> Iterator[tuple[ArmEngine, AuditFile]]:
    """The arm's engine, and its audit file, which is read to its end when the engine has ended."""
    with tempfile.TemporaryDirectory(prefix="validation-") as folder:
        audit = AuditFile(Path(folder) / "audit.jsonl")
        engine = engines.open(arm, settings, audit.path)
        try:
            yield engine, audit
        finally:
            engine.shutdown()
        audit.read()


@dataclass(frozen=True, slots=True)
class Asked:
    """One request."""

    number: int
    prompt: list[int]
    params: SamplingParams
    salt: str | None


def asked_of(
    first: int,
    prompts: Sequence[list[int]],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    cache_salt: Sequence[str | None] | str | None,
) -> list[Asked]:
    """The arguments of `ArmEngine.generate` by prompt, numbered from `first` on. Raises SemBlendError."""
    params = one_each("sampling_params", sampling_params, len(prompts), SamplingParams)
    salts = one_each("cache_salt", cache_salt, len(prompts), str)
    return [
        Asked(number, list(prompt), param, salt)
        for number, (prompt, param, salt) in enumerate(zip(prompts, params, salts, strict=True), start=first)
    ]


def answered(
    asked: Asked,
    tokens: list[int],
    finish_reason: str | None,
    logits: torch.Tensor | None,
    cached_tokens: int = 0,
    time_to_first_token: float | None = None,
) -> RequestOutput:
    """An answer without its text. `logits`: float32 [tokens, vocabulary].

    `cached_tokens`: all that the engine did not compute, from its own prefix cache or from a connector.
    """
    return RequestOutput(
        request_id=asked.number,
        prompt=None,
        prompt_token_ids=asked.prompt,
        outputs=[CompletionOutput("", tokens, finish_reason, logits)],
        cached_tokens=cached_tokens,
        reused_tokens=0,
        computed_tokens=len(asked.prompt) - cached_tokens,
        time_to_first_token=time_to_first_token,
        finished=True,
    )


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets our variables to exactly `variables` meanwhile, so that the caller's do not leak into an arm."""
    with mock.patch.dict(os.environ):
        for name in [name for name in os.environ if name.startswith(_VARIABLE_PREFIXES)]:
            del os.environ[name]
        os.environ.update(variables)
        yield
