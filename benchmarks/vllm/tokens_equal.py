"""Answers of two ranks whose KV was moved and computed again, beside those of one rank.

`python -m benchmarks.vllm.tokens_equal --json DIR` asks the shipped model prompts that share documents: stock vLLM on
one rank, stock vLLM on two, and ours on two, where every layer computes the moved text again. So our answers are cold
runs' but for rounding. Row `vllm_tp2_tokens_equal` is the share of our tokens that equal one rank's, and its goal the
share of stock vLLM's on two ranks: where sums are added in another order, tokens may differ. `--small` asks few
prompts.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.bench_model import NEW_TOKENS, PLAIN, TP2
from benchmarks.program import parser_of
from benchmarks.vllm.arm import SMALL, STOCK, VllmArm
from semblend_trt.policy import ReusePolicy
from validation.cases import equal_start
from validation.models import shipped_model
from validation.results import Results

_ANSWER_TOKENS, _DOCUMENT, _LAYERS = 64, 1024, 8


def _answers(policy: str, kv: str, count: int) -> tuple[list[list[int]], int]:
    """The answers to `count` prompts, and how many of their tokens came from donors, to be computed again."""
    os.environ["SEMBLEND_RECOMPUTE_BOUNDARY_LAYER"] = str(_LAYERS)
    options: dict[str, Any] = {"model": str(shipped_model()), "load_format": "auto", "max_model_len": 2048}
    here = {"block_size": 32, "enforce_eager": True}
    options |= {"gpu_memory_utilization": 0.3, "dtype": "bfloat16"} if torch.cuda.is_available() else here
    found, sizes = list[list[int]](), replace(SMALL, long=_DOCUMENT + NEW_TOKENS)
    with closing(VllmArm(policy, sizes, options, kv=kv)) as arm:
        if problem := arm.begin():
            raise SystemExit(f"no figure: {problem}")
        with arm.watched() as served:
            for _ in range(count):
                document = arm.prompts.document(sizes.long)
                arm.save(arm.prompts.donor(document))
                found.append(list(arm.ask(arm.prompts.shifted(document), _ANSWER_TOKENS).outputs[0].token_ids))
    return found, served.get("offered_tokens", 0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, ask, print and write. Exits with a message if nothing came from donors."""
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="a dry run with few prompts, no goal")
    options = parser.parse_args(arguments)
    rows, count, answers = Results(arguments, dry=options.small), 2 if options.small else 48, []
    for policy, kv in ((STOCK, PLAIN), (STOCK, TP2), (ReusePolicy.BOUNDARY.value, TP2)):
        # vLLM holds one engine a process.
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            given, offered = process.submit(_answers, policy, kv, count).result()
        answers.append(given)
    if offered < count * _DOCUMENT // 2:
        raise SystemExit(f"no figure: {offered} tokens came from donors")
    one, *two = answers
    floor, share = (sum(map(equal_start, own, one)) / sum(map(len, one)) for own in two)
    baseline = (
        f"of {count} answers of {_ANSWER_TOKENS} tokens to moved documents, {offered:,} offered tokens computed again; "
        f"stock vLLM on two ranks {floor:.3f} of one rank's"
    )
    rows.add("vllm_tp2_tokens_equal", share, "share", baseline, floor, "higher")
    rows.write(options.json, "vllm_tp2_tokens")


if __name__ == "__main__":
    main()
