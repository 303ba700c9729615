"""Cold runs: requests that are computed a second time without reuse, and their answers compared with the first."""

from __future__ import annotations

import json
import secrets
from typing import TYPE_CHECKING, Any

from semblend_trt.policy import COLD

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    # What one run said: the tokens of each choice, or its text where the answer has no tokens.
    Said = Sequence[Sequence[int] | str]


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
