"""`python -m validation.trtllm_check`: runs the connector inside a real TensorRT-LLM, and says what holds there.

All engines have TensorRT-LLM's default options. The first line says which manager, graphs and attention these are. Four
engines of one model serve the same prompts, one after the other. The first has our wrapper attached, and computes every
layer again; the second has no connector; the third has our connector alone; the last computes nothing again. Then a
reuse profile is confirmed in the engine, or without --profile a small calibration makes one, and policy verified serves
with it. At last many requests are served at once over a small pool, and the blocks are counted before and after. One
request is cancelled while it generates, and one is too long to be served. A forward that fails cannot be provoked
through the public API. Status: 0 when everything holds, 1 naming what does not, 2 where tensorrt_llm cannot be
imported, or model or profile cannot be read.
"""

import argparse
import json
import random
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from semblend_trt.command_line import ended, named, printable
from semblend_trt.connector.contract import version_of
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import check_writable
from semblend_trt.reuse_profile import ReuseProfile
from validation.documents import Document, Question, stock_list
from validation.engines import AuditFile, ended_requests
from validation.prompts import PLAIN
from validation.trtllm_engine import STOCK_CONNECTOR, WRAPPER, open_llm, trtllm_api, wait_for_quiet

Answers = tuple[tuple[int, ...], ...]
Questions = Sequence[Question]
Events = tuple[dict[str, Any], ...]
Opened = tuple[Any, AuditFile]  # an LLM, and its connector's log

_SHORT = "Answer with a number only."
MAX_TOKENS = 16
_EXACT = {"SEMBLEND_POLICY": "exact"}


class Finding(NamedTuple):
    """One line of the result."""

    name: str
    holds: bool
    what: str


def workload(groups: int, rows: int) -> list[Question]:
    """Return prompts over stock lists, four each, with their answers: donors, then targets, which reverse the lists
    under another instruction, then the targets again."""
    rng = random.Random(0)
    long = "Read the lists, then give the number that is asked for, and nothing else."
    donors, targets = list[Question](), list[Question]()
    for _ in range(groups):
        lists = [stock_list(rng, rows=rows) for _ in range(4)]
        donors.append(_asked(rng, _SHORT, lists))
        targets.append(_asked(rng, long, lists[::-1]))
    return [*donors, *targets, *targets]


def _twice(results: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
    """Return what belongs to the targets, asked first and asked again, of one result a prompt."""
    count = len(results) // 3
    return results[count : 2 * count], results[2 * count : 3 * count]


def crowd(rounds: int, beginnings: int, rows: int) -> tuple[tuple[str, ...], ...]:
    """Return rounds of prompts to ask at once: two of each beginning. Neighbouring beginnings share a list."""
    rng = random.Random(1)
    lists = [stock_list(rng, rows=rows) for _ in range(beginnings + 1)]
    pairs = [[lists[index], lists[index + 1]] for index in range(beginnings)]
    return tuple(tuple(_asked(rng, _SHORT, pair).text for pair in pairs for _ in range(2)) for _ in range(rounds))


def _asked(rng: random.Random, instruction: str, lists: list[Document]) -> Question:
    question = rng.choice(rng.choice(lists).questions)
    return Question(PLAIN.render(instruction, [each.text for each in lists], question.text), question.answer)


@dataclass(frozen=True, slots=True)
class Served:
    """One engine's answers to the workload's prompts, and the audit events of its connector."""

    tokens: Answers
    texts: tuple[str, ...]
    events: Events

    def right(self, asked: Questions) -> float:
        """Return the share of targets that are answered right when they are asked first."""
        pairs = zip(_twice(self.texts)[0], _twice(asked)[0], strict=True)
        right = [re.findall(r"\d+", text)[:1] == [each.answer] for text, each in pairs]
        return sum(right) / max(1, len(right))


def serve(model: str, dtype: str, asked: Questions, connector: str | None, variables: Mapping[str, str]) -> Served:
    """Serve one prompt after the other, then read the audit log. Raises SemBlendError."""
    with _opened(model, connector, variables, dtype=dtype) as (llm, audit):
        outputs = [llm.generate([each.text], greedy())[0].outputs[0] for each in asked]
        tokens, texts = [tuple(each.token_ids) for each in outputs], [each.text for each in outputs]
    return Served(tuple(tokens), tuple(texts), tuple(audit.events))


@contextmanager
def _opened(model: str, connector: str | None, variables: Mapping[str, str], **options: Any) -> Iterator[Opened]:
    """Open an engine and its audit file, which is read when the engine has ended. Raises SemBlendError."""
    with tempfile.TemporaryDirectory() as folder:
        audit = AuditFile(Path(folder) / "audit.jsonl")
        with open_llm(model, connector, {**variables, "SEMBLEND_AUDIT_PATH": str(audit.path)}, **options) as llm:
            yield llm, audit
        audit.read()


def greedy(max_tokens: int = MAX_TOKENS, **options: Any) -> Any:
    """Return TensorRT-LLM's SamplingParams for greedy answers."""
    return trtllm_api().SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


@dataclass(frozen=True, slots=True)
class Crowded:
    """Answers of the stock engine, one by one and `at_once`; those of our connector in a small pool, () after an error.
    `cancelled` and `failed` say how those requests ended. Free blocks are None if the count was not steady."""

    cold: Answers
    at_once: Answers
    answers: Answers
    cancelled: str
    failed: str
    free_before: int | None
    free_after: int | None
    events: Events


def serve_crowd(model: str, dtype: str, rounds: Sequence[Sequence[str]]) -> Crowded:
    """Serve the rounds cold and crowded. Raises SemBlendError when an engine does not start."""
    with open_llm(model, None, {}, dtype=dtype, cache={"enable_block_reuse": False}) as llm:
        outputs = [output for prompts in rounds for each in prompts for output in llm.generate([each], greedy())]
        cold = tuple(tuple(output.outputs[0].token_ids) for output in outputs)
        longest = max(len(output.prompt_token_ids) for output in outputs)
        at_once = tuple(answer for each in rounds for answer in _answers([_ask(llm, prompt) for prompt in each]))
    # 128 more for tokens that the engine adds, and for the cancelled request.
    room = longest + MAX_TOKENS + 128
    options: dict[str, Any] = {"dtype": dtype, "max_seq_len": room, "max_batch_size": max(map(len, rounds))}
    options["cache"] = {"max_tokens": 4 * room}  # a quarter of what a round needs
    with _opened(model, WRAPPER, _EXACT, **options, enable_iter_perf_stats=True) as (llm, audit):
        before = _free_blocks(llm)
        answers, cancelled, failed = _crowd(llm, rounds, [1] * (room + 1), audit.path)
        after = _free_blocks(llm)
    return Crowded(cold, at_once, answers, cancelled, failed, before, after, tuple(audit.events))


def _crowd(llm: Any, rounds: Sequence[Sequence[str]], too_long: list[int], audit: Path) -> tuple[Answers, str, str]:
    """Return the answers, and how the cancelled and the failing request ended; round two asks both before its own."""
    answers: list[tuple[int, ...]] = []
    cancelled = failed = "not asked"
    for number, prompts in enumerate(rounds):
        if number == 1:
            doomed = llm.generate_async(prompts[0], greedy(64, ignore_eos=True), streaming=True)
            refused = _ask(llm, too_long)
        handles = [_ask(llm, prompt) for prompt in prompts]
        if number == 1:
            cancelled, failed = _end(doomed, cancels=True), _end(refused)
        answers += _answers(handles)
        wait_for_quiet(audit)
    return tuple(answers), cancelled, failed


def _ask(llm: Any, prompt: str | list[int]) -> Any:
    """Start a request; the error if the engine refused it."""
    try:
        return llm.generate_async(prompt, greedy())
    except Exception as error:
        return error


def _answers(handles: Sequence[Any]) -> Answers:
    ended = [_end(handle) in ("stop", "length") for handle in handles]
    return tuple(tuple(each.outputs[0].token_ids) if ok else () for each, ok in zip(handles, ended, strict=True))


def _end(handle: Any, *, cancels: bool = False) -> str:
    """Wait for a request, or cancel it as soon as it generates; its finish reason or its error."""
    if isinstance(handle, Exception):
        return f"error: {handle}"
    try:
        if cancels:
            next(iter(handle))
            handle.abort()
        return str(handle.result(timeout=600.0).outputs[0].finish_reason)
    except Exception as error:
        return f"error: {error!r}"


def _free_blocks(llm: Any) -> int | None:
    """Count the blocks that no request holds, with those kept for reuse; None if the count does not become steady."""
    seen: list[int] = []
    for _ in range(20):
        llm.generate(["Hello."], greedy(1))  # statistics come with iterations only
        stats = [json.loads(each) if isinstance(each, str) else each for each in llm.get_stats(1.0)]
        seen += [int(each["kvCacheStats"]["freeNumBlocks"]) for each in stats if each.get("kvCacheStats")][-1:]
        if len(seen) >= 3 and len(set(seen[-3:])) == 1:
            return seen[-1]
    return None


STOCK, EXACT, RECOMPUTED, REUSED = "stock", "exact", "recomputed", "reused"
# Half precision makes some answers differ when a prompt is computed in other chunks; the stock engine shows how many.
_SLACK = 0.05
_MAX_EM_DROP = 0.02


def judge(asked: Questions, served: dict[str, Served]) -> list[Finding]:
    """Judge the answers and audit logs of the four engines without a profile."""
    # The engines answer every prompt, and every connector sees every request.
    prompts = len(asked)
    silent = [arm for arm, each in served.items() if sum(map(bool, each.tokens)) < prompts]
    unseen = [arm for arm, each in served.items() if arm != STOCK and len(ended_requests(each.events)) < prompts]
    started = [event for each in served.values() for event in each.events if event["event"] == "scheduler_initialized"]
    refused = sorted({str(event["refusal"]) for event in started if event["refusal"]})
    what = f"{prompts} prompts; unanswered in {silent}, not seen by the connector in {unseen}, refused: {refused}"
    smoke = Finding("smoke", not silent and not unseen and not refused, what)
    floor = _share_equal(*_twice(served[STOCK].tokens))
    shares = {arm: _share_equal(served[STOCK].tokens, served[arm].tokens) for arm in (EXACT, RECOMPUTED)}
    equal = f"answers equal to the stock engine's: {shares}; to its own, asked twice: {floor:.3f}"
    # With exact reuse, and with every layer computed again, answers are the stock engine's.
    exactness = Finding("exactness", all(share >= floor - _SLACK for share in shares.values()), equal)
    right = {arm: served[arm].right(asked) for arm in (STOCK, REUSED)}
    drop = f"share of right answers {right}; a drop of {_MAX_EM_DROP} is allowed"
    validation = Finding("validation", right[STOCK] - right[REUSED] <= _MAX_EM_DROP, drop)
    return [smoke, exactness, *_moved(served), validation]


def _moved(served: dict[str, Served]) -> Iterator[Finding]:
    """Check that the connector offers moved text, as the wrapper is attached and its self-check has passed; and that a
    prompt with moved text finds only its exact part in the engine when it is asked again."""
    offered, segmented, grown = {}, {}, []
    for arm in (RECOMPUTED, REUSED):
        events = served[arm].events
        first, second = _twice(ended_requests(events))
        offered[arm] = sum(int(event.get("offered_tokens") or 0) for event in first)
        lookups = [event for event in events if event["event"] == "lookup"]
        segmented[arm] = any(each.get("kind") == "request_local" and each["diagnostics"]["holes"] for each in lookups)
        plans = [event for event in events if event["event"] == "plan_dispatched"]
        moved = {each["request_id"]: [to for _, donor, to, _ in each["spans"] if donor != to] for each in plans}
        for before, after in zip(first, second, strict=True):
            # Of a plan that moves a span, the tokens before the first such span are exact.
            exact = min(moved.get(before["request_id"]) or [after["exact_prefix_tokens"]])
            grown += [arm] if after["exact_prefix_tokens"] > max(before["exact_prefix_tokens"], exact) else []
    what = f"tokens offered from other places {offered}, with holes between them {segmented}"
    yield Finding("execution", all(offered.values()) and all(segmented.values()), what)
    yield Finding("publication", not grown, f"prompts whose approximate KV was published: {grown}")


def judge_verified(asked: Questions, stock: Served, verified: Served) -> Finding:
    """Check that reuse under the profile is right as often as cold, and that the engine takes the profile."""
    right = {"stock": stock.right(asked), "verified": verified.right(asked)}
    ended = ended_requests(verified.events)
    refused = sorted({str(event["reason"]) for event in ended if "profile" in str(event["reason"])})
    reused = sum(int(event["reused_tokens"]) for event in ended)
    what = f"share of right answers {right}; {reused} tokens reused; the profile was refused: {refused}"
    holds = len(ended) == len(asked) and not refused and right["stock"] - right["verified"] <= _MAX_EM_DROP
    return Finding("verified", holds, what)


def judge_crowd(crowded: Crowded) -> list[Finding]:
    """Check that requests served at once get the same answers, that all end, and that all blocks are free again."""
    floor, share = (_share_equal(crowded.cold, each) for each in (crowded.at_once, crowded.answers))
    saved = sum(event["event"] == "donor_registered" and not event.get("error") for event in crowded.events)
    loaded = sum(event["reused_tokens"] for event in ended_requests(crowded.events))
    pairs = zip(crowded.cold, crowded.answers, strict=True)
    differing = [number for number, (ours, theirs) in enumerate(pairs) if ours != theirs][:16]
    seen = (
        f"{len(crowded.cold)} answers, equal to a cold run's: {share:.3f}; to the stock engine's, asked at once: "
        f"{floor:.3f}; {saved} donors saved and {loaded} tokens loaded; others: {differing}"
    )
    endings = f"the cancelled request: {crowded.cancelled}; the one that is too long: {crowded.failed[:200]}"
    blocks = f"free blocks before {crowded.free_before}, after {crowded.free_after}"
    is_back = crowded.free_before is not None and crowded.free_after == crowded.free_before
    is_ended = crowded.cancelled == "cancelled" and crowded.failed.startswith("error")
    # If nothing was saved and loaded, equal answers show nothing.
    return [
        Finding("concurrency", share >= floor - _SLACK and saved > 0 and loaded > 0, seen),
        Finding("endings", is_ended and all(crowded.answers), endings),
        Finding("blocks", is_back, blocks),
    ]


def _share_equal(first: Sequence[Any], second: Sequence[Any]) -> float:
    return sum(bool(one == other) for one, other in zip(first, second, strict=True)) / max(1, len(first))


# TensorRT-LLM's V2 manager is taken to do the following by its source alone.
_V1 = "KVCacheManager"
# Enough for some blocks of any size that TensorRT-LLM has.
_ANSWER = 200


def facts_of(events: Events) -> dict[str, Any]:
    """Return what the engine showed as the wrapper attached to it; {} if it did not attach."""
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
    again = f"{paused} requests asked about again; {lost} plans lost"
    under = f"{exchanged} donors of exchanged blocks; not saved: {unsaved[:4]}"
    return [
        Finding("pauses", (is_v1 or paused > 0) and not lost, again),
        Finding("exchange", is_v1 or exchanged > 0, under),
    ]


def judge_commits(facts: dict[str, Any], model: str, dtype: str) -> Finding:
    """Check that V2 keeps no generated tokens for reuse, as pull request 18711 has it do. Raises SemBlendError."""
    with _opened(model, STOCK_CONNECTOR, _EXACT, dtype=dtype) as (llm, audit):
        params = greedy(_ANSWER, ignore_eos=True)
        [first] = llm.generate(["Count from one to one hundred, in words."], params)
        asked: Sequence[int] = first.prompt_token_ids
        llm.generate([[*asked, *first.outputs[0].token_ids, 1]], params)
    own = int(ended_requests(audit.events)[-1]["exact_prefix_tokens"])
    found = f"{own} tokens of the engine's own prefix after a prompt of {len(asked)} and {_ANSWER} generated tokens"
    return Finding("commits", facts.get("manager") == _V1 or own <= len(asked), found)


# These few prompts show that a calibration runs here, and little about the model.
_SMALL_CALIBRATION = (
    *("--families", "reordered,header_trap", "--groups", "28", "--risk", "0.2", "--shares", "0,0.1,0.3"),
    *("--tokens", "896", "--max-tries", "6"),
)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m validation.trtllm_check", description=__doc__)
    default, model = "Qwen/Qwen2.5-1.5B-Instruct", "a folder (full path) or a hub id (default: %(default)s)"
    parser.add_argument("--model", type=named, default=default, help=model)
    parser.add_argument("--groups", type=int, default=24, help="prompts of each kind (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=24, help="rows of each stock list (default: %(default)s)")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="a profile from elsewhere, to be confirmed here")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where the confirmed or made profile is kept")
    types, dtype = ("auto", "float32", "bfloat16", "float16"), "the engine's (default: the profile's, else auto)"
    parser.add_argument("--dtype", choices=types, default="auto", help=dtype)
    arguments = parser.parse_args(argv)
    return ended("trtllm-check", lambda: _status(arguments))


def _status(arguments: argparse.Namespace) -> int:
    if arguments.output is not None:
        check_writable(arguments.output)
    trtllm_api()
    if arguments.profile is not None:
        profile = ReuseProfile.read(arguments.profile)
        if arguments.dtype == "auto":  # a profile binds to the type with which it was made
            arguments.dtype = str(profile.namespace["compute_dtype"])
    try:
        layers = model_facts(arguments.model).num_layers
    except SemBlendError as error:
        raise ConfigurationError(f"{error}. A folder is named by its full path: make leaves its own.") from error
    status = 0
    for finding in _findings(arguments, layers):
        line = f"{finding.name:<12} {'holds' if finding.holds else 'FAILS'}  {finding.what}"
        sys.stdout.write(printable(line) + "\n")
        status |= not finding.holds
    return status


def _findings(arguments: argparse.Namespace, layers: int) -> Iterator[Finding]:
    """Yield one part after the other; a part whose engine does not start is one line that fails."""
    model, dtype = arguments.model, arguments.dtype
    asked = workload(arguments.groups, arguments.rows)
    boundary = {"SEMBLEND_POLICY": "boundary", "SEMBLEND_RECOMPUTE_BOUNDARY_LAYER": str(layers)}
    try:
        first = serve(model, dtype, asked, WRAPPER, boundary)
        facts = facts_of(first.events)
        yield judge_engine(first.events)
        served = {
            STOCK: serve(model, dtype, asked, None, {}),
            EXACT: serve(model, dtype, asked, STOCK_CONNECTOR, _EXACT),
            RECOMPUTED: first,
            REUSED: serve(model, dtype, asked, WRAPPER, {"SEMBLEND_POLICY": "position_fix"}),
        }
        yield from judge(asked, served)
        yield judge_commits(facts, model, dtype)
    except SemBlendError as error:
        yield Finding("engine", False, str(error))
        return
    with tempfile.TemporaryDirectory() as folder:
        output = arguments.output or Path(folder) / "reuse-profile.json"
        try:
            yield from _profile(arguments, output, asked, served[STOCK])
        except (SemBlendError, OSError) as error:
            yield Finding("profile", False, str(error))
    try:
        # 16 requests at once, two of each beginning.
        crowded = serve_crowd(model, dtype, crowd(3, 8, arguments.rows))
        yield from (*judge_crowd(crowded), *judge_crowded(facts, crowded.events))
    except SemBlendError as error:
        yield Finding("concurrency", False, str(error))


def _profile(arguments: argparse.Namespace, output: Path, asked: Questions, stock: Served) -> Iterator[Finding]:
    """Confirm the profile, or make one; then serve with it. Raises SemBlendError and OSError."""
    try:
        # An environment with TensorRT-LLM and the connector may lack what these need.
        from validation.calibration.calibration import parse_calibrate, parse_confirm, run_calibrate, run_confirm
    except ModuleNotFoundError as error:
        yield Finding("profile", False, f"{error.name} is not installed; install it beside TensorRT-LLM for this part")
        return
    common = ("--engine", "trtllm", "--model", arguments.model, "--output", str(output))
    if arguments.profile is not None:
        options = ("--profile", str(arguments.profile), *common)
        if not run_confirm(parse_confirm(options), f"python -m validation confirm {shlex.join(options)}"):
            yield Finding("profile", False, "it is not as good as cold in this engine; the lines above say where")
            return
    else:
        made = (*common, "--dtype", arguments.dtype, *_SMALL_CALIBRATION)
        run_calibrate(parse_calibrate(made), f"python -m validation calibrate {shlex.join(made)}")
    profile = ReuseProfile.read(output)
    yield Finding("profile", True, f"policy {profile.policy} in {' and '.join(profile.engines)}; {profile.check}")
    variables = {"SEMBLEND_POLICY": "verified", "SEMBLEND_PROFILE": str(output)}
    if profile.bounds:
        loosest = profile.bounds[-1]
        variables |= {"SEMBLEND_MAX_KL": str(loosest.max_kl), "SEMBLEND_RISK": str(loosest.risk)}
    yield judge_verified(asked, stock, serve(arguments.model, arguments.dtype, asked, WRAPPER, variables))


if __name__ == "__main__":
    sys.exit(main())
