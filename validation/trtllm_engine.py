"""TensorRT-LLM as the engine of an arm, through its public LLM API. Untested on a real TensorRT-LLM.

It imports nothing that an environment with TensorRT-LLM and the connector lacks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from engine_wrapper.embedded.request import RequestOutput
from semblend_trt.errors import ConfigurationError, SemBlendError
from validation.arms import Arm
from validation.engines import Asked, EngineSettings, LoadingEngines, ServingEngine, connector_variables, environment

STOCK_CONNECTOR, WRAPPER = "semblend_trt.connector", "engine_wrapper.connector"
# Saves end in another process. They count as ended when its audit log has not grown for this time.
QUIET_SECONDS = 0.25


def trtllm_api() -> Any:
    """Import `tensorrt_llm`. Raises ConfigurationError if that fails."""
    try:
        return import_module("tensorrt_llm")
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"tensorrt_llm cannot be imported here ({error}); run this where TensorRT-LLM and an NVIDIA GPU are."
        ) from error


def open_llm(
    model: str, connector: str | None, variables: Mapping[str, str], cache: Mapping[str, Any] = {}, **options: Any
) -> Any:
    """Open an LLM with TensorRT-LLM's defaults, but for chunked prefill and the host memory that no connector allows.

    `connector`: the module of our classes. `variables`: their settings, SEMBLEND_*. `cache`: fields of KvCacheConfig.
    Raises SemBlendError when it does not start."""
    # `tensorrt_llm.llmapi` itself has KvCacheConfig only.
    api = import_module("tensorrt_llm.llmapi.llm_args")
    fields = {"enable_block_reuse": True, "free_gpu_memory_fraction": 0.6, "host_cache_size": 0, **cache}
    # The answers are compared, so a slow first look-up must not time out.
    variables = {"SEMBLEND_LOOKUP_DEADLINE_MS": "10000", **variables}
    try:
        # The workers inherit only variables whose names begin with TRTLLM.
        with environment({f"TRTLLM_{name}": value for name, value in variables.items()}):
            return trtllm_api().LLM(
                model=model,
                enable_chunked_prefill=True,
                kv_cache_config=api.KvCacheConfig(**fields),
                kv_connector_config=None if connector is None else api.KvCacheConnectorConfig.ours(connector),
                **options,
            )
    except (RuntimeError, ValueError, TypeError) as error:
        raise SemBlendError(f"TensorRT-LLM does not start with model {model}: {error}") from error


def wait_for_quiet(audit_path: Path) -> None:
    """Wait until another process's audit log has not grown for QUIET_SECONDS, for 20 s at most."""
    size, since = -1, time.monotonic()
    deadline = since + 20.0
    while (now := time.monotonic()) < deadline and now - since <= QUIET_SECONDS:
        found = audit_path.stat().st_size if audit_path.is_file() else 0
        if found != size:
            size, since = found, now
        time.sleep(QUIET_SECONDS / 10)


class TrtllmEngines(LoadingEngines):
    """Engines of TensorRT-LLM. Raises ConfigurationError if tensorrt_llm cannot be imported, too."""

    notes = ("TensorRT-LLM's API gives no time to the first token, so that it serves no timed run.",)

    def __init__(self, model: str, dtype: str = "auto") -> None:
        trtllm_api()
        super().__init__(model, dtype, tells_kv_scales=False)

    def open(self, arm: Arm, settings: EngineSettings, audit_path: Path) -> "TrtllmEngine":
        """Return the arm's engine with the wrapper's connector. Raises SemBlendError when it does not start."""
        connector = None if arm.variables is None else WRAPPER
        options: dict[str, Any] = {} if arm.chunk_tokens is None else {"max_num_tokens": arm.chunk_tokens}
        arguments = import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs
        if "gather_generation_logits" in getattr(arguments, "model_fields", ()):
            options["gather_generation_logits"] = True  # older versions give logits only with this
        llm = open_llm(
            self._model,
            connector,
            connector_variables(arm, settings, str(audit_path)),
            cache={"max_tokens": settings.pool_tokens},
            dtype=self._dtype,
            max_batch_size=settings.batch_size,
            **options,
        )
        return TrtllmEngine(llm, None if connector is None else audit_path)


class TrtllmEngine(ServingEngine):
    """One engine. Its API cannot force tokens: each is a request whose prompt ends with the tokens before it."""

    title = "TensorRT-LLM"

    def __init__(self, llm: Any, audit_path: Path | None) -> None:
        self._llm, self._audit_path = llm, audit_path

    def _answers(self, asked: Sequence[Asked]) -> list[RequestOutput]:
        found = []
        for each, output in zip(asked, self._ask(asked), strict=True):
            completion, forced = output.outputs[0], each.forced
            outputs = [output]
            if len(forced) > 1:
                longer = [[*each.prompt, *forced[:count]] for count in range(1, len(forced))]
                outputs += self._ask([replace(each, prompt=prompt) for prompt in longer])
                self._asked += len(longer)
            # float32 [tokens, vocabulary], or None if not asked for; each request of a forced answer gives one row.
            logits = [one.outputs[0].generation_logits for one in outputs]
            rows = [one.reshape(-1, one.shape[-1])[: 1 if forced else None] for one in logits if one is not None]
            stacked = torch.cat(rows).float().cpu() if rows else None
            found.append(each.answered(forced or completion.token_ids, completion.finish_reason, logits=stacked))
        return found

    def _ask(self, asked: Sequence[Asked]) -> list[Any]:
        # Versions before 1.2 do not know salts.
        options = {"cache_salt": [each.salt for each in asked]} if any(each.salt for each in asked) else {}
        params = [
            trtllm_api().SamplingParams(
                max_tokens=1 if each.forced else each.params.max_tokens,
                temperature=0.0,
                stop_token_ids=each.stops,
                ignore_eos=each.params.ignore_eos,
                return_generation_logits=each.params.return_generation_logits,
            )
            for each in asked
        ]
        return list(self._llm.generate([each.prompt for each in asked], params, use_tqdm=False, **options))

    def settle(self) -> None:
        if self._audit_path is not None:
            wait_for_quiet(self._audit_path)

    def shutdown(self) -> None:
        self._llm.shutdown()
