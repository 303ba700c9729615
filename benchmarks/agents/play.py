"""Play agents' histories turn by turn in vLLM: stock prefix caching, exact reuse, reuse within a bound, and unbounded.

    python -m benchmarks.agents.play --histories FILE --tokenizer FOLDER --json DIR
    python -m benchmarks.agents.play --histories FILE --tokenizer FOLDER --model FOLDER --json DIR

With `--model`, a real one, answers are compared with stock's: KL of all tokens up to the first other one, and changed
answers. Without it Qwen2.5-7B's shape has random weights, and reuse within a bound computes `--share` of the tokens at
any deviation: take the share that the bound computes of such prompts in a model that was calibrated."""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import rel_entr, softmax

from benchmarks.agents.histories import Session, read_histories, sessions_of
from benchmarks.program import FOLDER, parser_of
from benchmarks.vllm.arm import OF_SMOLLM2, STOCK, VERIFIED, Sizes, VllmArm
from semblend_trt.errors import SemBlendError
from semblend_trt.model_tokenizer import load_tokenizer
from semblend_trt.reuse_profile import ReuseProfile
from validation.cases import equal_start
from validation.models import shown_name
from validation.results import Results

EXACT, BOUNDED, UNBOUNDED = "exact", "bounded", "unbounded"
# Policies of the arms.
ARMS = {STOCK: STOCK, EXACT: EXACT, BOUNDED: VERIFIED, UNBOUNDED: "position_fix"}
_NEW_TOKENS = 8
# vLLM gives this many of the likeliest tokens at each position for the KL; the rest has too little mass to count.
_LOGPROBS = 64


@dataclass(slots=True)
class Turn:
    """One timed turn: `logprobs` are of the answer's tokens, by token id, and absent without a real model."""

    ttft_ms: float
    prompt_tokens: int
    cached_tokens: int
    answer: list[int]
    logprobs: list[dict[int, float]]


def play(arm: VllmArm, sessions: Sequence[Session], *, compares: bool) -> list[Turn]:
    """Serve each session's prompts one after the other, from empty caches; the first one of each is not timed."""
    arm.forget()
    found = []
    for session in sessions:
        for number, prompt in enumerate(session):
            ttft, output = arm.answer(prompt, _NEW_TOKENS, **({"logprobs": _LOGPROBS} if compares else {}))
            arm.settle()
            if not number:
                continue
            answer = output.outputs[0]
            shown = [{token: each.logprob for token, each in one.items()} for one in answer.logprobs or ()]
            found.append(Turn(ttft, len(prompt), output.num_cached_tokens or 0, list(answer.token_ids), shown))
    return found


def distances(stock: Sequence[Turn], own: Sequence[Turn]) -> tuple[list[float], int]:
    """Return each turn's mean KL in nats from stock's tokens, up to the first other token, and changed answers."""
    kls, changed = [], 0
    for cold, warm in zip(stock, own, strict=True):
        same = equal_start(cold.answer, warm.answer)
        changed += cold.answer != warm.answer
        pairs = zip(cold.logprobs[: same + 1], warm.logprobs[: same + 1], strict=True)
        kls.append(float(np.mean([_kl(*pair) for pair in pairs])))
    return kls, changed


def _kl(cold: Mapping[int, float], warm: Mapping[int, float]) -> float:
    """KL over the tokens that both show, normalised."""
    both = [token for token in cold if token in warm]
    return float(rel_entr(*(softmax([each[token] for token in both]) for each in (cold, warm))).sum())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the arms one after the other; print and write the rows."""
    parser = _parser()
    options = parser.parse_args(arguments)
    beside = [*ARMS][1:] if options.arms is None else options.arms.split(",")
    if unknown := {*beside} - {*ARMS}:
        parser.error(f"--arms has {', '.join(sorted(unknown))}; possible are {', '.join(ARMS)}")
    rows = Results(arguments, "cuda" if options.device == "cuda" else "cpu", dry=options.sessions < 3, is_shown=False)
    try:
        tokenizer = load_tokenizer(options.tokenizer)
        histories = read_histories(options.histories, options.sessions, options.tokens)
        variants = sessions_of(tokenizer, histories, options.tokens, options.turns)
        stock = _apart(STOCK, variants, options)
        for name in dict.fromkeys(each for each in beside if each != STOCK):
            turns = _apart(name, variants, options)
            for variant in variants:
                add_rows(rows, variant, name, turns[variant], stock[variant], options)
            # What is measured stays if a later arm fails.
            shape = "smollm2" if options.model else "7b"
            rows.write(options.json, f"agents_{shape}", FOLDER / str(rows.measured.machine["name"]))
    except SemBlendError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _apart(name: str, variants: Mapping[str, list[Session]], options: Any) -> dict[str, list[Turn]]:
    """Return an arm's turns by variant, served in a process of its own: vLLM holds one engine a process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        return process.submit(_served, name, ARMS[name], variants, options).result()


def _served(name: str, policy: str, variants: Mapping[str, list[Session]], options: Any) -> dict[str, list[Turn]]:
    sizes = replace(OF_SMOLLM2 if options.model else Sizes(), long=options.tokens, device_bytes=8 << 30)
    engine: dict[str, Any] = {
        "max_model_len": options.tokens + 256,
        "gpu_memory_utilization": 0.8 if options.device == "cuda" else 0.2,
    }
    if options.model:
        engine |= {"model": options.model, "load_format": "auto", "max_logprobs": _LOGPROBS}
    if options.device == "cpu":
        engine |= {"block_size": 32, "enforce_eager": True, "dtype": "float32"}
    with closing(VllmArm(policy, sizes, engine)) as arm:
        if problem := arm.begin(declines=True):
            raise SemBlendError(f"{name} does not serve as it should: {problem}")
        arm.use_bound(_profile(options), options.share)
        # The first plan compiles kernels: it is one of other text.
        first, *_ = variants.values()
        play(arm, [[prompt[::-1] for prompt in first[0][:2]]], compares=False)
        return {variant: play(arm, sessions, compares=bool(options.model)) for variant, sessions in variants.items()}


def _profile(options: Any) -> ReuseProfile | None:
    """The profile that is given, with the largest bound within `--max-kl` alone."""
    if options.profile is None:
        return None
    profile = ReuseProfile.read(options.profile)
    bounds = [each for each in profile.bounds or () if each.max_kl <= options.max_kl]
    if not bounds:
        raise SemBlendError(f"{options.profile} has no bound of at most {options.max_kl} nats; give a higher --max-kl.")
    return profile.model_copy(update={"bounds": bounds[-1:]})


def add_rows(
    rows: Results, variant: str, name: str, turns: Sequence[Turn], stock: Sequence[Turn], options: Any
) -> None:
    """Add the rows of an arm's turns beside stock's."""
    if options.model:
        kls, changed = distances(stock, turns)
        said = f"{changed} of {len(turns)} answers changed"
        rows.add(f"agents_{variant}_kl_{name}", statistics.mean(kls), "nats", said)
    (p95, ours), (cold, theirs) = _figures(turns), _figures(stock)
    terms = shown_name(options.model) if options.model else "random weights"
    if name == BOUNDED:
        terms = f"at most {options.max_kl} nats" if options.profile else f"{options.share:.1%} computed; random weights"
    facts = f"{ours}; stock {theirs}; {len(turns)} turns to {options.tokens} tokens; {terms}"
    goal = 0.15 if (variant, name) == ("volatile", BOUNDED) and not options.model else None
    model = "_smollm2" if options.model else ""
    rows.add(f"vllm_agents{model}_{variant}_ttft_p95_over_stock_{name}", p95 / cold, "", facts, goal)


def _figures(turns: Sequence[Turn]) -> tuple[float, str]:
    """The 95th percentile of the milliseconds to the first token, and what a row says of the turns."""
    times, prompt = [each.ttft_ms for each in turns], sum(each.prompt_tokens for each in turns)
    p50, p95 = (float(np.percentile(times, share)) for share in (50, 95))
    computed = 1 - sum(each.cached_tokens for each in turns) / prompt
    speed = prompt / sum(times) * 1e3
    return p95, f"{computed:.1%} computed, p50 {p50:.1f} ms, p95 {p95:.1f} ms, {speed:,.0f} tokens/s"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__, FOLDER)
    parser.add_argument("--histories", type=Path, required=True, help="JSONL of chat bodies, or tau-bench's JSON")
    parser.add_argument("--tokenizer", required=True, help="folder or hub id of an instruct model's tokenizer")
    parser.add_argument("--model", help="folder of a real model, whose answers are compared")
    parser.add_argument("--profile", type=Path, help="reuse profile of that model")
    parser.add_argument("--max-kl", type=float, default=0.01, help="nats of the bound (default: %(default)s)")
    parser.add_argument("--share", type=float, default=0.06, help="share that is computed (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32_768, help="most tokens of a prompt (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=3, help="histories (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=4, help="timed turns of each (default: %(default)s)")
    parser.add_argument("--arms", metavar="A,B", help=f"those beside stock, of {', '.join(ARMS)} (default: all)")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    return parser


if __name__ == "__main__":
    sys.exit(main())
