"""vLLM with our connector against stock vLLM: times to the first token, retrieval prompts, decoding beside prefills.

`python -m benchmarks.vllm.ttft --out DIR` runs every arm in a process of its own. Single prompts (the parts ttft
and miss) are measured in turns, all arms on one card; for the other parts an arm has the card for itself. A process
writes DIR/<arm>.json or DIR/<arm>_in_turns.json after every measurement, and the rows are made of what is there, so
that `--arms` and `--parts` may spread a run over several calls. With `--engine-option VLLM_USE_V2_MODEL_RUNNER=1` rows
are named after the second model runner. `--kv` has the cache in e4m3 (fp8), another model, whose attention is latent
(mla), two ranks (tp2) or an adapter (lora), and measures single prompts with position_fix.
`--parts observations` writes DIR/observations.json, which `semblend-trt estimate --ttft` reads. `--arms stock,verified
--parts bounded,never_slower` measures reuse within a bound, and prompts of all lengths for which it may not pay, also
with SmolLM2-135M's shape (alone: `--parts smollm2`); `--parts rag_bounded` retrieval prompts of which a share is
computed. `--small` is a dry run, for which no card is needed.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import asdict, replace
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.bench_model import FP8, KV_FORMS, LORA, MLA, PLAIN, SMOLLM2, TP2, label
from benchmarks.program import parser_of
from benchmarks.vllm.arm import (
    ARMS,
    BOUNDS,
    CHECK_LAYER,
    IN_TURNS,
    OF_BOUNDS,
    OF_SMOLLM2,
    PARTS,
    POSITION_FIX,
    RAG_SHARE,
    SMALL,
    STOCK,
    VERIFIED,
    Sizes,
    VllmArm,
)
from semblend_trt.outcome import Outcome
from validation.results import Measured, Results, command, write_json, write_rows

# Our connector inside vLLM, each against stock vLLM of the same version in the same run.
VLLM_OVER_EXACT_HIT = {True: 0.95, False: 1.0}  # of the longest prompts, and of others
VLLM_VERIFIED_OVER_EXACT_HIT = 1.2
VLLM_OVER_COLD = {POSITION_FIX: 0.027, VERIFIED: 0.13}
VLLM_SECOND_RUNNER = {"vllm_shifted_ttft_24k_over_cold": 0.028}  # by row, where it has another goal
VLLM_MISS_OVERHEAD_PERCENT = {POSITION_FIX: 0.5, VERIFIED: 0.5, FP8: 0.8}
VLLM_DECODE_SLOWDOWN = 1.0
VLLM_RAG_GAIN = {POSITION_FIX: 4.0, VERIFIED: 3.0, "rag_bounded": 4.0}
VLLM_RAG_P95_RATIO = 0.25
# Within a bound, by what BOUNDS names: the row, with the prompt's size, and its goal.
VLLM_BOUNDED = {
    "volatile_ms": ("vllm_bounded_volatile_{}_over_exact_hit", 1.2),
    "chosen_ms": ("vllm_bounded_15_{}_over_cold", 0.27),
    "chosen_by_sample_ms": ("vllm_bounded_15_{}_over_cold_by_sample", 0.17),
}
VLLM_REUSE_OVER_COLD = 1.02
# Of the single prompts with another cache, on two ranks, and with adapters.
VLLM_KV_OVER_COLD = {FP8: 0.05, MLA: 0.05, TP2: 0.05, LORA: 0.035}

# Requests at 80 % of what stock vLLM sustains.
LOAD = 0.8
# The arena of donors on the card lies beside what vLLM takes.
_OURS = {"gpu_memory_utilization": 0.8}
# Three engines on one card, each with room for seven of the longest prompts.
_SHARING = {"gpu_memory_utilization": 0.25, "kv_cache_memory_bytes": 10 << 30}
# At the end of the names of arms' files; parts that are measured only if they are named.
_IN_TURNS, _MORE = "in_turns", (*OF_BOUNDS, SMOLLM2, "rag_bounded", "observations")
_SMALL: dict[str, Any] = {"block_size": 32, "enforce_eager": True}
_SMALL |= {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1}
# Their rows' names end in `_v2_runner`.
SECOND_RUNNER = "vllm.v1.worker.gpu.model_runner"
# Parts that stock vLLM has no part in.
OURS_ALONE = ("contaminated", "apart")


@contextmanager
def turn_of(parent: Connection) -> Iterator[None]:
    """In an arm's process, wait for its turn at the machine (`give_turns`), and give it up at the end."""
    parent.send(None)
    parent.recv()
    yield
    parent.send(None)


def give_turns(arms: Sequence[Connection]) -> None:
    """Give every arm one turn in each round, which begins when all have asked for it; return when all have ended."""

    def waited(arm: Connection) -> bool:
        with suppress(EOFError, OSError):
            arm.recv()
            return True
        return False

    asking = list(arms)
    while asking := [arm for arm in asking if waited(arm)]:
        for arm in asking:
            with suppress(OSError):
                arm.send(None)
                waited(arm)


def measure_arm(name: str, parts: Sequence[str], options: argparse.Namespace, parent: Connection | None) -> None:
    """Start an arm's engine, measure, and write its file after every part. Raises SystemExit if nothing is reused."""
    own, has_card = dict(_SMALL) if options.small else {}, torch.cuda.is_available()
    if parent is not None and not options.small:
        own |= _SHARING if has_card else {}
    elif name != STOCK and not options.small:
        own |= _OURS
    own |= dict(options.engine_option)
    variables = {key: str(own.pop(key)) for key in list(own) if key.isupper()}
    os.environ.update(variables)
    path = _file_of(options.out, name, SMOLLM2 if parts == [SMOLLM2] else _IN_TURNS if parent is not None else "")
    turn = nullcontext if parent is None else lambda: turn_of(parent)
    sizes = SMALL if options.small else OF_SMOLLM2 if parts == [SMOLLM2] else Sizes(long=options.tokens)
    with closing(VllmArm(name, sizes, own, turn, options.kv)) as arm:
        record: dict[str, Any] = {"arm": name, "engine": arm.facts, "options": own | variables}
        record |= asdict(Measured.now(options.command, "cuda" if has_card else "cpu"))
        # What an earlier call measured of the same engine stays.
        earlier = _read(path)
        is_same = earlier.get("engine") == json.loads(json.dumps(record["engine"]))
        record |= {"parts": earlier["parts"] if is_same else {}, "problem": arm.begin()}
        write_json(path, record)
        if record["problem"]:
            raise SystemExit(f"{name}: nothing is reused in this engine: {record['problem']}")
        for part in parts:
            _measure_part(arm, part, record, options.out)
            write_json(path, record)


def _measure_part(arm: VllmArm, part: str, record: dict[str, Any], out: Path) -> None:
    if part in {STOCK: OURS_ALONE, POSITION_FIX: (*OF_BOUNDS, SMOLLM2, "rag_bounded")}.get(arm.name, ()):
        return
    given = []
    if part == "arrivals":
        stock = record if arm.name == STOCK else _read(_file_of(out, STOCK, ""))
        if (rag := stock.get("parts", {}).get("rag")) is None:
            print(f"{arm.name} arrivals: left out; measure rag of the arm {STOCK} first", flush=True)
            return
        given = [LOAD * rag["requests_per_s"]]
    record["parts"][part] = getattr(arm, "never_slower" if part == SMOLLM2 else part)(*given)
    print(f"{arm.name} {part}: measured {record['parts'][part].get('problem') or ''}", flush=True)


def add_rows(arms: dict[str, Any], kv: str, rows: Results) -> list[str]:
    """Add the rows of the measured arms with a cache of form `kv`; return why other parts give none."""
    problems = [
        f"{arm} {name}: {found['problem']}"
        for arm, parts in arms.items()
        for name, found in parts.items()
        if found.get("problem")
    ]
    served = {arm: {name: each for name, each in arms[arm].items() if not each.get("problem")} for arm in ARMS}
    stock = served[STOCK]
    for arm in (POSITION_FIX, VERIFIED):
        for name, add in (_ROWS if kv == PLAIN else _OTHER_ROWS).items():
            if name in served[arm] and (name in stock or name in OURS_ALONE):
                add(arm if kv == PLAIN else kv, served[arm][name], stock.get(name), rows)
    if kv == PLAIN and (found := stock.get("ttft")) is not None:
        for name, kind in (("cold", "cold"), ("hit", "exact_hit")):
            times, row = found[f"{kind}_ms"], f"vllm_stock_{name}_ttft_{label(found['tokens'])}_ms"
            rows.add(row, median(times), "ms", _spread(times))
    if kv == PLAIN and (found := stock.get("rag")) is not None:
        rows.add("vllm_stock_rag_requests_per_s", found["requests_per_s"], "1/s", _of_rag(found), better="higher")
    return problems


def _add_ratio(
    rows: Results, row: str, times: list[float], stock: Any, kind: str, said: str, goal: float | None = None
) -> None:
    """Add the median of our milliseconds over that of stock's, `cold` or `exact_hit`."""
    mine, theirs = median(times), median(stock[f"{kind}_ms"])
    beside = f"{mine:,.1f} ms over stock vLLM's {kind.replace('_', ' ')} {theirs:,.1f} ms"
    rows.add(row, mine / theirs, "x", f"{beside}; {said}; {_spread(times)}", goal)


def _ttft_rows(arm: str, ours: dict[str, Any], stock: Any, rows: Results) -> None:
    size, times, counts = label(ours["tokens"]), ours["shifted_ms"], _reused(ours["served"])
    name = "shifted" if arm == POSITION_FIX else "verified"
    row, ttft = f"vllm_{name}_ttft_{size}", median(times)
    is_long = ours["tokens"] == Sizes().long
    if arm == POSITION_FIX:
        _add_ratio(rows, f"{row}_over_exact_hit", times, stock, "exact_hit", counts, VLLM_OVER_EXACT_HIT[is_long])
    goal = VLLM_OVER_COLD[arm] if is_long else None
    _add_ratio(rows, f"{row}_over_cold", times, stock, "cold", counts, goal)
    cold, hit = median(stock["cold_ms"]), median(stock["exact_hit_ms"])
    rows.add(f"{row}_ms", ttft, "ms", f"stock vLLM cold {cold:,.1f} ms, hit {hit:,.1f} ms")
    if sampled := ours.get("sampled_ms"):
        sample, check = ours["served"]["sampled"], ours["check"]
        counts = (
            f"check in layer {check['layer']}, one token in {check['sample_every']}; of {sample['offered_tokens']:,} "
            f"offered tokens {sample['sampled_tokens']:,} in a sample, {sample['checked_tokens']:,} checked after it, "
            f"{sample['reused_tokens']:,} reused"
        )
        _add_ratio(rows, f"{row}_over_exact_hit", sampled, stock, "exact_hit", counts, VLLM_VERIFIED_OVER_EXACT_HIT)
        rows.add(f"vllm_verified_sampled_ttft_{size}_ms", median(sampled), "ms", f"every token checked {ttft:,.1f} ms")


def _bounded_rows(_: str, ours: dict[str, Any], stock: Any, rows: Results) -> None:
    for name, (share, compares_all) in BOUNDS.items():
        served, (row, goal) = ours["served_of"][name], VLLM_BOUNDED[name]
        way = "and nothing more was computed"
        if share:
            way = f"then {'all tokens ran there, and ' if compares_all else ''}{share:.0%} were chosen and computed"
        said = (
            f"other text in front and after; {served['sampled']['sampled_tokens']:,} sampled in the {CHECK_LAYER} "
            f"lowest of {ours['layers']} layers, {way}; {_reused(served)}"
        )
        kind = "cold" if share else "exact_hit"
        _add_ratio(rows, row.format(label(ours["tokens"])), ours[name], stock, kind, said, goal)


def _never_slower_rows(_: str, ours: dict[str, Any], stock: Any, rows: Results) -> None:
    for size, runs in ours["ms"].items():
        cold, served = median(stock["ms"][size]["cold"]), list(ours["served"][size].values())
        ratios = {run: median(times) / cold for run, times in runs.items()}
        worst = max(ratios, key=ratios.__getitem__)
        reused = sum(each["outcomes"].get(Outcome.BACKEND_MATERIALIZED_REUSE.value, 0) for each in served)
        declined = sum((Counter(each["reasons"]) for each in served), Counter())
        baseline = (
            f"runs of {worst} tokens, {median(runs[worst]):,.2f} ms over stock vLLM cold {cold:,.2f} ms; runs of "
            f"{', '.join(f'{run}: {ratio:.3f}' for run, ratio in ratios.items())}; of "
            f"{sum(each['requests'] for each in served)} requests {reused} reused, declined {dict(declined)}; "
            f"{_spread(runs[worst])}"
        )
        row = f"reuse_over_cold_ttft_{ours['model']}_{label(int(size))}"
        rows.add(row, ratios[worst], "x", baseline, VLLM_REUSE_OVER_COLD)


def _other_kv_rows(kv: str, ours: dict[str, Any], stock: Any, rows: Results) -> None:
    size, times = label(ours["tokens"]), ours["shifted_ms"]
    for kind, goal in (("cold", VLLM_KV_OVER_COLD[kv]), ("exact_hit", None)):
        row = f"ttft_{size}_over_{kind}" if kv in (TP2, LORA) else f"over_{kind}_{size}"
        _add_ratio(rows, f"vllm_{kv}_shifted_{row}", times, stock, kind, _reused(ours["served"]), goal)


def _miss_rows(kind: str, ours: dict[str, Any], stock: Any, rows: Results) -> None:
    """`kind`: an arm, or another form of the KV cache."""
    size = label(ours["tokens"])
    name = {POSITION_FIX: f"miss_overhead_{size}", VERIFIED: f"miss_overhead_{size}_verified"}.get(kind)
    turns = [median(mine) / median(theirs) for mine, theirs in zip(ours["ms"], stock["ms"], strict=True)]
    low, _, high = (100 * (each - 1) for each in statistics.quantiles(turns, n=4))
    mine, theirs = (median([each for turn in found["ms"] for each in turn]) for found in (ours, stock))
    baseline = (
        f"{mine:,.2f} ms against stock vLLM {theirs:,.2f} ms; median of {len(turns)} turns of {len(ours['ms'][0])} "
        f"prompts, half of them within {low:,.2f} and {high:,.2f} %; every prompt is saved while the next one runs"
    )
    row, goal = f"vllm_{name or f'{kind}_miss_overhead_{size}'}", VLLM_MISS_OVERHEAD_PERCENT.get(kind)
    rows.add(row, 100 * (median(turns) - 1), "%", baseline, goal)


def _decode_rows(arm: str, ours: dict[str, Any], stock: Any, rows: Results) -> None:
    mine, theirs = statistics.fmean(ours["ms"]), statistics.fmean(stock["ms"])
    compared = "; ".join(
        f"{who} mean {statistics.fmean(each['ms']):,.1f}, p50 {median(each['ms']):,.1f}, p95 "
        f"{_p95(each['ms']):,.1f} ms, alone {median(each['alone_ms']):,.1f} ms"
        for who, each in (("ours", ours), ("stock vLLM beside cold prefills", stock))
    )
    baseline = f"inter-token time, prefills of {label(ours['tokens'])} one after the other: {compared}"
    rows.add(f"vllm_decode_slowdown_{arm}", mine / theirs, "x", baseline, VLLM_DECODE_SLOWDOWN)


def _rag_rows(arm: str, ours: dict[str, Any], stock: Any, rows: Results) -> None:
    gain, goal = ours["requests_per_s"] / stock["requests_per_s"], VLLM_RAG_GAIN[arm]
    computed = f"{RAG_SHARE:.0%} chosen and computed; " if arm == "rag_bounded" else ""
    baseline = (
        f"{ours['requests_per_s']:.2f} requests/s over stock vLLM {stock['requests_per_s']:.2f}; {_of_rag(ours)}, "
        f"stock {stock['cached_tokens'] / stock['prompt_tokens']:.0%} in its prefix cache; {computed}"
        f"{_reused(ours['served'])}"
    )
    rows.add(f"vllm_rag_throughput_gain_{arm.removeprefix('rag_')}", gain, "x", baseline, goal, "higher")


def _arrival_rows(arm: str, ours: dict[str, Any], stock: Any, rows: Results) -> None:
    mine, theirs = _p95(ours["ttft_ms"]), _p95(stock["ttft_ms"])
    baseline = (
        f"p95 {mine:,.0f} ms over stock vLLM {theirs:,.0f} ms (p50 {median(ours['ttft_ms']):,.0f} and "
        f"{median(stock['ttft_ms']):,.0f}); {ours['per_second']:.2f} arrivals/s, {LOAD:.0%} of what stock sustains, "
        f"the same times; {ours['requests']} requests; {_reused(ours['served'])}"
    )
    rows.add(f"vllm_rag_ttft_p95_ratio_{arm}", mine / theirs, "x", baseline, VLLM_RAG_P95_RATIO)


def _contaminated_rows(arm: str, ours: dict[str, Any], _: Any, rows: Results) -> None:
    baseline = (
        f"{ours['prompts']} planned prompts with their answers asked again as stock; largest hit "
        f"{ours['largest_hit_tokens']} of {ours['exact_limit_tokens']} exact tokens; asked a third time at least "
        f"{ours['smallest_exact_hit_tokens']} are hit"
    )
    rows.add(f"vllm_contaminated_hits_{arm}", ours["hits"], "requests", baseline, 0)


_ROWS = {
    "ttft": _ttft_rows,
    "miss": _miss_rows,
    "bounded": _bounded_rows,
    "never_slower": _never_slower_rows,
    SMOLLM2: _never_slower_rows,
    "decode": _decode_rows,
    "rag": _rag_rows,
    "rag_bounded": lambda _, *given: _rag_rows("rag_bounded", *given),
    "arrivals": _arrival_rows,
    "contaminated": _contaminated_rows,
}


def _apart_rows(kv: str, ours: dict[str, Any], _: Any, rows: Results) -> None:
    baseline = f"of {ours['requests']} requests without the adapter of the donor; with it {_reused(ours['served'])}"
    rows.add(f"vllm_{kv}_contaminated", ours["hits"], "requests", baseline, 0)


_OTHER_ROWS = {"ttft": _other_kv_rows, "miss": _miss_rows, "apart": _apart_rows}


def _of_rag(found: dict[str, Any]) -> str:
    return f"{found['requests']} requests, {found['prompt_tokens'] // found['requests']:,} tokens each"


def _reused(served: dict[str, Any]) -> str:
    return f"{served['reused_tokens']:,} of {served['offered_tokens']:,} offered tokens reused"


def _p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20, method="inclusive")[-1]


def _spread(values: list[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4)
    return f"{len(values)} runs, half of them within {low:,.1f} and {high:,.1f} ms"


def _setting(option: str) -> tuple[str, Any]:
    """KEY=VALUE, the value as JSON or else as text."""
    key, _, value = option.partition("=")
    with suppress(ValueError):
        return key, json.loads(value)
    return key, value


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the arms, print and write. Exits with 1 when an arm failed or was refused."""
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where <arm>.json and the rows go")
    parser.add_argument("--arms", default=",".join(ARMS), help="with commas between them, or none (default: all)")
    more = f"with commas between them, {', '.join(_MORE)} too (default: %(default)s)"
    parser.add_argument("--parts", default=",".join(PARTS), help=more)
    parser.add_argument("--kv", choices=KV_FORMS, default=PLAIN, help="what the KV cache holds (default: plain)")
    parser.add_argument("--small", action="store_true", help="a dry run with a small model, no goals")
    tokens = "of the longest prompts (default: %(default)s)"
    parser.add_argument("--tokens", type=int, default=Sizes().long, help=tokens)
    engine = "of vLLM's engine, or a variable in capitals"
    parser.add_argument("--engine-option", type=_setting, action="append", default=[], metavar="KEY=VALUE", help=engine)
    options = parser.parse_args(arguments)
    options.command = command(arguments)
    for name, given, possible in (("arms", options.arms, (*ARMS, "none")), ("parts", options.parts, (*PARTS, *_MORE))):
        if unknown := set(given.split(",")) - set(possible):
            parser.error(f"--{name} has {', '.join(sorted(unknown))}; possible are {', '.join(possible)}")
    arms = [arm for arm in ARMS if arm in options.arms.split(",") and (arm != VERIFIED or options.kv == PLAIN)]
    parts = [part for part in (*PARTS, *_MORE) if part in options.parts.split(",")]
    parts += ["apart"] if options.kv == LORA else []
    options.out.mkdir(parents=True, exist_ok=True)
    failed = _run(arms, [part for part in parts if part in IN_TURNS], options, in_turns=True)
    if {"never_slower", SMOLLM2} & {*parts} and not options.small:
        failed += _run(arms, [SMOLLM2], options, in_turns=True)
    for arm in arms if options.kv == PLAIN else []:
        failed += _run([arm], [part for part in parts if part not in (*IN_TURNS, SMOLLM2)], options, in_turns=False)
    problems = [f"{arm}: its process failed" for arm in failed] + _record(options)
    for problem in problems:
        print(f"no figure: {problem}", file=sys.stderr)
    if problems:
        raise SystemExit(1)


def _run(arms: Sequence[str], parts: Sequence[str], options: argparse.Namespace, *, in_turns: bool) -> list[str]:
    """Run each arm in a process, all at once; return those that failed."""
    context, started = multiprocessing.get_context("spawn"), []
    for arm in arms if parts else []:
        ours, theirs = context.Pipe()
        process = context.Process(target=measure_arm, args=(arm, parts, options, theirs if in_turns else None))
        process.start()
        theirs.close()
        started.append((arm, process, ours))
    give_turns([ours for _, _, ours in started] if in_turns else [])
    for _, process, _ in started:
        process.join()
    return [arm for arm, process, _ in started if process.exitcode]


def _file_of(folder: Path, arm: str, kind: str) -> Path:
    return folder / f"{arm}{kind and '_'}{kind}.json"


def _record(options: argparse.Namespace) -> list[str]:
    """Print and write the rows of what is there; return the problems."""
    arms, there = dict[str, Any](), list[dict[str, Any]]()
    for arm in ARMS:
        files = [_read(_file_of(options.out, arm, kind)) for kind in ("", _IN_TURNS, SMOLLM2)]
        arms[arm] = {name: part for found in files for name, part in found.get("parts", {}).items()}
        there += filter(None, files)
    if not there:
        return [f"{options.out} holds no arm"]
    commands = " ; ".join(dict.fromkeys(found["command"] for found in there))
    first = there[0]
    measured = Measured(commands, first["machine"], first["versions"], first["date"])
    rows = Results(measured=measured, dry=options.small, is_shown=False)  # shown when they are written, by their names
    kv, runner = first["engine"]["kv"], "_v2_runner" * (first["engine"]["runner"] == SECOND_RUNNER)
    problems = add_rows(arms, kv, rows)
    goals = VLLM_SECOND_RUNNER if runner else {}
    rows.rows = [replace(each, name=each.name + runner, goal=goals.get(each.name, each.goal)) for each in rows.rows]
    is_bounded = {*chain(*arms.values())} <= {*OF_BOUNDS, SMOLLM2}
    name = f"vllm{'' if kv == PLAIN else '_' + kv}{'_bounded' * is_bounded}{runner}"
    rows.write(options.out / "rows", name)
    if options.json is not None:
        write_rows(options.json / f"{name}.json", rows.rows)
    observed = [parts["observations"] for parts in arms.values() if "observations" in parts]
    if seen := [each for found in observed if not found.get("problem") for each in found["observations"]]:
        write_json(options.out / "observations.json", seen)
    return problems


if __name__ == "__main__":
    main()
