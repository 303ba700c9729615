"""`python -m validation.trtllm_check`: runs the connector inside a real TensorRT-LLM, and says what holds there.

Four engines of one model serve the same prompts, one after the other: without a connector, with ours, with ours
attached and every layer computed again, and with ours attached and nothing computed again. Status: 0 when everything
holds, 1 naming what does not, 2 where tensorrt_llm cannot be imported or the model cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import SemBlendError
from validation.documents import stock_list
from validation.prompts import in_plain_text, render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

DEFAULT_MODEL = "Qwen/Qwen2.5-1.5B-Instruct"
STOCK, EXACT, RECOMPUTED, REUSED = "stock", "exact", "recomputed", "reused"
# Half precision makes some answers differ when a prompt is computed in other pieces; the stock engine shows how many.
_SLACK = 0.05
_MAX_EM_DROP = 0.02
_PREFIX = "TRTLLM_SEMBLEND_"
# What is asked is whether answers are right, not whether the first lookup is quick.
_ALL_ARMS = {"LOOKUP_DEADLINE_MS": "10000"}


@dataclass(frozen=True, slots=True)
class Trial:
    """A prompt and the right answer. The others of its group hold the same documents in another order."""

    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Workload:
    """`targets` hold the documents of `donors` at other places; they are asked twice."""

    donors: tuple[Trial, ...]
    targets: tuple[Trial, ...]

    @property
    def prompts(self) -> list[str]:
        return [trial.prompt for trial in (*self.donors, *self.targets, *self.targets)]


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine answered to the workload's prompts, and the audit events of its connector."""

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    events: tuple[dict[str, Any], ...]

    def settled(self) -> list[dict[str, Any]]:
        """How every request ended, in the order in which they were asked."""
        ended = [event for event in self.events if event["event"] == "request_settled"]
        return sorted(ended, key=lambda event: int(event["request_id"]))


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result."""

    name: str
    holds: bool
    what: str


def workload(groups: int, rows: int, seed: int = 0) -> Workload:
    """Stock lists, four a prompt, under one instruction as donors and reversed under another as targets."""
    rng = random.Random(seed)
    donors: list[Trial] = []
    targets: list[Trial] = []
    for _ in range(groups):
        lists = [stock_list(rng, rows=rows) for _ in range(4)]
        texts = [each.text for each in lists]
        for trials, instruction, order in (
            (donors, "Answer with a number only.", texts),
            (targets, "Read the lists, then give the number that is asked for, and nothing else.", texts[::-1]),
        ):
            question = rng.choice(rng.choice(lists).questions)
            trials.append(Trial(in_plain_text(render(instruction, order, question.text)), question.answer))
    return Workload(tuple(donors), tuple(targets))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        import_module("tensorrt_llm")
    except (ImportError, OSError, RuntimeError) as error:
        sys.stderr.write(
            f"tensorrt_llm cannot be imported here ({error}); run this where TensorRT-LLM and an NVIDIA GPU are.\n"
        )
        return 2
    asked = workload(arguments.groups, arguments.rows)
    try:
        layers = model_facts(arguments.model).num_layers
    except SemBlendError as error:
        sys.stderr.write(f"{error}. A folder is named by its full path: make leaves its own.\n")
        return 2
    served = {arm: _serve(arm, arguments.model, asked.prompts, settings) for arm, settings in _arms(layers).items()}
    findings = judge(asked, served)
    for finding in findings:
        sys.stdout.write(f"{finding.name:<12} {'holds' if finding.holds else 'FAILS'}  {finding.what}\n")
    return 0 if all(finding.holds for finding in findings) else 1


def _arms(num_layers: int) -> dict[str, dict[str, str]]:
    """Settings of each engine's connector; none for the engine without one."""
    recomputed = {"POLICY": "boundary", "RECOMPUTE_BOUNDARY_LAYER": str(num_layers)}
    return {STOCK: {}, EXACT: {"POLICY": "exact"}, RECOMPUTED: recomputed, REUSED: {"POLICY": "position_fix"}}


def _serve(arm: str, model: str, prompts: list[str], settings: dict[str, str]) -> Served:
    """One engine, from its start to its end: only then is the audit log complete."""
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit.jsonl"
        tokens, texts = [], []
        with _environment({**_ALL_ARMS, **settings, "AUDIT_PATH": str(audit)}), _engine(arm, model) as llm:
            params = import_module("tensorrt_llm").SamplingParams(max_tokens=16, temperature=0.0)
            for prompt in prompts:
                [output] = llm.generate([prompt], params)
                tokens.append(tuple(output.outputs[0].token_ids))
                texts.append(output.outputs[0].text)
        lines = audit.read_text("utf-8").splitlines() if audit.is_file() else []
        return Served(tuple(tokens), tuple(texts), tuple(json.loads(line) for line in lines))


def _engine(arm: str, model: str) -> Any:
    # Where both names are: `tensorrt_llm.llmapi` hands on KvCacheConfig only.
    api = import_module("tensorrt_llm.llmapi.llm_args")
    connector = None
    if arm != STOCK:
        connector = api.KvCacheConnectorConfig(
            connector_module="semblend_trt.connector" if arm == EXACT else "engine_wrapper.connector",
            connector_scheduler_class="SemBlendKvConnectorScheduler",
            connector_worker_class="SemBlendKvConnectorWorker",
        )
    # Plans are executed in an eager decoder only, over the V1 cache manager, which main has to be asked for.
    cache = {name: False for name in ("use_kv_cache_manager_v2",) if name in api.KvCacheConfig.model_fields}
    return import_module("tensorrt_llm").LLM(
        model=model,
        enable_chunked_prefill=True,
        cuda_graph_config=None,
        kv_cache_config=api.KvCacheConfig(enable_block_reuse=True, free_gpu_memory_fraction=0.6, **cache),
        kv_connector_config=connector,
    )


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update({_PREFIX + name: value for name, value in settings.items()})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def judge(asked: Workload, served: dict[str, Served]) -> list[Finding]:
    """What the four engines' answers and audit logs show."""
    checks: tuple[Callable[[Workload, dict[str, Served]], Finding], ...]
    checks = (_smoke, _exactness, _execution, _publication, _validation)
    return [check(asked, served) for check in checks]


def _smoke(asked: Workload, served: dict[str, Served]) -> Finding:
    """Every prompt is answered, and every connector has seen every request."""
    prompts = len(asked.prompts)
    silent = [arm for arm, each in served.items() if sum(map(bool, each.tokens)) < prompts]
    unseen = [arm for arm, each in served.items() if arm != STOCK and len(each.settled()) < prompts]
    refused = {
        str(event["refusal"])
        for each in served.values()
        for event in each.events
        if event["event"] == "scheduler_initialized" and event["refusal"]
    }
    what = (
        f"{prompts} prompts; unanswered in {silent}, not seen by the connector in {unseen}, refused: {sorted(refused)}"
    )
    return Finding("smoke", not silent and not unseen and not refused, what)


def _exactness(asked: Workload, served: dict[str, Served]) -> Finding:
    """What is exact, and what is computed again in every layer, is answered as the stock engine answers."""
    first, second = _twice(asked, served[STOCK])
    floor = _share_equal(first, second)
    shares = {arm: _share_equal(served[STOCK].tokens, served[arm].tokens) for arm in (EXACT, RECOMPUTED)}
    what = f"answers equal to the stock engine's: {shares}; to its own, asked twice: {floor:.3f}"
    return Finding("exactness", all(share >= floor - _SLACK for share in shares.values()), what)


def _execution(asked: Workload, served: dict[str, Served]) -> Finding:
    """Text at other places was offered, so that the decoder was attached to and the self-check has passed."""
    start, end = len(asked.donors), len(asked.donors) + len(asked.targets)
    offered = {
        arm: sum(int(event.get("offered_tokens") or 0) for event in served[arm].settled()[start:end])
        for arm in (RECOMPUTED, REUSED)
    }
    segmented = {arm: any(_is_segmented(event) for event in served[arm].events) for arm in offered}
    what = f"tokens offered from other places {offered}, with holes between them {segmented}"
    return Finding("execution", all(offered.values()) and all(segmented.values()), what)


def _publication(asked: Workload, served: dict[str, Served]) -> Finding:
    """A prompt that was served approximately finds at most its exact part in the engine when it is asked again."""
    grown = []
    for arm in (RECOMPUTED, REUSED):
        exact = _exact_parts(served[arm].events)
        first, second = _twice(asked, served[arm].settled())
        for before, after in zip(first, second, strict=True):
            limit = max(before["exact_prefix_tokens"], exact.get(before["request_id"], after["exact_prefix_tokens"]))
            grown += [arm] if after["exact_prefix_tokens"] > limit else []
    return Finding("publication", not grown, f"prompts whose approximate KV was published: {grown}")


def _exact_parts(events: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Of every request with a plan that moves text to another place, the tokens in front of that."""
    dispatched = [event for event in events if event["event"] == "plan_dispatched"]
    shifted = {
        event["request_id"]: [target for _, donor, target, _ in event["spans"] if donor != target]
        for event in dispatched
    }
    return {request_id: min(starts) for request_id, starts in shifted.items() if starts}


def _validation(asked: Workload, served: dict[str, Served]) -> Finding:
    """Answers from reused text are as often right as cold ones."""
    right = {arm: _exact_matches(asked, served[arm]) for arm in (STOCK, REUSED)}
    what = f"share of right answers {right}; a drop of {_MAX_EM_DROP} is allowed"
    return Finding("validation", right[STOCK] - right[REUSED] <= _MAX_EM_DROP, what)


def _is_segmented(event: dict[str, Any]) -> bool:
    return (event["event"], event.get("kind")) == ("lookup", "request_local_segmented")


def _twice(asked: Workload, results: Any) -> tuple[list[Any], list[Any]]:
    """The results of the targets, as they were asked first and again. `results`: Served, or one item a prompt."""
    items: list[Any] = list(results.tokens if isinstance(results, Served) else results)
    start, count = len(asked.donors), len(asked.targets)
    return items[start : start + count], items[start + count : start + 2 * count]


def _share_equal(first: Sequence[Any], second: Sequence[Any]) -> float:
    return sum(bool(one == other) for one, other in zip(first, second, strict=True)) / max(1, len(first))


def _exact_matches(asked: Workload, served: Served) -> float:
    start = len(asked.donors)
    texts = served.texts[start : start + len(asked.targets)]
    pairs = zip(texts, asked.targets, strict=True)
    right = [re.findall(r"\d+", text)[:1] == [trial.answer] for text, trial in pairs]
    return sum(right) / max(1, len(right))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m validation.trtllm_check", description=__doc__)
    parser.add_argument(
        "--model", default=DEFAULT_MODEL, help="a folder (full path) or a hub id (default: %(default)s)"
    )
    parser.add_argument("--groups", type=int, default=24, help="prompts of each kind (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=24, help="rows of each stock list (default: %(default)s)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
