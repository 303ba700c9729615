"""Token ids of the prompt in a request to the OpenAI API, as the engine would compute them."""

from __future__ import annotations

import asyncio
import copy
import math
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from semblend_trt.chats import PromptError, refuse_other_prompts, render_chat

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_T = TypeVar("_T")

# Most bytes of a body that is read on the thread for short ones.
SHORT_BODY_BYTES = 32 << 10
# Most threads for longer ones.
LONG_THREADS = 4


class PromptTooLongError(PromptError):
    """A prompt has more tokens than the model takes."""


class PromptReader:
    """Reads prompts with a Transformers `tokenizer`. Not thread safe, since tokenizers are not. Refuses unread a text
    of more characters than `max_tokens` times the vocabulary's longest token."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._max_characters: float = math.inf
        if max_tokens is not None:
            self._max_characters = max_tokens * max(map(len, tokenizer.get_vocab()))

    def completion(self, body: Mapping[str, Any]) -> list[int]:
        """Return token ids of `prompt`: a text, a list of token ids, or a list of one of these. Raise PromptError."""
        refuse_other_prompts(body)
        prompt = completion_prompt(body)
        if isinstance(prompt, str):
            special = body.get("add_special_tokens", True)
            if not isinstance(special, bool):
                raise PromptError("add_special_tokens is true or false")
            return self.token_ids(prompt, special=special)
        if self._max_tokens is not None and len(prompt) > self._max_tokens:
            message = f"the prompt has {len(prompt)} tokens, more than the {self._max_tokens} of this model; send less"
            raise PromptTooLongError(message)
        return prompt

    def chat(self, body: Mapping[str, Any]) -> list[int]:
        """Return token ids of `messages`, by the tokenizer's template. Raise PromptError."""
        text, special = render_chat(body, self._tokenizer)
        return self.token_ids(text, special=special)

    def token_ids(self, text: str, *, special: bool = False) -> list[int]:
        """Return token ids of a part of a prompt; `special`: with those that the tokenizer adds. Raise PromptError."""
        if len(text) > self._max_characters:
            raise PromptTooLongError(
                f"the prompt has {len(text)} characters, more than the {self._max_characters} that this model's "
                f"{self._max_tokens} tokens can hold; send less"
            )
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        except (TypeError, UnicodeEncodeError):
            raise PromptError("the prompt holds a lone surrogate and has no UTF-8 form; send valid text") from None


class ReadingThreads:
    """Reads prompts outside of the event loop; each thread has its own copy of `tokenizer`.
    Short prompts have a thread of their own, so as not to wait for long ones."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None) -> None:
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._local = threading.local()
        count = min(LONG_THREADS, os.cpu_count() or 1)
        self._threads = {
            name: ThreadPoolExecutor(threads, f"{name}-prompts") for name, threads in (("short", 1), ("long", count))
        }

    async def read(self, size: int, reading: Callable[[PromptReader], _T]) -> _T:
        """Return the result of `reading` for a body of `size` bytes, with the thread's reader."""
        threads = self._threads["short" if size <= SHORT_BODY_BYTES else "long"]
        return await asyncio.get_running_loop().run_in_executor(threads, self._read, reading)

    def _read(self, reading: Callable[[PromptReader], _T]) -> _T:
        if not hasattr(self._local, "reader"):
            self._local.reader = PromptReader(copy.deepcopy(self._tokenizer), self._max_tokens)
        return reading(self._local.reader)

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)


def completion_prompt(body: Mapping[str, Any]) -> str | list[int]:
    """Return the prompt of a completion. Raise PromptError."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        (prompt,) = prompt
    if isinstance(prompt, str):
        return prompt
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    raise PromptError("prompt is a text or a list of token ids, one prompt a request")
