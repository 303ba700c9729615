"""What the engines' answers and audit logs show, a line each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from validation.trtllm_check.served import Served

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from validation.trtllm_check.served import Crowded, Workload

STOCK, EXACT, RECOMPUTED, REUSED = "stock", "exact", "recomputed", "reused"
# Half precision makes some answers differ when a prompt is computed in other chunks; the stock engine shows how many.
_SLACK = 0.05
_MAX_EM_DROP = 0.02
_PROFILE_REFUSALS = ("no_profile", "profile_mismatch", "profile_unreadable")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the result."""

    name: str
    holds: bool
    what: str


def judge(asked: Workload, served: dict[str, Served]) -> list[Finding]:
    """What the answers and audit logs of the four engines without a profile show."""
    checks: tuple[Callable[[Workload, dict[str, Served]], Finding], ...]
    checks = (_smoke, _exactness, _execution, _publication, _validation)
    return [check(asked, served) for check in checks]


def judge_verified(asked: Workload, stock: Served, verified: Served) -> Finding:
    """What is reused under the profile is as often right as cold, and the engine takes the profile."""
    right = {"stock": _exact_matches(asked, stock), "verified": _exact_matches(asked, verified)}
    ended = verified.settled()
    refused = sorted({str(event["reason"]) for event in ended if event["reason"] in _PROFILE_REFUSALS})
    reused = sum(int(event["reused_tokens"]) for event in ended)
    what = f"share of right answers {right}; {reused} tokens reused; the profile was refused: {refused}"
    holds = len(ended) == len(asked.prompts) and not refused and right["stock"] - right["verified"] <= _MAX_EM_DROP
    return Finding("verified", holds, what)


def judge_crowd(crowded: Crowded) -> list[Finding]:
    """Many at once are answered as one at a time, all of them end, and the pool has its blocks again."""
    floor, share = (_share_equal(crowded.cold, each) for each in (crowded.at_once, crowded.answers))
    saved, loaded = crowded.saved(), crowded.loaded_tokens()
    seen = (
        f"{len(crowded.cold)} answers, equal to a cold run's: {share:.3f}; to the stock engine's, asked at once: "
        f"{floor:.3f}; {saved} donors saved and {loaded} tokens loaded; others: {_others(crowded)}"
    )
    ended = f"the cancelled request: {crowded.cancelled}; the one that is too long: {crowded.failed[:200]}"
    blocks = f"free blocks before {crowded.free_before}, after {crowded.free_after}"
    is_back = crowded.free_before is not None and crowded.free_after == crowded.free_before
    is_ended = crowded.cancelled == "cancelled" and crowded.failed.startswith("error")
    # Where nothing was saved and loaded, equal answers show nothing.
    return [
        Finding("concurrency", share >= floor - _SLACK and saved > 0 and loaded > 0, seen),
        Finding("endings", is_ended and all(crowded.answers), ended),
        Finding("blocks", is_back, blocks),
    ]


def _others(crowded: Crowded) -> list[int]:
    """The numbers of the answers that differ, for who looks them up."""
    pairs = zip(crowded.cold, crowded.answers, strict=True)
    return [number for number, (ours, theirs) in enumerate(pairs) if ours != theirs][:16]


def _smoke(asked: Workload, served: dict[str, Served]) -> Finding:
    """Every prompt is answered, and every connector has seen every request."""
    prompts = len(asked.prompts)
    silent = [arm for arm, each in served.items() if sum(map(bool, each.tokens)) < prompts]
    unseen = [arm for arm, each in served.items() if arm != STOCK and len(each.settled()) < prompts]
    refused = {
        str(event["refusal"])
        for each in served.values()
        for event in each.events
        if event["event"] == "scheduler_initialized" and event["refusal"]
    }
    what = (
        f"{prompts} prompts; unanswered in {silent}, not seen by the connector in {unseen}, refused: {sorted(refused)}"
    )
    return Finding("smoke", not silent and not unseen and not refused, what)


def _exactness(asked: Workload, served: dict[str, Served]) -> Finding:
    """What is exact, and what is computed again in every layer, is answered as the stock engine answers."""
    first, second = _twice(asked, served[STOCK])
    floor = _share_equal(first, second)
    shares = {arm: _share_equal(served[STOCK].tokens, served[arm].tokens) for arm in (EXACT, RECOMPUTED)}
    what = f"answers equal to the stock engine's: {shares}; to its own, asked twice: {floor:.3f}"
    return Finding("exactness", all(share >= floor - _SLACK for share in shares.values()), what)


def _execution(asked: Workload, served: dict[str, Served]) -> Finding:
    """Text at other places was offered, so that the decoder was attached to and the self-check has passed."""
    start, end = len(asked.donors), len(asked.donors) + len(asked.targets)
    offered = {
        arm: sum(int(event.get("offered_tokens") or 0) for event in served[arm].settled()[start:end])
        for arm in (RECOMPUTED, REUSED)
    }
    segmented = {arm: any(_is_segmented(event) for event in served[arm].events) for arm in offered}
    what = f"tokens offered from other places {offered}, with holes between them {segmented}"
    return Finding("execution", all(offered.values()) and all(segmented.values()), what)


def _publication(asked: Workload, served: dict[str, Served]) -> Finding:
    """A prompt that was served approximately finds at most its exact part in the engine when it is asked again."""
    grown = []
    for arm in (RECOMPUTED, REUSED):
        exact = _exact_parts(served[arm].events)
        first, second = _twice(asked, served[arm].settled())
        for before, after in zip(first, second, strict=True):
            limit = max(before["exact_prefix_tokens"], exact.get(before["request_id"], after["exact_prefix_tokens"]))
            grown += [arm] if after["exact_prefix_tokens"] > limit else []
    return Finding("publication", not grown, f"prompts whose approximate KV was published: {grown}")


def _exact_parts(events: Sequence[dict[str, Any]]) -> dict[int, int]:
    """Of every request with a plan that moves text to another place, the tokens in front of that."""
    dispatched = [event for event in events if event["event"] == "plan_dispatched"]
    shifted = {
        event["request_id"]: [target for _, donor, target, _ in event["spans"] if donor != target]
        for event in dispatched
    }
    return {request_id: min(starts) for request_id, starts in shifted.items() if starts}


def _validation(asked: Workload, served: dict[str, Served]) -> Finding:
    """Answers from reused text are as often right as cold ones."""
    right = {arm: _exact_matches(asked, served[arm]) for arm in (STOCK, REUSED)}
    what = f"share of right answers {right}; a drop of {_MAX_EM_DROP} is allowed"
    return Finding("validation", right[STOCK] - right[REUSED] <= _MAX_EM_DROP, what)


def _is_segmented(event: dict[str, Any]) -> bool:
    is_approximate = (event["event"], event.get("kind")) == ("lookup", "request_local")
    return is_approximate and bool(event["diagnostics"]["holes"])


def _twice(asked: Workload, results: Any) -> tuple[list[Any], list[Any]]:
    """The results of the targets, as they were asked first and again. `results`: Served, or one item a prompt."""
    items: list[Any] = list(results.tokens if isinstance(results, Served) else results)
    start, count = len(asked.donors), len(asked.targets)
    return items[start : start + count], items[start + count : start + 2 * count]


def _share_equal(first: Sequence[Any], second: Sequence[Any]) -> float:
    return sum(bool(one == other) for one, other in zip(first, second, strict=True)) / max(1, len(first))


def _exact_matches(asked: Workload, served: Served) -> float:
    start = len(asked.donors)
    texts = served.texts[start : start + len(asked.targets)]
    pairs = zip(texts, asked.targets, strict=True)
    right = [re.findall(r"\d+", text)[:1] == [each.answer] for text, each in pairs]
    return sum(right) / max(1, len(right))
