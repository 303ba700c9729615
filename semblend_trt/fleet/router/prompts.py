"""From the body of a request to the OpenAI API to token ids, as the engine makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from semblend_trt.errors import SemBlendError

if TYPE_CHECKING:
    from collections.abc import Mapping


class PromptError(SemBlendError, ValueError):
    """A body holds no prompt that can be read."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A message of a chat, or the whole prompt with no role."""

    role: str | None
    text: str


class PromptReader:
    """Reads prompts with one Transformers `tokenizer`. Not thread safe: tokenizers are not."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self._tokenizer, "chat_template", None))

    def completion(self, body: Mapping[str, Any]) -> list[int]:
        """Token ids of `prompt`: a text, a list of token ids, or a list of one of these. Raises PromptError."""
        prompt = completion_prompt(body)
        return self._encoded(prompt, special=True) if isinstance(prompt, str) else prompt

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
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=special))
        except (TypeError, UnicodeEncodeError):
            raise PromptError("the prompt holds a lone surrogate and has no UTF-8 form; send valid text") from None


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
