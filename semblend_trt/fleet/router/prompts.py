"""From the body of a request to the OpenAI API to token ids, as the engine makes them."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")

# A body of at most so many bytes is read on the thread for short ones.
SHORT_BODY_BYTES = 32 << 10


class PromptError(SemBlendError, ValueError):
    """A body holds no prompt that can be read."""


class PromptTooLongError(PromptError):
    """A prompt has more tokens than the model takes, by its characters alone."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A message of a chat, or the whole prompt with no role."""

    role: str | None
    text: str


class PromptReader:
    """Reads prompts with one Transformers `tokenizer`. Not thread safe: tokenizers are not.

    A text with more characters than `max_tokens` times the vocabulary's longest token is not read.
    """

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        longest = 0 if max_tokens is None else max(map(len, tokenizer.get_vocab()))
        self._max_characters = None if max_tokens is None else max_tokens * longest

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def completion(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of `prompt`: a text, a list of token ids, or a list of one of these. Raises PromptError."""
        prompt = completion_prompt(body)
        if isinstance(prompt, str):
            return self._encoded(prompt, special=True)
        if self._max_tokens is not None and len(prompt) > self._max_tokens:
            message = f"the prompt has {len(prompt)} tokens, more than the {self._max_tokens} of this model; send less"
            raise PromptTooLongError(message)
        return prompt

    def chat(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of `messages`, by the tokenizer's template. Raises PromptError."""
        if not self.has_chat_template:
            raise PromptError("the model's tokenizer has no chat template; use /v1/completions")
        messages = [{**message, "content": piece.text} for message, piece in zip(*_chat(body), strict=True)]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=body.get("tools"), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs, and raise what they like
            raise PromptError(f"the model's chat template does not take these messages: {error}") from None
        return self._encoded(text, special=False)

    def pieces(self, body: Mapping[str, Any]) -> list[Piece]:
        """Messages, or the prompt where it is a text. Raises PromptError."""
        if "messages" in body:
            return _chat(body)[1]
        prompt = completion_prompt(body)
        return [Piece(None, prompt)] if isinstance(prompt, str) else []

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a text that stands in a prompt. Raises PromptError."""
        return self._encoded(text, special=False)

    def text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids))

    def _encoded(self, text: str, *, special: bool) -> list[int]:
        if self._max_characters is not None and len(text) > self._max_characters:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, more than the {self._max_characters} that this model's "
                f"{self._max_tokens} tokens can hold; send less"
            )
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        except (TypeError, UnicodeEncodeError):
            raise PromptError("the prompt holds a lone surrogate and has no UTF-8 form; send valid text") from None


class ReadingThreads:
    """Reads prompts beside an event loop: short ones on a thread of their own, so that they wait for no long one."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        """Each thread has its own copy of `tokenizer`."""
        self._threads = {
            name: (ThreadPoolExecutor(1, f"{name}-prompts"), PromptReader(copy.deepcopy(tokenizer), max_tokens))
            for name in ("short", "long")
        }

    async def read(self, size: int, reading: Callable[[PromptReader], _T]) -> _T:
        """What `reading` makes of a body of `size` bytes with a thread's reader."""
        thread, reader = self._threads["short" if size <= SHORT_BODY_BYTES else "long"]
        return await asyncio.get_running_loop().run_in_executor(thread, reading, reader)

    def close(self) -> None:
        for thread, _ in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def completion_prompt(body: Mapping[str, Any]) -> str | list[int]:
    """The prompt of a completion. Raises PromptError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise PromptError("prompt is a text or a list of token ids, one prompt a request")


def _chat(body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Piece]]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
        raise PromptError("messages is a list of objects with role and content, with at least one")
    return messages, [_piece(at, message) for at, message in enumerate(messages)]


def _piece(at: int, message: Mapping[str, Any]) -> Piece:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise PromptError(f"messages[{at}] has no role; give system, user, assistant or tool")
    if content is None:
        return Piece(role, "")
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(parts) < len(content):
            raise PromptError(f"messages[{at}] holds more than text; this model takes text")
        content = "\n".join(parts)
    if not isinstance(content, str):
        raise PromptError(f"messages[{at}].content is {type(content).__name__}; give text")
    return Piece(role, content)
