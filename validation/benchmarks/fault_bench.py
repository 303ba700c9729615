"""What every injected fault needs: engines that keep donors, prompts of equal beginning, cold answers and counts."""

from __future__ import annotations

import random
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import REGISTRY

from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig
from engine_wrapper.embedded.sampling import SamplingParams
from validation.benchmarks.random_life import evict_block
from validation.documents import stock_list
from validation.engines import environment
from validation.models import load, shipped_model
from validation.prompts import render

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from engine_wrapper.embedded.outputs import RequestOutput

HOST_BYTES, DISK_BYTES, POOL_TOKENS = 1 << 30, 1 << 30, 2048
LOOKUP_DEADLINE_MS = 500
DOCUMENTS, ROWS = 3, 12
_ANSWER = SamplingParams(max_tokens=8)
_TOO_SHORT_TO_KEEP = "hello"


@dataclass(frozen=True, slots=True)
class Prompts:
    """`donor` and `others` share instruction and documents, token by token from the start; their questions differ."""

    donor: str
    others: tuple[str, ...]


def prompts_of(seed: int) -> Prompts:
    """Prompts that share nothing with those of another seed."""
    rng = random.Random(seed)
    lists = [stock_list(rng, rows=ROWS) for _ in range(DOCUMENTS)]
    texts = [each.text for each in lists]
    head = f"{seed}: answer briefly."
    donor, *others = (render(head, texts, each.questions[seed % ROWS].text) for each in lists)
    return Prompts(donor, tuple(others))


def counted(metric: str, **labels: str) -> float:
    """What the product has counted in this process, as a server's /metrics shows it."""
    return REGISTRY.get_sample_value(f"semblend_{metric}_total", labels) or 0.0


class FaultBench:
    """Engines over one model, `exact` in what they reuse, so that every answer must be a cold run's."""

    def __init__(self) -> None:
        self._runner = load(None, None, "float32")
        self._cold = LLM(
            model=shipped_model(),
            runner=self._runner.share(),
            kv_cache_config=KvCacheConfig(max_tokens=POOL_TOKENS, enable_block_reuse=False),
        )
        self._answers: dict[str, list[int]] = {}

    def close(self) -> None:
        self._cold.shutdown()

    @contextmanager
    def engine(self, folder: Path | None = None, contract: str = "embedded", **variables: str) -> Iterator[LLM]:
        """An engine whose donors lie in host memory, and with a `folder` on disk too; ready to keep the first one.

        `contract` is the version whose contract it keeps to.
        """
        settings = {
            "POLICY": "exact",
            "HOST_BYTES": str(HOST_BYTES),
            "EMBEDDER": "off",
            # Far above what a lookup takes on a busy machine: only the injected stall may pass it.
            "LOOKUP_DEADLINE_MS": str(LOOKUP_DEADLINE_MS),
            **variables,
        }
        if folder is not None:
            key = str(folder / "key")
            settings |= {"DISK_BYTES": str(DISK_BYTES), "DISK_PATH": str(folder), "DISK_KEY_PATH": key}
        with environment({f"SEMBLEND_{name}": value for name, value in settings.items()}):
            llm = LLM(
                model=shipped_model(),
                runner=self._runner.share(),
                contract=contract,
                kv_cache_config=KvCacheConfig(max_tokens=POOL_TOKENS),
                kv_connector_config=KvCacheConnectorConfig(
                    connector_module="engine_wrapper.connector",
                    connector_scheduler_class="SemBlendKvConnectorScheduler",
                    connector_worker_class="SemBlendKvConnectorWorker",
                ),
            )
        with llm:
            self.serve(llm, _TOO_SHORT_TO_KEEP)
            self.hear(llm)
            yield llm

    def serve(self, llm: LLM, prompt: str) -> RequestOutput:
        """Serves a prompt that the engine's own prefix cache knows nothing of, and waits for what follows from it."""
        while evict_block(llm):
            pass
        (output,) = llm.generate([prompt], _ANSWER)
        llm.settle()
        llm.connector_worker.saver.drain()
        if llm.connector_worker.keeper is not None:
            llm.connector_worker.keeper.drain()
        return output

    def hear(self, llm: LLM) -> None:
        """Lets the scheduler hear of everything that has happened beside it, as it does with every request."""
        self.serve(llm, _TOO_SHORT_TO_KEEP)
        while llm.connector_worker.keeper is not None and llm.connector_worker._runtime.disk.found:
            self.serve(llm, _TOO_SHORT_TO_KEEP)

    def wrong_tokens(self, prompt: str, output: RequestOutput) -> int:
        """Tokens of the answer that a cold run does not give; a request that did not finish has them all wrong."""
        if prompt not in self._answers:
            (cold,) = self._cold.generate([prompt], _ANSWER)
            self._answers[prompt] = list(cold.outputs[0].token_ids)
        given, right = list(output.outputs[0].token_ids), self._answers[prompt]
        if output.outputs[0].finish_reason not in ("stop", "length"):
            given = []
        differing = sum(one != other for one, other in zip(given, right, strict=False))
        return differing + abs(len(given) - len(right))
