"""TensorRT-LLM as the engine of an arm, through public arguments of its LLM API. Untested on a real TensorRT-LLM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import SemBlendError
from semblend_trt.model_tokenizer import load_tokenizer
from validation.engines import answered, asked_of, connector_variables
from validation.trtllm_api import WRAPPER, open_llm, trtllm_api, wait_for_quiet

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from engine_wrapper.embedded.request import RequestOutput
    from engine_wrapper.embedded.sampling import SamplingParams
    from validation.arms import Arm
    from validation.engines import ArmEngine, Asked, EngineSettings


class TrtllmEngines:
    """Engines of TensorRT-LLM over one model, a folder or a hub id, one after the other.

    `dtype` is the engine's argument of that name. Raises ConfigurationError where tensorrt_llm cannot be imported or
    the model cannot be read, UnsupportedModelError for one whose KV cannot be moved.
    """

    starts_slowly = True
    notes = ("TensorRT-LLM's API gives no time to the first token, so that it serves no timed run.",)

    def __init__(self, model: str, dtype: str = "auto") -> None:
        trtllm_api()
        self._model, self._dtype = model, dtype
        self.facts = model_facts(model)
        self.tokenizer: Any = load_tokenizer(model)

    @property
    def token_bytes(self) -> int:
        return 2 * self.facts.num_layers * self.facts.kv_heads * self.facts.head_dim * torch.float32.itemsize

    def open(self, arm: Arm, settings: EngineSettings, audit_path: Path) -> ArmEngine:
        """The arm's engine with the wrapper's connector. Raises SemBlendError when it does not start."""
        connector = None if arm.variables is None else WRAPPER
        variables = connector_variables(arm, settings, str(audit_path))
        llm = open_llm(
            self._model,
            connector,
            variables,
            cache={"max_tokens": settings.pool_tokens},
            dtype=self._dtype,
            max_batch_size=settings.batch_size,
            **_logits_argument(),
        )
        return TrtllmEngine(llm, None if connector is None else audit_path)


class TrtllmEngine:
    """One engine at work; `llm` is an LLM of TensorRT-LLM, `audit_path` its connector's log, None without one.

    Its API cannot force tokens. So each token of a forced answer is asked for with a request of its own, whose prompt
    ends with the tokens before it; the engine serves what they have in common as it serves any prompt.
    """

    def __init__(self, llm: Any, audit_path: Path | None) -> None:
        self._llm, self._audit_path = llm, audit_path
        self._asked = 0

    def generate(
        self,
        prompts: Sequence[list[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        cache_salt: Sequence[str | None] | str | None = None,
    ) -> list[RequestOutput]:
        """Answers all prompts together; the outputs have no text and no times. Raises SemBlendError."""
        asked = asked_of(self._asked + 1, prompts, sampling_params, cache_salt)
        found = []
        for each, output in zip(asked, self._ask(asked), strict=True):
            logits = [_logits_of(output)]
            forced = each.params.forced_token_ids or ()
            if len(forced) > 1:
                begun = [[*each.prompt, *forced[:count]] for count in range(1, len(forced))]
                rest = self._ask(asked_of(self._asked + 1, begun, each.params, each.salt))
                logits += [_logits_of(one) for one in rest]
            found.append(_output_of(each, output, logits, forced))
        return found

    def _ask(self, asked: Sequence[Asked]) -> list[Any]:
        salts = [each.salt for each in asked]
        # Versions before 1.2 do not know salts; without one to give, none is named.
        options = {"cache_salt": salts} if any(salts) else {}
        self._asked += len(asked)
        try:
            params = [_sampling(each.params) for each in asked]
            return list(self._llm.generate([each.prompt for each in asked], params, use_tqdm=False, **options))
        except (RuntimeError, ValueError, TypeError) as error:
            raise SemBlendError(f"TensorRT-LLM gave no answer: {error}") from error

    def settle(self) -> None:
        """Waits until the connector has told of every save, as far as its audit log shows."""
        if self._audit_path is not None:
            wait_for_quiet(self._audit_path)

    def shutdown(self) -> None:
        self._llm.shutdown()


def _logits_argument() -> dict[str, bool]:
    """Older versions give logits only where the engine was built to keep them."""
    fields = getattr(import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs, "model_fields", ())
    return {name: True for name in ("gather_generation_logits",) if name in fields}


def _sampling(params: SamplingParams) -> Any:
    return trtllm_api().SamplingParams(
        max_tokens=1 if params.forced_token_ids else params.max_tokens,
        temperature=0.0,
        stop_token_ids=None if params.stop_token_ids is None else list(params.stop_token_ids),
        ignore_eos=params.ignore_eos,
        return_generation_logits=params.return_generation_logits,
    )


def _logits_of(output: Any) -> torch.Tensor | None:
    """float32 [tokens, vocabulary], None where none were asked for."""
    logits = output.outputs[0].generation_logits
    return None if logits is None else logits.reshape(-1, logits.shape[-1]).float().cpu()


def _output_of(
    asked: Asked, output: Any, logits: Sequence[torch.Tensor | None], forced: Sequence[int]
) -> RequestOutput:
    completion = output.outputs[0]
    rows = [each if not forced else each[:1] for each in logits if each is not None]
    tokens = list(forced or completion.token_ids)
    return answered(asked, tokens, completion.finish_reason, torch.cat(rows) if rows else None)
