"""Tensor parallelism: answers of a model that several cards share against one card's, and times to the first token.

`python -m benchmarks.embedded.tensor_parallel --ranks 2` starts one process for each rank and makes random models.
`--backend gloo --layers 2 --size 512` is a dry run with a narrow model, which needs no card.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import distributed

from benchmarks.embedded.bench_model import (
    CARD_FOLDER,
    Bench,
    Hits,
    Prompts,
    label,
    make_runner,
    parser_of_model,
)
from benchmarks.embedded.verified import KEEP_ALL, check_every_plan
from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.plan import SpanCheck
from semblend_trt.ranks import Ranks, joined_ranks
from validation.results import Results

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM
    from semblend_trt.plan import CheckEvidence

EIGHT_TOKENS = SamplingParams(max_tokens=8, ignore_eos=True)
ANSWERED_SIZES = (300, 700, 1_000)
# About the deviation of a random model's KV in another context: some tokens are kept, some are not.
SOME_KEPT = 1.0
CHECK_LAYER = 2
DONORS = 3
# A rank that waits longer has lost the others.
PATIENCE = timedelta(seconds=120)


def answers(bench: Bench) -> list[Any]:
    """Answers of one model's engines: tokens of cold and of shifted prompts, and the evidence of their checks."""
    prompts = Prompts(int(bench.runner.config.vocab_size), seed=1)
    with bench.engine(warm=False) as llm:
        found: list[Any] = [_tokens(llm, prompts.fresh(min(size, bench.longest))) for size in ANSWERED_SIZES]
    for check in (None, SpanCheck(1, SOME_KEPT)):
        with bench.engine(bench.donors_in("DEVICE", DONORS), warm=False) as llm:
            if check is not None:
                check_every_plan(llm, check)
            evidence = _evidence(llm)
            document = prompts.document(bench.longest)
            for prompt in (prompts.donor(document), *(prompts.shifted(document) for _ in range(3))):
                found.append(_tokens(llm, prompt))
                llm.settle()
            found += [asdict(each) for each in evidence]
    return found


def cold_of(bench: Bench) -> float:
    with bench.engine() as llm:
        return bench.cold(llm, bench.longest)


def times(bench: Bench) -> dict[str, Any]:
    """Milliseconds of cold, shifted and checked prompts, by name."""
    size, cold = bench.longest, cold_of(bench)
    with bench.engine(bench.donors_in("DEVICE", DONORS)) as llm:
        shifted = bench.hits(llm, size)
    with bench.engine(bench.donors_in("DEVICE", DONORS)) as llm:
        check_every_plan(llm, SpanCheck(min(CHECK_LAYER, bench.runner.facts.num_layers - 1), KEEP_ALL))
        verified = bench.hits(llm, size)
    return {"cold": cold, "shifted": asdict(shifted), "verified": verified.ttft}


def live(rank: int, run: Namespace, folder: Path) -> None:
    """One rank's process: measures alone, joins the others, measures again, and writes `rank-N.json`."""
    if run.device == "cpu":
        torch.set_num_threads(1)
    own = folder / f"rank-{rank}"
    own.mkdir()

    def bench(ranks: Ranks | None, *, decided: bool) -> Bench:
        runner = make_runner(own, run.device, run.layers, ranks, decided=decided)
        return Bench.of(runner, own, run.repeats, (ANSWERED_SIZES[-1] if decided else run.size,))

    told: dict[str, Any] = {"alone": answers(bench(None, decided=True))}
    alone = cold_of(bench(None, decided=False))
    meeting = f"file://{folder / 'meeting'}"
    distributed.init_process_group(run.backend, init_method=meeting, rank=rank, world_size=run.ranks, timeout=PATIENCE)
    ranks = joined_ranks(run.ranks)
    told["shared"] = answers(bench(ranks, decided=True))
    large = bench(ranks, decided=False)
    told["times"] = times(large) | {"alone": alone}
    told["large"] = answers(large)
    (folder / f"rank-{rank}.json").write_text(json.dumps(told), encoding="utf-8")
    distributed.destroy_process_group()


def add_rows(run: Namespace, told: Sequence[dict[str, Any]], rows: Results) -> None:
    """Adds the rows of what the ranks wrote; the times are rank 0's."""
    name, size, of_ranks = f"tp{run.ranks}", label(run.size), f"{run.ranks} ranks over {run.backend}"
    equal = _share(told[0]["alone"], told[0]["shared"])
    baseline = f"one rank: tokens and checks of {len(told[0]['alone'])} answers, a float32 model, {of_ranks}"
    rows.add(f"{name}_tokens_equal", equal, "share", baseline, 1.0, "higher")
    agree = min(_share(told[0][part], each[part]) for each in told for part in ("shared", "large"))
    rows.add(f"{name}_ranks_agree", agree, "share", "rank 0: tokens and checks, both models", 1.0, "higher")
    found = told[0]["times"]
    alone, cold = found["alone"], found["cold"]
    rows.add(f"{name}_cold_ttft_{size}_ms", cold, "ms", f"one rank {alone:,.1f} ms")
    shifted = Hits(**found["shifted"])
    baseline = f"cold {cold:,.1f} ms; {shifted.sentence()}"
    rows.add(f"{name}_shifted_ttft_{size}_ms", shifted.ttft, "ms", baseline)
    shifted.add_split(rows, f"{name}_shifted_{size}")
    rows.add(f"{name}_shifted_over_cold_{size}", shifted.ttft / cold, "x", f"cold {cold:,.1f} ms, {of_ranks}")
    baseline = f"cold {cold:,.1f} ms, {of_ranks}; the threshold of 1e30 keeps all that deviates"
    rows.add(f"{name}_verified_over_cold_{size}", found["verified"] / cold, "x", baseline)


def start(run: Namespace, folder: Path) -> list[dict[str, Any]]:
    """Runs the ranks; returns what each wrote. Ends the program when one of them fails."""
    context = _context(run)
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(run.ranks)))).split(",")
    processes = [context.Process(target=live, args=(rank, run, folder), daemon=True) for rank in range(run.ranks)]
    for rank, process in enumerate(processes):
        # A rank sees one card, already while it imports.
        card = {} if run.device == "cpu" else {"CUDA_VISIBLE_DEVICES": cards[rank]}
        with mock.patch.dict(os.environ, card):
            process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise SystemExit(f"The ranks ended with {[process.exitcode for process in processes]}; see their errors above.")
    return [json.loads((folder / f"rank-{rank}.json").read_text(encoding="utf-8")) for rank in range(run.ranks)]


def _context(run: Namespace) -> Any:
    """How processes are started; with CUDA by spawning, since a fork cannot use CUDA once its parent has."""
    if run.device == "cuda":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


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
    parser = parser_of_model(__doc__)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4), help="processes that share the model")
    parser.add_argument("--backend", default="nccl", choices=("nccl", "gloo"), help="nccl on cards, gloo on the CPU")
    parser.add_argument("--size", type=int, default=8_192, help="tokens of the prompts")
    run = parser.parse_args(arguments)
    run.device = "cuda" if run.backend == "nccl" else "cpu"
    if run.device == "cuda" and torch.cuda.device_count() < run.ranks:
        parser.error(
            f"torch sees {torch.cuda.device_count()} CUDA devices; --backend gloo --layers 2 --size 512 is a dry run "
            "without any"
        )
    with tempfile.TemporaryDirectory() as folder:
        told = start(run, Path(folder))
    rows = Results(arguments, run.device, dry=run.layers is not None)
    rows.measured.machine["gpus"] = run.ranks if run.device == "cuda" else 0
    add_rows(run, told, rows)
    rows.write(run.json, "tensor_parallel", CARD_FOLDER)


if __name__ == "__main__":
    main()
