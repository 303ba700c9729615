"""One engine's answers to the workload, from its start to its end."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from validation.audit_log import read_events, settled
from validation.trtllm_api import open_llm, trtllm_api

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine answered to the workload's prompts, and the audit events of its connector."""

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    events: tuple[dict[str, Any], ...]

    def settled(self) -> list[dict[str, Any]]:
        """How every request ended, in the order in which they were asked."""
        return settled(self.events)


def serve(
    model: str, dtype: str, prompts: Sequence[str], connector: str | None, variables: Mapping[str, str]
) -> Served:
    """One prompt after the other. Only when the engine has ended is the audit log complete. Raises SemBlendError."""
    tokens, texts = [], []
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit.jsonl"
        with open_llm(model, connector, {**variables, "SEMBLEND_AUDIT_PATH": str(audit)}, dtype=dtype) as llm:
            for prompt in prompts:
                [output] = llm.generate([prompt], greedy())
                tokens.append(tuple(output.outputs[0].token_ids))
                texts.append(output.outputs[0].text)
        return Served(tuple(tokens), tuple(texts), tuple(read_events(audit)))


def greedy(max_tokens: int = MAX_TOKENS, **options: Any) -> Any:
    """TensorRT-LLM's SamplingParams for greedy answers."""
    return trtllm_api().SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)
