"""The prompt of a request to the OpenAI API: its text, and its token ids as the engine would compute them.

This is the one reader for gateways, the embedded server and the estimate. It reads a body of /v1/chat/completions as
the newest vLLM does, or refuses it by name. Like vLLM it ignores unknown fields and those that do not change the
prompt. It does not know a server's own arguments, such as template defaults."""

from __future__ import annotations

import asyncio
import copy
import inspect
import json
import math
import os
import re
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Annotated, Any, Literal, TypeVar

from jinja2 import nodes
from pydantic import BaseModel, Field, ValidationError

from semblend_trt.errors import SemBlendError
from semblend_trt.model_tokenizer import imported

_T = TypeVar("_T")

# Fields that replace or cut what the template writes, or that an engine has to allow.
_REFUSED = (
    *("chat_template", "truncate_prompt_tokens", "prompt_embeds", "suffix"),
    *("mm_processor_kwargs", "media_io_kwargs"),
)
# Arguments of `apply_chat_template` that `chat_template_kwargs` may set.
_TEMPLATE_FIELDS = {"documents", "add_generation_prompt", "continue_final_message"}
# vLLM drops this line of a system message: it differs in each request of Claude Code.
_BILLING_LINE = "x-anthropic-billing-header"
# Most bytes of a body that is read on the thread for short ones.
SHORT_BODY_BYTES = 32 << 10
# Most threads for longer ones.
LONG_THREADS = 4


class PromptError(SemBlendError, ValueError):
    """A body has no readable prompt."""


class ChatError(PromptError):
    """A chat is refused; `name` is the field at fault, or `template`, `no_template` or `own_code`."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


# -- what a body holds, in the order in which a template sees it ------------------------------------------------------
class _Function(BaseModel, extra="allow"):
    arguments: str
    name: str


class _Call(BaseModel, extra="allow"):
    id: str
    function: _Function
    type: Literal["function"]


class _Part(BaseModel, extra="forbid"):
    type: Literal["text"]
    text: str
    cache_control: Any = None


class _Message(BaseModel):
    role: str
    content: str | list[_Part] | None = Field(default_factory=list)
    tool_calls: list[_Call] | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_call_id: str | None = None
    name: str = ""
    task: None = None
    tools: None = None


class _ToolFunction(BaseModel):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: None = None


class _Tool(BaseModel):
    type: Literal["function"] = "function"
    function: _ToolFunction
    defer_loading: None = None

    def seen(self) -> dict[str, Any]:
        """Return what a template sees: a description that is missing is null there, and `strict` is not."""
        unseen = {"defer_loading"} if self.function.strict is not None else {"defer_loading", "strict"}
        return self.model_dump(exclude={"defer_loading": True, "function": unseen})


class _Chat(BaseModel):
    messages: Annotated[list[_Message], Field(min_length=1)]
    tools: Annotated[list[_Tool], Field(min_length=1)] | None = None
    documents: list[dict[str, str]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any]) -> _Chat:
        """Raises ChatError."""
        try:
            return cls.model_validate(body)
        except ValidationError as error:
            # Where a value may be of several types, the deepest error says most. The names of types are left out.
            worst = max(error.errors(include_url=False, include_input=False), key=lambda each: len(each["loc"]))
            place = [str(each) for each in worst["loc"] if not re.search(r"^_|^str$|\[", str(each))]
            raise ChatError(place[0], f"{'.'.join(place)}: {worst['msg']}") from None


def refuse_other_prompts(body: Mapping[str, Any]) -> None:
    """Raise ChatError for a field by which the prompt is another one than the body's texts say."""
    for name in _REFUSED:
        if body.get(name) is not None:
            raise ChatError(name, f"{name} changes the prompt in a way that is not read here; leave it out")
    transfer = body.get("kv_transfer_params")
    if isinstance(transfer, dict) and transfer.get("prompt_token_ids") is not None:
        raise ChatError("kv_transfer_params", "kv_transfer_params.prompt_token_ids replaces the prompt; leave it out")


# -- messages ---------------------------------------------------------------------------------------------------------
def _message(number: int, message: _Message, *, as_parts: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {"role": message.role, "content": _content(number, message, as_parts=as_parts)}
    if message.role == "assistant":
        if message.tool_calls:
            seen["tool_calls"] = [_call(each) for each in message.tool_calls]
        reasoning = message.reasoning_content if message.reasoning is None else message.reasoning
        if reasoning is not None:
            seen |= {"reasoning": reasoning, "reasoning_content": reasoning}
    elif message.role == "tool" and message.tool_call_id is not None:
        seen["tool_call_id"] = message.tool_call_id
    if "name" in message.model_fields_set:
        seen["name"] = message.name
    return seen


def _content(number: int, message: _Message, *, as_parts: bool) -> str | list[dict[str, Any]]:
    content, given = message.content, message.model_fields_set
    if content is None:
        may_be = message.role == "assistant" or (message.role == "function" and "name" in given)
        if not may_be or ("tool_calls" in given and message.tool_calls is None):
            raise ChatError("messages", f"messages.{number}.content is null; give text, or leave it out")
    parts: list[dict[str, Any]] = [{"type": "text", "text": content}]
    if not isinstance(content, str):
        parts = [part.model_dump(exclude_unset=True) for part in content or ()]
    if message.role == "system":
        billed = [part for part in parts if part["text"].startswith(_BILLING_LINE)]
        for part in billed:
            part["text"] = part["text"].partition("\n")[2]
        parts = [part for part in parts if part["text"] or part not in billed]
    if as_parts and message.role != "tool":
        return parts
    return "\n".join(part["text"] for part in parts if part["text"] or as_parts)


def _call(call: _Call) -> dict[str, Any]:
    """Return a call with its arguments as an object, which is empty where the text holds none."""
    seen, arguments = call.model_dump(), None
    with suppress(ValueError, RecursionError):
        arguments = json.loads(call.function.arguments)
    seen["function"]["arguments"] = arguments if isinstance(arguments, dict) else {}
    return seen


def _with_one_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Make developers' messages the system's, and put the system's together as the first message."""
    if not any(message["role"] == "developer" for message in messages):
        return messages
    for message in messages:
        message["role"] = "system" if message["role"] == "developer" else message["role"]
    systems = [message for message in messages if message["role"] == "system"]
    if systems == messages[:1]:
        return messages
    contents = (message["content"] for message in systems)
    texts = (each if isinstance(each, str) else "\n".join(part["text"] for part in each) for each in contents)
    merged = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [merged, *(message for message in messages if message["role"] != "system")]


# -- the template -----------------------------------------------------------------------------------------------------
def render_chat(body: Mapping[str, Any], tokenizer: Any) -> tuple[str, bool]:
    """Return a chat by a Transformers `tokenizer`, and whether special tokens come to it. Raises ChatError."""
    refuse_other_prompts(body)
    chat = _Chat.of(body)
    tools = None if chat.tools is None else [tool.seen() for tool in chat.tools]
    # The template sees these beside messages and tools; null and "auto" leave a name undefined.
    asked = {name: value for name, value in (chat.chat_template_kwargs or {}).items() if value not in (None, "auto")}
    arguments = asked | chat.model_dump(include=_TEMPLATE_FIELDS | {"reasoning_effort"}, exclude_none=True)
    if chat.reasoning_effort is not None and "enable_thinking" not in (chat.chat_template_kwargs or {}):
        arguments["enable_thinking"] = chat.reasoning_effort != "none"
    reserved = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages", "self"} - _TEMPLATE_FIELDS
    if taken := sorted(reserved & arguments.keys()):
        message = f"chat_template_kwargs.{taken[0]} is no variable of a template; leave it out"
        raise ChatError("chat_template_kwargs", message)
    if not getattr(tokenizer, "chat_template", None):
        raise ChatError("no_template", "the model's tokenizer has no chat template; use /v1/completions")
    template = str(tokenizer.get_chat_template(None, tools))
    if "<|channel|>" in template:
        raise ChatError("own_code", "vLLM writes chats of gpt-oss without a template; use /v1/completions")
    as_parts = _takes_parts(template)
    messages = [_message(number, each, as_parts=as_parts) for number, each in enumerate(chat.messages)]
    if not any(f"{quote}developer{quote}" in template for quote in "\"'"):
        messages = _with_one_system(messages)
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **arguments)
    except Exception as error:  # templates are programs and may raise anything
        raise ChatError("template", f"the model's chat template does not take these messages: {error}") from None
    return str(text), chat.add_special_tokens


@lru_cache(maxsize=32)
def _takes_parts(template: str) -> bool:
    """Return whether a template iterates over the parts of a content. vLLM gives parts to such a template alone."""
    try:
        compiled = imported("_compile_jinja_template", "transformers.utils.chat_template_utils")(template)
        return _iterates_over_content(compiled.environment.parse(template))
    except Exception:  # it cannot be rendered either, or is written in a way that vLLM does not follow
        return False


def _iterates_over_content(tree: nodes.Template) -> bool:
    chats = ["messages"]
    for chat in chats:  # which grows meanwhile
        chats += {_name(node.target) for node in tree.find_all(nodes.Assign) if _is(node.node, chat)} - {*chats}
    loops = list(tree.find_all(nodes.For))
    messages = {_name(loop.target) for loop in loops if any(_is(loop.iter, chat) for chat in chats)}
    in_macros: dict[int, set[str]] = {}
    for macro in tree.find_all(nodes.Macro):
        given = _given_contents(tree, macro, messages)
        in_macros |= {id(loop): given for loop in macro.find_all(nodes.For)}
    return any(
        any(_is(loop.iter, message, "content") for message in messages)
        or (isinstance(loop.iter, nodes.Name) and loop.iter.name in in_macros.get(id(loop), {"content"}))
        for loop in loops
    )


def _given_contents(tree: nodes.Template, macro: nodes.Macro, messages: set[str]) -> set[str]:
    """Return the parameters of a macro that some call gives a message's content."""
    values: list[tuple[str, nodes.Expr]] = []
    for call in tree.find_all(nodes.Call):
        if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
            values += zip((argument.name for argument in macro.args), call.args, strict=False)
            values += ((each.key, each.value) for each in call.kwargs if isinstance(each, nodes.Keyword))
    return {name for name, value in values if any(_is(value, each, "content") for each in messages)}


def _is(node: Any, name: str, key: str | None = None) -> bool:
    """Return True if a node reads the variable `name`, or its item `key`, through any filter, test or slice."""
    while isinstance(node, (nodes.Filter, nodes.Test)) or isinstance(getattr(node, "arg", None), nodes.Slice):
        node = node.node
    if key is not None:
        found = node.attr if isinstance(node, nodes.Getattr) else None
        if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
            found = node.arg.value
        if found != key:
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _name(target: nodes.Node) -> str:
    if not isinstance(target, nodes.Name):
        raise TypeError("vLLM follows plain variables alone")
    return target.name


# -- token ids --------------------------------------------------------------------------------------------------------
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
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
            (prompt,) = prompt
        if isinstance(prompt, str):
            special = body.get("add_special_tokens", True)
            if not isinstance(special, bool):
                raise PromptError("add_special_tokens is true or false")
            return self.token_ids(prompt, special=special)
        if not (isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt)):
            raise PromptError("prompt is a text or a list of token ids, one prompt a request")
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

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._local = tokenizer, threading.local()
        count = min(LONG_THREADS, os.cpu_count() or 1)
        self._short, self._long = ThreadPoolExecutor(1, "short-prompts"), ThreadPoolExecutor(count, "long-prompts")

    async def read(self, size: int, reading: Callable[[PromptReader], _T]) -> _T:
        """Return the result of `reading` for a body of `size` bytes, with the thread's reader."""
        threads = self._short if size <= SHORT_BODY_BYTES else self._long
        return await asyncio.get_running_loop().run_in_executor(threads, self._read, reading)

    def _read(self, reading: Callable[[PromptReader], _T]) -> _T:
        if not hasattr(self._local, "reader"):
            self._local.reader = PromptReader(copy.deepcopy(self._tokenizer))
        return reading(self._local.reader)

    def close(self) -> None:
        for threads in (self._short, self._long):
            threads.shutdown(wait=False, cancel_futures=True)
