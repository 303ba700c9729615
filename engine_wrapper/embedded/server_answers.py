"""Answers in the form of the OpenAI API: whole ones, the chunks of a stream, and where a text stops."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_wrapper.embedded.outputs import RequestOutput

STREAM_END = b"data: [DONE]\n\n"
_UNFINISHED = "\ufffd"


@dataclass(slots=True)
class TextSoFar:
    """Cuts an answer that grows at the first of `stops`, and says what may be shown of it.

    A character whose bytes are not all there yet is held back, and so is what may be the beginning of a stop.
    """

    stops: tuple[str, ...] = ()
    shown: str = ""
    is_stopped: bool = False

    def delta(self, text: str, *, is_last: bool) -> str:
        """What can be shown of `text`, the whole answer so far, beyond what was shown."""
        ends = [at for at in map(text.find, self.stops) if at >= 0]
        if ends:
            self.is_stopped, text = True, text[: min(ends)]
        elif not is_last:
            text = text[: len(text) - self._held_back(text)]
        new, self.shown = text[len(self.shown) :], max(text, self.shown, key=len)
        return new

    def _held_back(self, text: str) -> int:
        held = len(text) - len(text.rstrip(_UNFINISHED))
        for stop in self.stops:
            fits = (length for length in range(len(stop) - 1, 0, -1) if text.endswith(stop[:length]))
            held = max(held, next(fits, 0))
        return held


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """One request's answer as JSON, of a chat or of a completion."""

    model: str
    is_chat: bool
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, text: str, finish_reason: str | None, output: RequestOutput) -> dict[str, Any]:
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"message": {"role": "assistant", "content": text}}
        return self._answer({**content, "finish_reason": finish_reason}, is_chunk=False) | {"usage": usage_of(output)}

    def chunk(self, text: str, finish_reason: str | None, *, is_first: bool) -> bytes:
        """One event of a stream."""
        content: dict[str, Any] = {"text": text}
        if self.is_chat:
            content = {"delta": ({"role": "assistant"} if is_first else {}) | {"content": text}}
        return event(self._answer({**content, "finish_reason": finish_reason}, is_chunk=True))

    def usage_chunk(self, output: RequestOutput) -> bytes:
        """The event with the usage, behind the last one with text."""
        return event(self._answer(None, is_chunk=True) | {"usage": usage_of(output)})

    def _answer(self, choice: dict[str, Any] | None, *, is_chunk: bool) -> dict[str, Any]:
        name = "text_completion"
        if self.is_chat:
            name = "chat.completion.chunk" if is_chunk else "chat.completion"
        return {
            "id": ("chatcmpl-" if self.is_chat else "cmpl-") + self.answer_id,
            "object": name,
            "created": self.created,
            "model": self.model,
            "choices": [] if choice is None else [{"index": 0, "logprobs": None, **choice}],
        }


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(data).encode("ascii") + b"\n\n"


def usage_of(output: RequestOutput) -> dict[str, Any]:
    """Tokens of prompt and answer. Of the prompt's, `cached_tokens` came from the engine's exact prefix cache,
    `reused_tokens` from donors, and `computed_tokens` went through the last layer."""
    prompt, answer = len(output.prompt_token_ids), len(output.outputs[0].token_ids)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer,
        "total_tokens": prompt + answer,
        "prompt_tokens_details": {
            "cached_tokens": output.cached_tokens,
            "reused_tokens": output.reused_tokens,
            "computed_tokens": output.computed_tokens,
        },
    }
