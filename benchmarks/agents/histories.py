"""Histories of agents, read from files, and the ways in which an agent's harness changes them from turn to turn."""

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from semblend_trt.errors import ConfigurationError
from semblend_trt.prompts import PromptReader

Message = dict[str, str]
# One agent's prompts in the order of its turns, as token ids. The first one is long, and is served untimed.
Session = list[list[int]]


def sessions_of(
    tokenizer: Any, histories: Iterable[list[Message]], tokens: int, turns: int
) -> dict[str, list[Session]]:
    """Return the prompts of agents' last turns by variant, `turns` of each after the first, of at most `tokens` tokens.

    Raises ConfigurationError if a history has too few turns within them."""
    reader, found = PromptReader(tokenizer), {name: list[Session]() for name in CHANGES}
    for history in histories:
        # The leading messages that fit beside what a change adds: its turns are the last ones of a long history.
        sizes = accumulate(len(reader.token_ids(each["content"])) + 8 for each in history)
        kept = [message for message, size in zip(history, sizes, strict=True) if size <= tokens - tokens // 16]
        ends = [i for i, each in enumerate(kept) if each["role"] == "assistant"]
        if len(ends) <= turns + 1:
            raise ConfigurationError(
                f"A history has {len(kept)} messages within {tokens} tokens, too few for {turns} turns; "
                "give longer histories, more --tokens or fewer --turns."
            )
        for name, change in CHANGES.items():
            changed = (change(kept[:end], turn) for turn, end in enumerate(ends[-1 - turns :]))
            found[name].append([reader.chat({"messages": each})[-tokens:] for each in changed])
    return found


def read_histories(path: Path, count: int, tokens: int) -> list[list[Message]]:
    """Return `count` histories of roughly `tokens` tokens or more: trajectories one after the other.

    A line of a JSONL file is a chat body with `messages`; a JSON file is a list of tau-bench's records, with `traj`.
    Raises ConfigurationError if a file has another form or too few of them."""
    try:
        text = path.read_text()
        records = json.loads(text) if text.startswith("[") else [json.loads(line) for line in text.splitlines()]
        trajectories = [list(_plain(each.get("traj") or each["messages"])) for each in records]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read ({error!r}); give a JSONL file of chat bodies, or tau-bench's JSON list."
        ) from None
    found, following = list[list[Message]](), iter(trajectories)
    while len(found) < count:
        history, characters = list[Message](), 0
        for each in following:
            history += each if not history else each[1:]  # one system message
            characters += sum(len(message["content"]) for message in each)
            if characters > 5 * tokens:  # English has about four characters a token
                break
        if characters <= 5 * tokens:
            raise ConfigurationError(
                f"{path} has text for {len(found)} histories of {tokens} tokens, and {count} are asked for; "
                "give more of it, or fewer --sessions."
            )
        found.append(history)
    return found


def _plain(messages: Iterable[dict[str, Any]]) -> Iterator[Message]:
    """Messages with text alone, for templates without tools: calls and results are shown as JSON text."""
    for each in messages:
        content = each.get("content") or json.dumps(
            [call["function"] for call in each.get("tool_calls") or ()], ensure_ascii=False
        )
        if each["role"] in ("tool", "function"):
            yield {"role": "user", "content": f"Tool result:\n{content}"}
        else:
            yield {"role": each["role"], "content": content}


def _without_oldest(messages: list[Message], turn: int) -> list[Message]:
    """At a token limit, which each turn reaches, the oldest messages after the system's are dropped."""
    return messages[:1] + messages[1 + 2 * turn :]


def _with_volatile_head(messages: list[Message], turn: int) -> list[Message]:
    """The date, the session and the user's name are the first words, and change with each turn."""
    names = ("Ada", "Grace Hopper", "Edsger W.", "Barbara", "Donald E. Knuth", "Leslie", "Margaret H.", "Tony")
    head = f"Session {7919 * turn + 104729}, 2026-11-{turn % 28 + 1:02d} {turn % 24:02d}:17, {names[turn % 8]}.\n"
    return _with_head(messages, head)


def _as_two_agents(messages: list[Message], turn: int) -> list[Message]:
    """Two agents with other orders before the same tools and documents take turns."""
    orders = "You plan. Answer with the next step and its reason.\n", "You review. Name what is wrong, in one line.\n"
    return _with_head(messages, orders[turn % 2])


def _with_head(messages: list[Message], head: str) -> list[Message]:
    return [{**messages[0], "content": head + messages[0]["content"]}, *messages[1:]]


def _with_file_read_again(messages: list[Message], turn: int) -> list[Message]:
    """The longest text so far is read again after an edit: it takes the place of its first reading and ends the
    prompt."""
    longest = max(range(1, len(messages)), key=lambda i: len(messages[i]["content"]))
    words = messages[longest]["content"].split(" ")
    words[len(words) // 3] = f"edited-{turn}"
    again = {"role": "user", "content": " ".join(words)}
    stub = {**messages[longest], "content": "(read again below)"}
    return [*messages[:longest], stub, *messages[longest + 1 :], again]


def _with_results_reordered(messages: list[Message], turn: int) -> list[Message]:
    """The results of tools, in the first half of the history, come in another order each turn."""
    places = [i for i in range(1, len(messages) // 2) if messages[i]["content"].startswith("Tool result:")]
    changed, shift = list(messages), 1 + turn % max(1, len(places) - 1)
    for i, place in enumerate(places):
        changed[place] = messages[places[(i + shift) % len(places)]]
    return changed


CHANGES: dict[str, Callable[[list[Message], int], list[Message]]] = {
    "volatile": _with_volatile_head,
    "dropped": _without_oldest,
    "reread": _with_file_read_again,
    "reordered": _with_results_reordered,
    "shared": _as_two_agents,
}
