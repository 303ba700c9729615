"""Tensor parallelism: the answers of a model that several cards share against those of one card.

`python -m benchmarks.embedded.tensor_parallel` starts one process for each of two ranks, which make random models.
`--backend gloo --layers 2 --size 512` is a dry run with a narrow model, which needs no card.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import distributed, multiprocessing

from benchmarks.embedded.bench_model import Prompts, make_runner
from benchmarks.program import FOLDER, parser_of
from engine_wrapper.embedded.request import SamplingParams
from semblend_trt.plan import SpanCheck
from semblend_trt.ranks import joined_ranks
from validation.embedded_engine import RANDOM_WEIGHTS, open_llm
from validation.results import Results

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM
    from engine_wrapper.embedded.model_runner import ModelRunner
    from semblend_trt.plan import CheckEvidence, SemanticKvPlan

RANKS = 2
# Weights so wide that the order in which sums are added does not change which logit is the largest.
_DECIDED: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "vocab_size": 512,
    "initializer_range": 0.2,
}
EIGHT_TOKENS = SamplingParams(max_tokens=8, ignore_eos=True)
ANSWERED_SIZES = (300, 700, 1_000)
# About the deviation of a random model's KV in another context: some tokens are kept, some are not.
SOME_KEPT = SpanCheck(1, 1.0)
DONORS = 3
# A rank that waits longer has lost the others.
PATIENCE = timedelta(seconds=120)


def answers(runner: ModelRunner, folder: Path, longest: int) -> list[Any]:
    """Answers of one model's engines: tokens of cold and of shifted prompts, and the evidence of their checks."""
    prompts = Prompts(int(runner.config.vocab_size), seed=1)
    room, facts = longest + 64, runner.facts
    token_bytes = facts.num_layers * 2 * facts.kv_heads * facts.head_dim * runner.dtype.itemsize
    engine: dict[str, Any] = {
        "tensor_parallel_size": runner.ranks.size,
        "max_num_tokens": longest,
        "enable_chunked_prefill": False,
    }
    engine |= {"max_seq_len": room, "pool_tokens": 2 * room}
    donors = {"POLICY": "position_fix", "HOST_BYTES": "0", "DEVICE_BYTES": str(DONORS * room * token_bytes)}
    with open_llm(folder, runner, None, **engine) as llm:
        found: list[Any] = [_tokens(llm, prompts.fresh(min(size, longest))) for size in ANSWERED_SIZES]
    for check in (None, SOME_KEPT):
        with open_llm(folder, runner, RANDOM_WEIGHTS | donors, **engine) as llm:
            if check is not None:
                _check_every_plan(llm, check)
            evidence = _evidence(llm)
            document = prompts.document(longest)
            for prompt in (prompts.donor(document), *(prompts.shifted(document) for _ in range(3))):
                found.append(_tokens(llm, prompt))
                llm.settle()
            found += [asdict(each) for each in evidence]
    return found


def live(rank: int, run: Namespace, folder: Path) -> None:
    """One rank's process: answers alone, joins the others, answers again, and writes `rank-N.json`."""
    if run.device == "cpu":
        torch.set_num_threads(1)
    own = folder / f"rank-{rank}"
    own.mkdir()
    alone = answers(make_runner(own, run.device, decided=_DECIDED), own, ANSWERED_SIZES[-1])
    meeting = f"file://{folder / 'meeting'}"
    distributed.init_process_group(run.backend, init_method=meeting, rank=rank, world_size=RANKS, timeout=PATIENCE)
    ranks = joined_ranks(RANKS)
    shared = answers(make_runner(own, run.device, ranks=ranks, decided=_DECIDED), own, ANSWERED_SIZES[-1])
    large = answers(make_runner(own, run.device, run.layers, ranks), own, run.size)
    (folder / f"rank-{rank}.json").write_text(json.dumps({"alone": alone, "shared": shared, "large": large}), "utf-8")
    distributed.destroy_process_group()


def start(run: Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs the ranks; returns what each wrote. Ends the program when one of them fails."""
    context = multiprocessing.get_context("spawn")
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(RANKS)))).split(",")
    processes = [context.Process(target=live, args=(rank, run, folder), daemon=True) for rank in range(RANKS)]
    for rank, process in enumerate(processes):
        # A rank sees one card, already while it imports.
        with mock.patch.dict(os.environ, {} if run.device == "cpu" else {"CUDA_VISIBLE_DEVICES": cards[rank]}):
            process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"The ranks ended with {[process.exitcode for process in processes]}; see their errors above.")
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(RANKS)]


def add_rows(run: Namespace, told: Sequence[dict[str, Any]], rows: Results) -> None:
    """Adds the rows of what the ranks wrote."""
    of_ranks = f"{RANKS} ranks over {run.backend}"
    equal = _share(told[0]["alone"], told[0]["shared"])
    baseline = f"one rank: tokens and checks of {len(told[0]['alone'])} answers, a float32 model, {of_ranks}"
    rows.add("tp2_tokens_equal", equal, "share", baseline, 1.0, "higher")
    agree = min(_share(told[0][part], each[part]) for each in told for part in ("shared", "large"))
    rows.add("tp2_ranks_agree", agree, "share", "rank 0: tokens and checks, both models", 1.0, "higher")


def _check_every_plan(llm: LLM, check: SpanCheck) -> None:
    """Gives every plan a check without a reuse profile, as random weights cannot be calibrated."""
    runner = llm.executor.model_runner
    take = runner.plan_source
    assert take is not None

    def take_checked(request_id: int) -> SemanticKvPlan | None:
        plan = take(request_id)
        return plan and replace(plan, execution=replace(plan.execution, check=check))

    runner.plan_source = take_checked


def _tokens(llm: LLM, prompt: list[int]) -> list[int]:
    return llm.generate([prompt], EIGHT_TOKENS)[0].outputs[0].token_ids


def _evidence(llm: LLM) -> list[CheckEvidence]:
    """A list that the evidence of this rank's checks is added to."""
    found: list[CheckEvidence] = []
    runner = llm.executor.model_runner
    sink = runner.evidence_sink
    assert sink is not None

    def keep(evidence: CheckEvidence) -> None:
        found.append(evidence)
        sink(evidence)

    runner.evidence_sink = keep
    return found


def _share(ours: list[Any], theirs: list[Any]) -> float:
    """Share of equal answers in two lists; deviations may differ in their last digits."""
    alike: list[bool] = [_rounded(our) == _rounded(their) for our, their in zip(ours, theirs, strict=True)]
    return sum(alike) / len(alike)


def _rounded(answer: Any) -> Any:
    return answer | {"largest_kept": round(answer["largest_kept"], 4)} if isinstance(answer, dict) else answer


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, prints and writes."""
    parser = parser_of(__doc__, FOLDER / "h200")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"), help="nccl on cards, gloo on the CPU")
    parser.add_argument("--layers", type=int, help="a dry run: a narrow model with this number of layers, no goals")
    parser.add_argument("--size", type=int, default=8_192, help="tokens of the large model's prompts")
    run = parser.parse_args(arguments)
    run.device = "cuda" if run.backend == "nccl" else "cpu"
    if run.device == "cuda" and torch.cuda.device_count() < RANKS:
        parser.error(
            f"torch sees {torch.cuda.device_count()} CUDA devices; --backend gloo --layers 2 --size 512 is a dry run "
            "without any"
        )
    with tempfile.TemporaryDirectory() as folder:
        told = start(run, Path(folder))
    rows = Results(arguments, run.device, dry=run.layers is not None)
    rows.measured.machine["gpus"] = RANKS if run.device == "cuda" else 0
    add_rows(run, told, rows)
    rows.write(run.json, "tensor_parallel", FOLDER / "h200")


if __name__ == "__main__":
    main()
