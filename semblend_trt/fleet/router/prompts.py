"""Token ids of the prompt in a request to the OpenAI API, as the engine would compute them."""

from __future__ import annotations

import asyncio
import copy
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")

# Bodies of at most so many bytes are read on the thread for short ones.
SHORT_BODY_BYTES = 32 << 10


class PromptError(SemBlendError, ValueError):
    """A body has no readable prompt."""


class PromptTooLongError(PromptError):
    """A prompt has more tokens than the model takes."""


class PromptReader:
    """Reads prompts with a Transformers `tokenizer`. Not thread safe, since tokenizers are not.

    A text with more characters than `max_tokens` times the longest token of the vocabulary is refused unread.
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
        texts = [text for _, text in self.texts(body)]
        messages = [{**message, "content": text} for message, text in zip(body["messages"], texts, strict=True)]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=body.get("tools"), add_generation_prompt=True, tokenize=False
            )
        except Exception as error:  # templates are programs and may raise anything
            raise PromptError(f"the model's chat template does not take these messages: {error}") from None
        return self._encoded(text, special=False)

    def texts(self, body: Mapping[str, Any]) -> list[tuple[str | None, str]]:
        """Role and text of each message; or None and the prompt, where it is a text. Raises PromptError."""
        if "messages" not in body:
            prompt = completion_prompt(body)
            return [(None, prompt)] if isinstance(prompt, str) else []
        messages = body["messages"]
        if not isinstance(messages, list) or not messages or not all(isinstance(each, dict) for each in messages):
            raise PromptError("messages is a list of objects with role and content, with at least one")
        return [_role_and_text(number, message) for number, message in enumerate(messages)]

    def token_ids(self, text: str) -> list[int]:
        """Token ids of a part of a prompt. Raises PromptError."""
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
    """Reads prompts outside of the event loop. Short ones have a thread of their own, so as not to wait for long
    ones."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        """Each thread has its own copy of `tokenizer`."""
        self._threads = {
            name: (ThreadPoolExecutor(1, f"{name}-prompts"), PromptReader(copy.deepcopy(tokenizer), max_tokens))
            for name in ("short", "long")
        }

    async def read(self, size: int, reading: Callable[[PromptReader], _T]) -> _T:
        """The result of `reading` for a body of `size` bytes, with the thread's reader."""
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


def _role_and_text(number: int, message: Mapping[str, Any]) -> tuple[str, str]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise PromptError(f"messages[{number}] has no role; give system, user, assistant or tool")
    if isinstance(content, list):
        parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
        if len(parts) < len(content):
            raise PromptError(f"messages[{number}] holds more than text; this model takes text")
        content = "\n".join(parts)
    if not isinstance(content, str | None):
        raise PromptError(f"messages[{number}].content is {type(content).__name__}; give text")
    return role, content or ""
