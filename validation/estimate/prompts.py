"""The prompts of a log, one line after the other: request bodies, LiteLLM's and vLLM's lines, or plain text."""

import ast
import json
import re
from collections.abc import Callable, Iterable, Iterator
from importlib.resources import files
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from semblend_trt.discovery.fingerprint import TokenArray, as_token_array
from semblend_trt.model_tokenizer import load_tokenizer
from semblend_trt.prompts import ChatError, render_chat
from validation.replay.trace import Skipped, UnreadError, readable_lines

# Bytes of a log that decide its form.
HEAD_BYTES = 1 << 20
# The most prompts that are encoded together, and about their most characters.
_BATCH_PROMPTS, _BATCH_CHARACTERS = 256, 2 << 20

# Where a request may be in a line, and where its prompt is in the request; the first that is there counts.
_ENVELOPES = ("body", "request_body", "request", "proxy_server_request", "payload", "kwargs", "data")
_PROMPTS = ("messages", "prompt_token_ids", "prompt", "input", "text")
_MAX_ENVELOPES = 4
_INSTRUCTIONS = ("system", "instructions")
# vLLM's "Received request ID: prompt: '...', ..." up to 0.10, then "Request ID details: prompt: '...', ..." at DEBUG.
_VLLM_START = re.compile(r"request \S{1,256}(?: details)?: prompt: ", re.IGNORECASE)
_VLLM_REQUEST = re.compile(
    _VLLM_START.pattern + r"(?P<prompt>None|'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"), "
    r"(?:.*?prompt_token_ids: \[(?P<ids>[\d, ]*)\])?",
    re.IGNORECASE,
)


def format_of(head: bytes) -> str:
    """Return a log's form: jsonl (request, chat, text or token ids a line), vllm or text (a prompt a line)."""
    if head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[", b'"'):
        return "jsonl"
    return "vllm" if _VLLM_START.search(head.decode("utf-8", "replace")) else "text"


class Prompt(NamedTuple):
    """A text or token ids int32 [n]. Prompts of one `namespace` may share KV; `is_rendered`: with special tokens."""

    line: int
    namespace: str
    content: str | TokenArray
    is_rendered: bool = False


class Encoder:
    """Prompts as token ids: a model's tokenizer with its chat template, or the one that ships with the package."""

    def __init__(self, name: str | None = None) -> None:
        """Load a folder or a hub id; None is the shipped one. Raises ConfigurationError if it cannot be read."""
        self._tokenizer: Any = load_tokenizer(name or str(files("validation") / "assets" / "model"))

    def render(self, body: dict[str, Any]) -> tuple[str, bool]:
        """Return a chat by its template, else its texts, and whether special tokens are in it. Raises UnreadError."""
        if getattr(self._tokenizer, "chat_template", None):
            try:
                text, special = render_chat(body, self._tokenizer)
            except ChatError as error:
                raise UnreadError(f"refused: {error.name}") from None
            return text, not special
        said = [f"{name}\n{json.dumps(body[name])}<|end|>" for name in ("tools", "documents") if body.get(name)]
        for message in body["messages"]:
            calls = json.dumps(message["tool_calls"]) if message.get("tool_calls") else ""
            said.append(f"{message['role']}\n{_text_of(message.get('content'))}{calls}<|end|>")
        return "".join(said), True

    def encode(self, prompts: list[Prompt]) -> list[TokenArray]:
        """Return the token ids of each prompt, int32 [n]."""
        found: list[Any] = [each.content for each in prompts]
        for is_rendered in (False, True):
            chosen = [at for at, each in enumerate(prompts) if each.is_rendered is is_rendered]
            texts = {at: found[at] for at in chosen if isinstance(found[at], str)}
            if texts:
                read = self._tokenizer([*texts.values()], add_special_tokens=not is_rendered, verbose=False)
                for at, ids in zip(texts, read["input_ids"], strict=True):
                    found[at] = np.array(ids, dtype=np.int32)
        return found


def encoded(prompts: Iterable[Prompt], encoder: Encoder) -> Iterator[tuple[Prompt, TokenArray]]:
    """Return the prompts with their token ids, in order."""
    batch, size = list[Prompt](), 0
    for prompt in prompts:
        batch.append(prompt)
        size += len(prompt.content)
        if len(batch) == _BATCH_PROMPTS or size >= _BATCH_CHARACTERS:
            yield from zip(batch, encoder.encode(batch), strict=True)
            batch, size = [], 0
    yield from zip(batch, encoder.encode(batch), strict=True)


class PromptLog:
    """Iterates once over the prompts of an open `file`; what cannot be read is counted in `skipped`."""

    def __init__(self, file: BinaryIO, encoder: Encoder, form: str | None = None) -> None:
        """Read in `form`; None is that of the first HEAD_BYTES bytes, which `file` must give by `peek`."""
        self.skipped = Skipped()
        self._file, self._encoder, self._form = file, encoder, form

    def __iter__(self) -> Iterator[Prompt]:
        form = self._form or format_of(self._file.peek(HEAD_BYTES)[:HEAD_BYTES])  # type: ignore[attr-defined]
        prompts_of: dict[str, Callable[[int, str], Iterable[Prompt]]] = {
            "jsonl": self._of_json,
            "vllm": _of_vllm,
            "text": lambda line, text: [Prompt(line, "", text)],
        }
        for line, text in readable_lines(self._file, self.skipped):
            try:
                yield from prompts_of[form](line, text)
            except UnreadError as error:
                self.skipped.add(line, str(error))
            except RecursionError:  # what could just be parsed may be too deep for what comes next
                self.skipped.add(line, "nested too deeply")

    def _of_json(self, line: int, text: str) -> Iterator[Prompt]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            raise UnreadError("not JSON") from None
        body = _body(found) if isinstance(found, dict) else {"messages": found}
        namespace = json.dumps([body.get("model"), body.get("cache_salt")])
        content = next(body[name] for name in _PROMPTS if name in body)
        if isinstance(content, str) and isinstance(found, dict) and "messages" in body:
            chat = _parsed(content)  # LiteLLM's spend logs keep a chat as text
            content = chat if isinstance(chat, list) else content
        for each in _several(content):
            yield Prompt(line, namespace, *self._content(each, body))

    def _content(self, content: Any, body: dict[str, Any]) -> tuple[str | TokenArray, bool]:
        """Return a prompt's text or token ids, and whether special tokens are in it. Raises UnreadError."""
        if isinstance(content, str):
            return _checked(content), False
        if isinstance(content[0], int):
            return _token_ids(content), False
        messages = [_message(each) for each in content]
        first = next((_text_of(body[name]) for name in _INSTRUCTIONS if body.get(name)), "")
        if first:
            messages.insert(0, {"role": "system", "content": first})
        chat = {**body, "messages": messages}
        if isinstance(body.get("tools"), list):
            chat["tools"] = list(map(_tool, body["tools"]))
        text, is_rendered = self._encoder.render(chat)
        return _checked(text), is_rendered


def _of_vllm(line: int, text: str) -> Iterator[Prompt]:
    """Yield the prompt of a line of vLLM's log; other lines of it have none."""
    if _VLLM_START.search(text) is None:
        return
    found = _VLLM_REQUEST.search(text)
    if found is None:
        raise UnreadError("cut off")
    if found["ids"]:
        yield Prompt(line, "", _token_ids(found["ids"].split(",")))
    elif found["prompt"] == "None":
        raise UnreadError("without a prompt")
    else:
        try:
            said = str(ast.literal_eval(found["prompt"]))
        except (ValueError, SyntaxError):
            raise UnreadError("cut off") from None
        yield Prompt(line, "", _checked(said), is_rendered=True)


def _token_ids(found: list[Any]) -> TokenArray:
    """Return the token ids, int32 [n]. Raises UnreadError for what is no list of them."""
    try:
        return as_token_array(np.array(found, dtype=np.int64 if isinstance(found[0], str) else None))
    except (ValueError, OverflowError):
        raise UnreadError("with token ids that are none") from None


def _body(found: dict[str, Any]) -> dict[str, Any]:
    """Return the request in a line's object. Raises UnreadError."""
    inner: Any = found
    for _ in range(_MAX_ENVELOPES):
        if not isinstance(inner, dict):
            break
        if any(inner.get(name) is not None for name in _PROMPTS):
            return {name: value for name, value in inner.items() if value is not None}
        inner = next((inner[name] for name in _ENVELOPES if inner.get(name)), None)
        inner = _parsed(inner) if isinstance(inner, str) else inner
    raise UnreadError("without a prompt")


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _several(content: Any) -> list[Any]:
    """Return the prompts of one request: texts, lists of token ids, or chats. Raises UnreadError."""
    if not isinstance(content, (str, list)):
        raise UnreadError("without a prompt")
    is_one = isinstance(content, str) or not content or isinstance(content[0], (int, dict))
    prompts: list[Any] = [content] if is_one else list(content)
    if not all(prompts):
        raise UnreadError("empty")
    for each in prompts:
        is_list = isinstance(each, list) and any(all(isinstance(one, kind) for one in each) for kind in (int, dict))
        if not (isinstance(each, str) or is_list):
            raise UnreadError("without a prompt")
    return prompts


def _message(found: dict[str, Any]) -> dict[str, Any]:
    """Return a message of a chat, also of other APIs, without a role or with their own parts. Raises UnreadError."""
    if isinstance(found.get("role"), str):
        if not isinstance(content := found.get("content"), list):
            return found
        is_text = [isinstance(part, dict) and part.get("type") == "text" for part in content]
        parts = zip(content, is_text, strict=True)
        return {**found, "content": [part if ok else {"type": "text", "text": _text_of(part)} for part, ok in parts]}
    if "output" in found:
        return {"role": "tool", "content": _text_of(found["output"])}
    return {"role": "assistant", "content": json.dumps(found)}


def _tool(found: Any) -> Any:
    """Return a tool of a chat, also for other APIs' tools, which are the function itself."""
    if not isinstance(found, dict) or "function" in found or "name" not in found:
        return found
    function = {"parameters": found.get("input_schema"), **found}
    return {"function": {name: function.get(name) for name in ("name", "description", "parameters")}}


def _text_of(content: Any) -> str:
    """Return the text of a message's content, which may have parts. Raises UnreadError for parts that are no text."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, (dict, list)):
        raise UnreadError("without a prompt")
    said = []
    for part in [content] if isinstance(content, dict) else content:
        if isinstance(part, str):
            said.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            said.append(part["text"])
        elif isinstance(part, dict) and part.get("type") == "tool_result":
            said.append(_text_of(part.get("content")))
        elif isinstance(part, dict) and part.get("type") == "tool_use":
            said.append(json.dumps([part.get("name"), part.get("input")]))
        else:
            raise UnreadError("with images or other input than text")
    return "".join(said)


def _checked(text: str) -> str:
    """Return the text. Raises UnreadError for an empty one, and for surrogates, which no tokenizer reads."""
    if not text.strip():
        raise UnreadError("empty")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UnreadError("not text in UTF-8") from None
    return text
