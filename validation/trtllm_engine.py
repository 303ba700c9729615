"""TensorRT-LLM as the engine of an arm, through public arguments of its LLM API. Untested on a real TensorRT-LLM.

It imports nothing that an environment with TensorRT-LLM and the connector lacks.
"""

from __future__ import annotations

import time
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.model_tokenizer import load_tokenizer
from validation.engines import answered, asked_of, connector_variables, environment

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from engine_wrapper.embedded.request import RequestOutput, SamplingParams
    from validation.arms import Arm
    from validation.engines import ArmEngine, Asked, EngineSettings

STOCK_CONNECTOR, WRAPPER = "semblend_trt.connector", "engine_wrapper.connector"
# The workers inherit only variables whose names begin with TRTLLM.
_PREFIX = "TRTLLM_"
# Answers are compared here, so that a slow first look-up may not time out.
_PATIENCE = {_PREFIX + "SEMBLEND_LOOKUP_DEADLINE_MS": "10000"}
# Saves end in another process. When its audit log has not grown for so long, they count as ended.
QUIET_SECONDS = 0.25
_MAX_SETTLE_SECONDS = 20.0


def trtllm_api() -> Any:
    """The module `tensorrt_llm`. Raises ConfigurationError where it cannot be imported."""
    try:
        return import_module("tensorrt_llm")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"tensorrt_llm cannot be imported here ({error}); run this where TensorRT-LLM and an NVIDIA GPU are."
        ) from error


def open_llm(
    model: str,
    connector: str | None,
    variables: Mapping[str, str],
    *,
    cache: Mapping[str, Any] | None = None,
    **options: Any,
) -> Any:
    """An LLM that can execute plans: eager, over the V1 cache manager, with chunked prefill.

    `connector` is the module of our classes, None without them, and `variables` are their settings, SEMBLEND_*.
    `cache` are fields of its KvCacheConfig, `options` further arguments. Raises SemBlendError when it does not start.
    """
    # `tensorrt_llm.llmapi` itself has KvCacheConfig only.
    api = import_module("tensorrt_llm.llmapi.llm_args")
    # V1 is not main's default.
    first = {name: False for name in ("use_kv_cache_manager_v2",) if name in api.KvCacheConfig.model_fields}
    fields = {**first, "enable_block_reuse": True, "free_gpu_memory_fraction": 0.6, **(cache or {})}
    inherited = {_PREFIX + name: value for name, value in variables.items()}
    try:
        with environment({**_PATIENCE, **inherited}):
            return trtllm_api().LLM(
                model=model,
                enable_chunked_prefill=True,
                cuda_graph_config=None,
                kv_cache_config=api.KvCacheConfig(**fields),
                kv_connector_config=None if connector is None else api.KvCacheConnectorConfig.ours(connector),
                **options,
            )
    except (RuntimeError, ValueError, TypeError) as error:
        raise SemBlendError(f"TensorRT-LLM does not start with model {model}: {error}") from error


def wait_for_quiet(audit_path: Path) -> None:
    """Waits until another process's audit log has not grown for QUIET_SECONDS, for _MAX_SETTLE_SECONDS at most."""
    deadline = time.monotonic() + _MAX_SETTLE_SECONDS
    size, since = -1, time.monotonic()
    while (now := time.monotonic()) < deadline and now - since <= QUIET_SECONDS:
        found = audit_path.stat().st_size if audit_path.is_file() else 0
        if found != size:
            size, since = found, now
        time.sleep(QUIET_SECONDS / 10)


class TrtllmEngines:
    """Engines of TensorRT-LLM over one model, a folder or a hub id, one after the other.

    `dtype` is the engine's argument of that name. Raises ConfigurationError where tensorrt_llm cannot be imported or
    the model cannot be read, UnsupportedModelError for one whose KV cannot be moved.
    """

    starts_slowly = True
    prefix_unit = 1
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
        chunks = {} if arm.chunk_tokens is None else {"max_num_tokens": arm.chunk_tokens}
        llm = open_llm(
            self._model,
            connector,
            variables,
            cache={"max_tokens": settings.pool_tokens},
            dtype=self._dtype,
            max_batch_size=settings.batch_size,
            **chunks,
            **_logits_argument(),
        )
        return TrtllmEngine(llm, None if connector is None else audit_path)


class TrtllmEngine:
    """One engine at work; `llm` is an LLM of TensorRT-LLM, `audit_path` its connector's log, None without one.

    Its API cannot force tokens. So each token of a forced answer is a request of its own, whose prompt ends with the
    tokens before it.
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
        """Waits until every save has ended, as far as the audit log shows."""
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
