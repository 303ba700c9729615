"""Answers of two ranks whose KV was moved and computed again, beside those of one rank.

`python -m benchmarks.vllm.tokens_equal --out DIR` asks the shipped model prompts that share documents: stock vLLM on
one rank, stock vLLM on two, and ours on two, where every layer computes the moved text again. So our answers are cold
runs' but for rounding. Row `vllm_tp2_tokens_equal` is the share of our tokens that equal one rank's, and its goal the
share of stock vLLM's on two ranks: where sums are added in another order, tokens may differ. `--small` asks few
prompts.
"""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.bench_model import Prompts
from benchmarks.program import parser_of
from validation.models import shipped_model
from validation.results import Measured, Results, command, write_rows
from validation.vllm_engine import TRANSFER, settle

if TYPE_CHECKING:
    from collections.abc import Sequence

_NEW_TOKENS, _DOCUMENT, _VOCABULARY = 64, 1024, 2000


def _answers(ranks: int, *, is_ours: bool, count: int) -> tuple[list[list[int]], int]:
    """The answers to `count` prompts, and how many of their tokens came from donors, to be computed again."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    on_card = torch.cuda.is_available()
    given: dict[str, Any] = {"gpu_memory_utilization": 0.3} if on_card else {"block_size": 32, "enforce_eager": True}
    if is_ours:
        layers = {"policy": "boundary", "recompute_boundary_layer": 8, "min_saving": 0, "host_bytes": 1 << 30}
        given["kv_transfer_config"] = KVTransferConfig(**TRANSFER, kv_connector_extra_config=layers)
    dtype = "bfloat16" if on_card else "float32"
    llm = LLM(str(shipped_model()), dtype=dtype, max_model_len=2048, tensor_parallel_size=ranks, **given)
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    core: Any = llm.llm_engine.engine_core.engine_core
    prompts, found, offered = Prompts(_VOCABULARY), list[list[int]](), 0

    def ask(prompt: list[int], new_tokens: int = _NEW_TOKENS) -> Any:
        params.max_tokens = new_tokens
        [output] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return output

    for _ in range(count):
        document = prompts.document(_DOCUMENT)
        ask(prompts.donor(document), 1)
        settle(core, lambda: ask([0], 1))
        output = ask(prompts.shifted(document))
        found.append(list(output.outputs[0].token_ids))
        receipt = (output.kv_transfer_params or {}).get("semblend.receipt", {})
        offered += receipt.get("offered_tokens", 0)
    llm.llm_engine.engine_core.shutdown()
    return found, offered


def _measure(connection: Any, ranks: int, is_ours: bool, count: int) -> None:
    connection.send(_answers(ranks, is_ours=is_ours, count=count))


def _in_process(ranks: int, is_ours: bool, count: int) -> tuple[list[list[int]], int]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_measure, args=(theirs, ranks, is_ours, count))
    process.start()
    theirs.close()
    found: tuple[list[list[int]], int] = ours.recv()
    process.join()
    return found


def _equal(found: list[list[int]], wanted: list[list[int]]) -> float:
    """The share of tokens before the first that differs."""
    equal = 0
    for own, other in zip(found, wanted, strict=True):
        differs = (index for index, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1])
        equal += next(differs, len(other))
    return equal / sum(map(len, wanted))


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, ask, print and write. Exits with a message if nothing came from donors."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the row goes")
    parser.add_argument("--small", action="store_true", help="a dry run with few prompts, no goal")
    options = parser.parse_args(arguments)
    count = 2 if options.small else 48
    (one, _), (stock, _) = _in_process(1, False, count), _in_process(2, False, count)
    ours, offered = _in_process(2, True, count)
    if offered < count * _DOCUMENT // 2:
        raise SystemExit(f"no figure: {offered} tokens came from donors")
    floor, share = _equal(stock, one), _equal(ours, one)
    measured = Measured.now(command(arguments), "cuda" if torch.cuda.is_available() else "cpu")
    rows = Results(measured=measured, dry=options.small)
    baseline = (
        f"of {count} answers of {_NEW_TOKENS} tokens to moved documents, {offered:,} offered tokens computed again; "
        f"stock vLLM on two ranks {floor:.3f} of one rank's"
    )
    rows.add("vllm_tp2_tokens_equal", share, "share", baseline, floor, "higher")
    rows.write(options.out / "rows", "vllm_tp2_tokens")
    if options.json is not None:
        write_rows(options.json / "vllm_tp2_tokens.json", rows.rows)


if __name__ == "__main__":
    main()
