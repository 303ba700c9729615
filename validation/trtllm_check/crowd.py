"""Many requests at once over a pool that is too small for them, beside a cold engine's answers one at a time.

One request is cancelled while it generates, one cannot be served at all. A forward that fails cannot be brought about
through the public API, so that is not among what is seen here.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from validation.audit_log import read_events
from validation.trtllm_api import WRAPPER, open_llm, wait_for_quiet
from validation.trtllm_check.served import MAX_TOKENS, greedy

if TYPE_CHECKING:
    from collections.abc import Sequence

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
