"""What the engines are asked, one prompt at a time and many at once, and what they answer.

Of a crowd one request is cancelled while it generates, and one cannot be served at all. A forward that fails cannot be
brought about through the public API, so it is not among what is seen here.
"""

from __future__ import annotations

import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from validation.audit_log import read_events, settled
from validation.documents import Document, Question, stock_list
from validation.prompts import PLAIN
from validation.trtllm_engine import WRAPPER, open_llm, trtllm_api, wait_for_quiet

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_SHORT = "Answer with a number only."
_LONG = "Read the lists, then give the number that is asked for, and nothing else."


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts with their right answers. `targets` hold the documents of `donors` at other places, and are asked
    twice."""

    donors: tuple[Question, ...]
    targets: tuple[Question, ...]

    @property
    def prompts(self) -> list[str]:
        return [each.text for each in (*self.donors, *self.targets, *self.targets)]


def workload(groups: int, rows: int, seed: int = 0) -> Workload:
    """Stock lists, four a prompt, under one instruction as donors and reversed under another as targets."""
    rng = random.Random(seed)
    donors: list[Question] = []
    targets: list[Question] = []
    for _ in range(groups):
        lists = [stock_list(rng, rows=rows) for _ in range(4)]
        donors.append(_asked(rng, _SHORT, lists))
        targets.append(_asked(rng, _LONG, lists[::-1]))
    return Workload(tuple(donors), tuple(targets))


def crowd(rounds: int, beginnings: int, rows: int, seed: int = 1) -> tuple[tuple[str, ...], ...]:
    """Rounds of prompts that are asked at once: two of each of the `beginnings`, next to each other.

    Prompts of one beginning share instruction and lists, and neighbouring beginnings share a list.
    """
    rng = random.Random(seed)
    lists = [stock_list(rng, rows=rows) for _ in range(beginnings + 1)]
    pairs = [[lists[index], lists[index + 1]] for index in range(beginnings)]
    return tuple(tuple(_asked(rng, _SHORT, pair).text for pair in pairs for _ in range(2)) for _ in range(rounds))


def _asked(rng: random.Random, instruction: str, lists: list[Document]) -> Question:
    question = rng.choice(rng.choice(lists).questions)
    return Question(PLAIN.render(instruction, [each.text for each in lists], question.text), question.answer)


MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Served:
    """What one engine answered to the workload's prompts, and the audit events of its connector."""

    tokens: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    events: tuple[dict[str, Any], ...]

    def settled(self) -> list[dict[str, Any]]:
        """How every request ended, in the order in which they were asked."""
        return settled(self.events)


def serve(
    model: str, dtype: str, prompts: Sequence[str], connector: str | None, variables: Mapping[str, str]
) -> Served:
    """One prompt after the other. Only when the engine has ended is the audit log complete. Raises SemBlendError."""
    tokens, texts = [], []
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit.jsonl"
        with open_llm(model, connector, {**variables, "SEMBLEND_AUDIT_PATH": str(audit)}, dtype=dtype) as llm:
            for prompt in prompts:
                [output] = llm.generate([prompt], greedy())
                tokens.append(tuple(output.outputs[0].token_ids))
                texts.append(output.outputs[0].text)
        return Served(tuple(tokens), tuple(texts), tuple(read_events(audit)))


def greedy(max_tokens: int = MAX_TOKENS, **options: Any) -> Any:
    """TensorRT-LLM's SamplingParams for greedy answers."""
    return trtllm_api().SamplingParams(max_tokens=max_tokens, temperature=0.0, **options)


Answers = tuple[tuple[int, ...], ...]

# Running requests that the pool holds, of which each round asks four times as many.
_ROOM = 4
_CANCELLED_TOKENS = 64
# Beyond a prompt and its answer: for what the engine adds, and for the cancelled request.
_SPARE_TOKENS = 128
_WAIT_SECONDS = 600.0
_STATS_SECONDS = 1.0
# A count of blocks is steady when it was seen so often in a row; asked for at most so often.
_STEADY, _MAX_ASKED = 3, 20
_SMALL_TALK = "Hello."


@dataclass(frozen=True, slots=True)
class Crowded:
    """What was seen. `cold` and `at_once` are the stock engine's answers, one prompt at a time and as many together as
    in the rounds; `answers` are those of the small pool with our connector, an empty one where a request failed.

    `cancelled` and `failed` say how those two requests ended. Free blocks before and after are None where the engine
    gave no steady count.
    """

    cold: Answers
    at_once: Answers
    answers: Answers
    cancelled: str
    failed: str
    free_before: int | None
    free_after: int | None
    events: tuple[dict[str, Any], ...]

    def saved(self) -> int:
        """Requests that became donors."""
        return sum(event["event"] == "donor_registered" and not event.get("error") for event in self.events)

    def loaded_tokens(self) -> int:
        """Tokens that came from donors."""
        return sum(event["reused_tokens"] for event in self.events if event["event"] == "request_settled")


def serve_crowd(model: str, dtype: str, rounds: Sequence[Sequence[str]]) -> Crowded:
    """Serves the rounds cold and crowded. Raises SemBlendError when an engine does not start."""
    prompts = [prompt for each in rounds for prompt in each]
    with open_llm(model, None, {}, dtype=dtype, cache={"enable_block_reuse": False}) as llm:
        outputs = [output for prompt in prompts for output in llm.generate([prompt], greedy())]
        cold = tuple(tuple(output.outputs[0].token_ids) for output in outputs)
        longest = max(len(output.prompt_token_ids) for output in outputs)
        at_once = tuple(answer for each in rounds for answer in _answers([_ask(llm, prompt) for prompt in each]))
    room = longest + MAX_TOKENS + _SPARE_TOKENS
    with tempfile.TemporaryDirectory() as folder:
        audit = Path(folder) / "audit.jsonl"
        variables = {"SEMBLEND_POLICY": "exact", "SEMBLEND_AUDIT_PATH": str(audit)}
        with open_llm(
            model,
            WRAPPER,
            variables,
            dtype=dtype,
            cache={"max_tokens": _ROOM * room},
            max_seq_len=room,
            max_batch_size=max(map(len, rounds)),
            enable_iter_perf_stats=True,
        ) as llm:
            before = _free_blocks(llm)
            answers, cancelled, failed = _crowd(llm, rounds, [1] * (room + 1), audit)
            after = _free_blocks(llm)
        return Crowded(cold, at_once, answers, cancelled, failed, before, after, tuple(read_events(audit)))


def _crowd(llm: Any, rounds: Sequence[Sequence[str]], too_long: list[int], audit: Path) -> tuple[Answers, str, str]:
    """The answers, and how the cancelled and the failing request ended, which are asked amid the second round."""
    answers: list[tuple[int, ...]] = []
    cancelled = failed = "not asked"
    for number, prompts in enumerate(rounds):
        half = len(prompts) // 2
        handles = [_ask(llm, prompt) for prompt in prompts[:half]]
        if number == 1:
            doomed = llm.generate_async(prompts[0], greedy(_CANCELLED_TOKENS, ignore_eos=True), streaming=True)
            broken = _ask(llm, too_long)
            handles += [_ask(llm, prompt) for prompt in prompts[half:]]
            cancelled, failed = _cancel(doomed), _end(broken)
        else:
            handles += [_ask(llm, prompt) for prompt in prompts[half:]]
        answers += _answers(handles)
        wait_for_quiet(audit)
    return tuple(answers), cancelled, failed


def _ask(llm: Any, prompt: str | list[int]) -> Any:
    """A request on its way, or the error with which the engine refused to take it."""
    try:
        return llm.generate_async(prompt, greedy())
    except Exception as error:
        return error


def _answers(handles: Sequence[Any]) -> Answers:
    found: list[tuple[int, ...]] = []
    for handle in handles:
        ended = _end(handle)
        found.append(tuple(handle.outputs[0].token_ids) if ended in ("stop", "length") else ())
    return tuple(found)


def _cancel(handle: Any) -> str:
    """Cancels a request that has begun to generate, and says how it ended."""
    try:
        next(iter(handle))
        handle.abort()
    except Exception as error:
        return f"error: {error}"
    return _end(handle)


def _end(handle: Any) -> str:
    """The finish reason of a request, waited for, or its error."""
    if isinstance(handle, Exception):
        return f"error: {handle}"
    try:
        return str(handle.result(timeout=_WAIT_SECONDS).outputs[0].finish_reason)
    except Exception as error:
        return f"error: {error!r}"


def _free_blocks(llm: Any) -> int | None:
    """Blocks that no request holds, those for reuse among them, behind requests of a few tokens each: statistics come
    with iterations only. None when the count does not become steady."""
    seen: list[int] = []
    for _ in range(_MAX_ASKED):
        llm.generate([_SMALL_TALK], greedy(1))
        stats = [json.loads(each) if isinstance(each, str) else each for each in llm.get_stats(_STATS_SECONDS)]
        seen += [int(each["kvCacheStats"]["freeNumBlocks"]) for each in stats if each.get("kvCacheStats")][-1:]
        if len(seen) >= _STEADY and len(set(seen[-_STEADY:])) == 1:
            return seen[-1]
    return None
