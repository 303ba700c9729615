"""Cold runs: requests that are computed a second time without reuse, and their answers compared with the first.

The router compares answers where a request's header asks, and those of a sample."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import secrets
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import SemBlendError
from semblend_trt.policy import COLD

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    # What one run said: the tokens of each choice, or its text where the answer has no tokens.
    Said = Sequence[Sequence[int] | str]
    RunCold = Callable[[], Awaitable[Said]]

logger = logging.getLogger(__name__)

VERIFY_HEADER = "X-SemBlend-Verify"
# Most cold runs of the sample that wait or run; further ones are skipped.
MAX_WAITING = 8


def compared(first: Said, cold: Said) -> dict[str, Any]:
    """Return the receipt's `verified`: whether both runs said the same, else where the first other choice differs."""
    what = "text" if any(isinstance(said, str) for said in (*first, *cold)) else "tokens"
    for one, other in zip(first, cold, strict=False):
        if one != other:
            same = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
            return {"result": "differs", "compared": what, "first_difference": next(same, min(len(one), len(other)))}
    if len(first) != len(cold):
        return {"result": "failed", "reason": f"{len(first)} choices, and {len(cold)} of the cold run"}
    return {"result": "equal", "compared": what}


def cold_body(body: Mapping[str, Any]) -> bytes | None:
    """Return the body of a request's cold run, with a salt that no other request has; None where two runs may differ.
    Greedy requests and those with a seed agree. The API's default temperature is 1."""
    if body.get("temperature") != 0 and body.get("top_k") != 1 and body.get("seed") is None:
        return None
    asked = body.get("kv_transfer_params")
    kept = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    kept["cache_salt"] = f"cold-{secrets.token_hex(16)}"
    kept["kv_transfer_params"] = {**(asked if isinstance(asked, dict) else {}), COLD: True}
    return json.dumps(kept).encode()


def said_in(answer: bytes) -> list[Sequence[int] | str]:
    """Return what each choice of an answer, whole or streamed, says: its tokens if it has them, else its text.
    Raise ValueError for what is no answer of the OpenAI API."""
    parts = [line[5:] for line in answer.splitlines() if line.startswith(b"data:")] or [answer]
    tokens: dict[int, list[int]] = {}
    texts: dict[int, list[str]] = {}
    try:
        for part in (json.loads(each) for each in parts if each.strip() != b"[DONE]"):
            for choice in part["choices"]:
                at = choice.get("index", 0)
                tokens.setdefault(at, []).extend(choice.get("token_ids") or ())
                for kind, text in enumerate(_texts_of(choice)):
                    texts.setdefault(at, ["", "", ""])[kind] += text
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError("this is no answer of the OpenAI API") from None
    return [tokens[at] or "".join(texts[at]) for at in sorted(texts)]


def _texts_of(choice: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the reasoning, text and calls of a choice or a part of one, without the calls' random ids."""
    said = choice.get("message") or choice.get("delta") or {}
    calls = [call.get("function") or {} for call in said.get("tool_calls") or ()]
    return (
        said.get("reasoning_content") or said.get("reasoning") or "",
        choice.get("text") or said.get("content") or "",
        "".join((call.get("name") or "") + (call.get("arguments") or "") for call in calls),
    )


class ColdRuns:
    """Compares answers with cold runs, and draws a `share` of the requests for it.

    Belongs to one event loop. `count` gets each result, one of COLD_RUN_RESULTS. Runs of the sample go one at a time.
    At most MAX_WAITING wait for their turn, and no request waits for them."""

    def __init__(self, share: float, count: Callable[[str], None]) -> None:
        self._share, self._count = share, count
        self._turn = asyncio.Lock()
        self._sample: set[asyncio.Task[Any]] = set()

    def draws(self) -> bool:
        """Return whether the next request is one of the sample."""
        return random.random() < self._share

    async def verdict(self, first: Said, run_cold: RunCold | None) -> dict[str, Any]:
        """Return the receipt's `verified`; without `run_cold` two runs may differ. Raise nothing but a cancellation."""
        told: dict[str, Any]
        try:
            if run_cold is None:
                told = {"result": "not_comparable", "reason": "sampled without a seed: two runs need not agree"}
            else:
                told = compared(first, await run_cold())
        except asyncio.TimeoutError:
            told = {"result": "skipped"}  # the replica was never idle for long enough
        except SemBlendError as error:
            told = {"result": "failed", "reason": str(error)}
        except Exception:
            logger.exception("a cold run failed")
            told = {"result": "failed", "reason": "the cold run failed; the log says why"}
        self._count(told["result"])
        return told

    def later(self, first: Said, run_cold: RunCold | None) -> None:
        """Compare an answer of the sample when its turn comes, without waiting."""
        if len(self._sample) >= MAX_WAITING:
            self._count("skipped")
            return
        task = asyncio.create_task(self._in_turn(first, run_cold))
        self._sample.add(task)
        task.add_done_callback(self._sample.discard)

    async def close(self) -> None:
        """Cancel the waiting and running comparisons."""
        for task in self._sample:
            task.cancel()
        await asyncio.gather(*self._sample, return_exceptions=True)

    async def _in_turn(self, first: Said, run_cold: RunCold | None) -> None:
        async with self._turn:
            told = await self.verdict(first, run_cold)
        if told["result"] == "differs":
            unit = "character" if told["compared"] == "text" else "token"
            logger.warning("an answer with reuse differs from the cold run's at %s %d", unit, told["first_difference"])
