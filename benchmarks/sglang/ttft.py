"""Times to the first token inside SGLang beside stock SGLang, one engine after the other in this process.

`python -m benchmarks.sglang.ttft --json DIR` asks prompts of 24k tokens of a model of Qwen2.5-7B's shape with random
weights. With the shipped model it compares log-probabilities where all layers are computed again. Without a card it is
a dry run: a small model and 1k tokens. On a card both engines attend by Triton, without CUDA graphs."""

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

from benchmarks.bench_model import BIG, LITTLE, NEW_TOKENS, Prompts, label, use_profile, write_config
from benchmarks.program import parser_of
from semblend_trt.reuse_profile import ProfileCheck
from validation.models import shipped_model
from validation.results import Results
from validation.sglang_engine import Ask, LocalSglang

# Prompts of a kind that count, after one that does not; prompts compared with stock's; layers computed again.
TIMES, COMPARED, BOUNDARY = 5, 4, 8
# Room for three of the longest prompts, and for whole donors on their way to a tier.
REUSE = {
    "SEMBLEND_DEVICE_BYTES": str(4 << 30),
    "SEMBLEND_HOST_BYTES": str(8 << 30),
    "SEMBLEND_SNAPSHOT_BYTES": str(2 << 30),
    "SEMBLEND_MIN_SAVING": "0",
    "SEMBLEND_METRICS": "0",
    "SEMBLEND_EMBEDDER": "off",
    "SEMBLEND_MODEL_REVISION": "random",
    "SEMBLEND_TOKENIZER_REVISION": "none",
}
# What is timed under policy verified: every token compared in one of the lowest layers, or one in 16.
CHECKS = {
    "checked": ProfileCheck(layer=2, threshold=1.0),
    "sampled": ProfileCheck(layer=2, threshold=1.0, sample_every=16, sample_threshold=1.0),
}


def opened(model: Path, tokens: int, *, is_stock: bool, **options: Any) -> closing[LocalSglang]:
    """Open SGLang with room for three prompts of `tokens` tokens, stock or with SemBlend. Raises what SGLang raises."""
    own: dict[str, Any] = {} if is_stock else {"radix_cache_backend": "semblend"}
    if torch.cuda.is_available():
        own |= {"attention_backend": "triton", "disable_cuda_graph": True, "mem_fraction_static": 0.6}
    own |= {"max_total_tokens": 3 * tokens + 4096, "max_running_requests": 4}
    return closing(LocalSglang(str(model), **own, **options))


def times(served: LocalSglang, make: Callable[[], list[int]], reused: int = 0) -> list[float]:
    """Return milliseconds of prompts with one new token, each alone and after what ended before it is saved. Raises
    RuntimeError if fewer than `reused` tokens of one come from a cache."""
    found = []
    for _ in range(1 + TIMES):
        prompt = make()
        began = time.perf_counter()
        (answer,) = served.ask(Ask(prompt, {"max_new_tokens": 1}))
        found.append(1e3 * (time.perf_counter() - began))
        if answer.cached_tokens < reused:
            raise RuntimeError(f"{answer.cached_tokens} of {reused} tokens were reused: {answer.customized_info}")
        served.settle()
    return found[1:]


def add_times(rows: Results, folder: Path, tokens: int, where: str) -> None:
    """Add the rows of prompts of `tokens` tokens. Raises RuntimeError if less was reused than the document."""
    options = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "float32" if rows.dry else "bfloat16"}
    prompts, name = Prompts(int(write_config(folder, LITTLE if rows.dry else BIG).vocab_size)), label(tokens)
    document = prompts.document(tokens)
    with opened(folder, tokens, is_stock=True, **options) as stock:
        cold = times(stock, lambda: prompts.fresh(tokens))
        stock.ask(Ask(document, {"max_new_tokens": 1}))
        hit = times(stock, lambda: document + prompts.fresh(NEW_TOKENS))
    os.environ.update(REUSE, SEMBLEND_POLICY="verified", SEMBLEND_RISK="0.5")
    found = {}
    with opened(folder, tokens, is_stock=False, **options) as served:
        served.ask(Ask(prompts.fresh(tokens // 8), {"max_new_tokens": 1}))  # by which SemBlend checks itself
        found["miss"] = times(served, lambda: prompts.fresh(tokens))
        served.ask(Ask(prompts.donor(document), {"max_new_tokens": 1}))
        served.settle()
        for kind, check in CHECKS.items():
            use_profile(served.cache._scheduler, folder, policy="verified", check=check)
            found[kind] = times(served, lambda: prompts.shifted(document), len(document))
    shape = "a small model" if rows.dry else "Qwen2.5-7B's shape, bfloat16"
    said = f"stock cold {median(cold):,.1f} ms, exact hit {median(hit):,.1f} ms; {shape}, random weights; {where}"
    for kind, own in found.items():
        low, _, high = quantiles(own, n=4)
        spread = f"{median(own):,.1f} ms, half of {len(own)} within {low:,.1f} and {high:,.1f} ms; {said}"
        rows.add(f"sglang_{kind}_ttft_{name}_over_cold", median(own) / median(cold), "x", spread)
        if kind != "miss":
            rows.add(f"sglang_{kind}_ttft_{name}_over_exact_hit", median(own) / median(hit), "x", spread)


def add_exactness(rows: Results, where: str) -> None:
    """Add the largest difference of a token's log-probability from stock's, each prompt asked alone. Raises
    RuntimeError if no plan ran."""
    prompts, asked = Prompts(2000, seed=6), {"max_new_tokens": 16}
    document = prompts.document(640)
    donor, moved = prompts.donor(document), [prompts.shifted(document) for _ in range(COMPARED)]
    with opened(shipped_model(), 640, is_stock=True, dtype="float32", disable_radix_cache=True) as stock:
        theirs, again = ([stock.ask(Ask(each, asked))[0] for each in moved] for _ in range(2))
    os.environ.update(REUSE, SEMBLEND_POLICY="boundary", SEMBLEND_RECOMPUTE_BOUNDARY_LAYER=str(BOUNDARY))
    with opened(shipped_model(), 640, is_stock=False, dtype="float32") as served:
        for prompt in (prompts.fresh(128), donor):
            served.ask(Ask(prompt, asked))
            served.settle()
        ours = [served.ask(Ask(each, asked))[0] for each in moved]
        if min(each.cached_tokens for each in ours) < len(document):
            raise RuntimeError(f"no plan ran: {ours[0].customized_info}")
    same = sum(list(mine.output_ids) == list(other.output_ids) for mine, other in zip(ours, theirs, strict=True))
    said = (
        f"{COMPARED} prompts whose plans compute all layers again; {same} of {COMPARED} answers have stock's tokens; "
        f"stock's second run differs by {difference(again, theirs):.2g}; the shipped model, float32; {where}"
    )
    rows.add("sglang_planned_exactness", difference(ours, theirs), "nats", said)


def difference(found: list[Any], other: list[Any]) -> float:
    """Return the largest difference of the log-probabilities of answers, in nats."""
    named = ([each for answer in side for each in answer.logprob.output_token_logprobs_val] for side in (found, other))
    return float(max(abs(one - two) for one, two in zip(*named, strict=True)))


def main() -> None:
    options = parser_of(__doc__).parse_args()
    is_card = torch.cuda.is_available()
    rows, where = Results(dry=not is_card), f"SGLang 0.5.23, attention by Triton, torch {torch.__version__}"
    if forced := os.environ.get("SGLANG_FORCE_FUSED_OP_BACKEND"):
        where += f", norms, rotation and activation by {forced} in both"
    add_exactness(rows, where)
    with tempfile.TemporaryDirectory() as folder:
        add_times(rows, Path(folder), 24_576 if is_card else 1_024, where)
    rows.write(options.json, "sglang")


if __name__ == "__main__":
    main()
