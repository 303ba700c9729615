"""What TensorRT-LLM's V2 manager is taken to do by its source alone, judged in a real engine by `trtllm_check`."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from semblend_trt.connector.contract import version_of
from validation.engines import AuditFile, ended_requests
from validation.trtllm_engine import STOCK_CONNECTOR, open_llm, trtllm_api

Events = tuple[dict[str, Any], ...]

_V1 = "KVCacheManager"
# Enough for some blocks of any size that TensorRT-LLM has.
_ANSWER = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result."""

    name: str
    holds: bool
    what: str


def facts_of(events: Events) -> dict[str, Any]:
    """Return what the engine showed as the wrapper attached to it; nothing if it did not attach."""
    found = next((event for event in events if event["event"] == "engine_attached"), {})
    return {name: value for name, value in found.items() if name not in ("schema", "time", "rank", "event")}


def judge_engine(events: Events) -> Finding:
    """Say which engine the default options gave: version, manager, graphs, attention, and what was refused."""
    facts, api = facts_of(events), import_module("tensorrt_llm.llmapi.llm_args")
    field = getattr(api.KvCacheConfig, "model_fields", {}).get("use_kv_cache_manager_v2")
    shown = {
        "release": getattr(trtllm_api(), "__version__", "unknown"),
        "contract": version_of(None),
        "use_kv_cache_manager_v2": getattr(field, "default", "no such option"),
        **facts,
    }
    refused = [facts[name] for name in ("guard_refusal", "execution_refusal") if facts.get(name) is not None]
    return Finding("engine", bool(facts) and not refused, "; ".join(f"{name} {shown[name]}" for name in shown))


def judge_crowded(facts: dict[str, Any], events: Events) -> list[Finding]:
    """Check that requests were paused and asked about again, and blocks exchanged under donors, of which none was lost.

    V1 does neither. Where an engine with V2 did not either, nothing was tried."""
    is_v1 = facts.get("manager") == _V1
    asked = Counter(event["request_id"] for event in events if event["event"] == "lookup")
    paused = sum(times > 1 for times in asked.values())
    reasons = Counter(event["reason"] for event in ended_requests(events))
    lost = reasons["load_failed"] + reasons["internal_error"]
    exchanged = sum(event["event"] == "blocks_exchanged" for event in events)
    unsaved = [str(event["error"])[:80] for event in events if event["event"] == "donor_registered" and event["error"]]
    return [
        Finding(
            "pauses", (is_v1 or paused > 0) and not lost, f"{paused} requests asked about again; {lost} plans lost"
        ),
        Finding(
            "exchange", is_v1 or exchanged > 0, f"{exchanged} donors of exchanged blocks; not saved: {unsaved[:4]}"
        ),
    ]


def judge_commits(facts: dict[str, Any], model: str, dtype: str) -> Finding:
    """Check that V2 keeps no generated tokens for reuse, as pull request 18711 has it do. Raises SemBlendError."""
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit.jsonl"
        variables = {"SEMBLEND_POLICY": "exact", "SEMBLEND_AUDIT_PATH": str(audit)}
        with open_llm(model, STOCK_CONNECTOR, variables, dtype=dtype) as llm:
            params = trtllm_api().SamplingParams(max_tokens=_ANSWER, temperature=0.0, ignore_eos=True)
            [first] = llm.generate(["Count from one to one hundred, in words."], params)
            asked: Sequence[int] = first.prompt_token_ids
            llm.generate([[*asked, *first.outputs[0].token_ids, 1]], params)
        own = [int(event["exact_prefix_tokens"]) for event in ended_requests(tuple(AuditFile(audit).read()))][-1]
    found = f"{own} tokens of the engine's own prefix after a prompt of {len(asked)} and {_ANSWER} generated tokens"
    return Finding("commits", facts.get("manager") == _V1 or own <= len(asked), found)
