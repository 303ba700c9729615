"""Prefills documents ahead, so that the first request that holds one can reuse it.

Each document is sent to /v1/completions of an OpenAI-compatible server (of the embedded engine, the router, or
`vllm serve`) with one token to answer. A FILE is the text of one document, or JSONL (*.jsonl) with {"text": "..."} a
line. What was sent is remembered in a state file, and a second run goes on behind it; remove that file when the server
has lost its donors. A document that cannot be read, or that the server refuses, is named, and the rest goes on. It
exits with 0, and with 2 when nothing could be sent or the server does not answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

from pydantic import AliasChoices, AliasPath, BaseModel, Field, StrictInt, TypeAdapter

from semblend_trt.command_line import USAGE_ERROR, count, named, printable
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import bounded_lines, check_writable, open_input, read_input, read_text, too_long

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from concurrent.futures import Future

    from tqdm import tqdm

SUMMARY = "prefill documents ahead, so that requests can reuse them"
STATE_NAME = ".semblend-warm.json"
KEY_VARIABLE = "OPENAI_API_KEY"
CONNECT_SECONDS = 10.0
# A document may wait for long while the server has other work.
ANSWER_SECONDS = 3600.0
MAX_ANSWER_BYTES = 1 << 20
MAX_SHOWN = 300
# Statuses of a server that takes nothing now: it is asked so many times, at most so many seconds apart.
BUSY, ATTEMPTS, MAX_PAUSE = (429, 503), 6, 60.0
# Statuses that are about the document; others are about the server.
REFUSED = (400, 413, 422, 500)
_STATE = TypeAdapter(dict[str, list[str]])


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the server, the documents and how they are sent."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text of one document, or *.jsonl")
    parser.add_argument("--url", type=Server, required=True, help="the server, such as http://127.0.0.1:8001")
    parser.add_argument("--model", type=named, help="what requests call the model (default: the server's first)")
    parser.add_argument("--api-key", type=named, help=f"the server's API key (default: the variable {KEY_VARIABLE})")
    parser.add_argument("--salt", type=named, help="cache_salt of the requests that are to reuse the documents")
    parser.add_argument(
        "--prefix",
        type=Path,
        metavar="FILE",
        help="text to put in front of each document: the beginning of your prompts, with a document or two; a reuse "
        "profile's check passes more KV that was computed behind it",
    )
    parser.add_argument(
        "--priority",
        type=int,
        metavar="N",
        help="with 1 or more, requests come before documents: on the embedded engine's server, and on vLLM with "
        "--scheduling-policy priority (without that vLLM may refuse it)",
    )
    parser.add_argument(
        "--concurrency", type=count, default=1, metavar="N", help="documents under way at once (default: %(default)s)"
    )
    parser.add_argument("--state", type=Path, help=f"the state file (default: {STATE_NAME} beside the first FILE)")


def run(arguments: argparse.Namespace) -> int:
    """Sends the documents. Raises SemBlendError when the server or the state file cannot be used."""
    from tqdm import tqdm

    from semblend_trt.policy import EXACT_ONLY

    files, server = arguments.files, arguments.url
    state = State(arguments.state or files[0].parent / STATE_NAME)
    prefix = read_text(arguments.prefix, may_be_pipe=True) if arguments.prefix else ""
    server.key = key = arguments.api_key or os.environ.get(KEY_VARIABLE, "")
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError(f"the API key has characters that no header takes; look at {KEY_VARIABLE}, --api-key")
    fields = {
        "model": arguments.model or server.first_model(),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {EXACT_ONLY: True},
        "cache_salt": arguments.salt,
        "priority": arguments.priority,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    total = sum(path.stat().st_size for path in files if path.is_file())
    with tqdm(total=total, unit="B", unit_scale=True, desc="documents", leave=False, disable=None) as bar:
        warming = Warming(server, fields, prefix, state, bar)
        try:
            warming.send(files, arguments.concurrency)
        finally:
            sys.stdout.write(warming.told())
    return 0 if warming.sent or warming.sent_before else USAGE_ERROR


# -- documents --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Document:
    """One document of `size` bytes in its file. `place` names it; `problem` says why it has no text."""

    place: str
    size: int
    text: str = ""
    problem: str | None = None


def documents_of(files: Sequence[Path]) -> Iterator[Document]:
    """The documents of all files, those that cannot be read with their problem."""
    for path in files:
        try:
            if path.suffix != ".jsonl":
                yield _document(str(path), read_input(path, may_be_pipe=True), is_line=False)
                continue
            with open_input(path) as file:
                for number, (line, size) in enumerate(bounded_lines(file), 1):
                    if why := too_long(line):
                        yield Document(f"{path}:{number}", size, problem=f"the line is {why}; give a shorter one")
                    elif line.strip():
                        yield _document(f"{path}:{number}", line, is_line=True)
        except OSError as error:
            yield Document(str(path), 0, problem=f"it cannot be read ({error.strerror}); name another file")


def _document(place: str, content: bytes, *, is_line: bool) -> Document:
    try:
        return Document(place, len(content), _text_of(content, is_line=is_line))
    except ConfigurationError as error:
        return Document(place, len(content), problem=str(error))


def _text_of(content: bytes, *, is_line: bool) -> str:
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        message = f"byte {content[error.start]:#04x} at {error.start} is not UTF-8; write the document in UTF-8"
        raise ConfigurationError(message) from None
    if is_line:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise ConfigurationError('the line is not JSON; give {"text": "..."}') from None
        if not isinstance(value, dict) or not isinstance(value.get("text"), str):
            raise ConfigurationError('the line has no text; give {"text": "..."}')
        text = value["text"]
    if not text.strip():
        raise ConfigurationError("the document is empty; give it text, or leave it out")
    return text


# -- what was sent ----------------------------------------------------------------------------------------------------


class State:
    """The digests of the documents that were sent, in a file that is whole at any time.

    Raises ConfigurationError for a file that is no state, or that cannot be written.
    """

    def __init__(self, path: Path) -> None:
        check_writable(path)
        self._path, self._digests = path, dict[str, None]()
        if path.exists():
            try:
                self._digests |= dict.fromkeys(_STATE.validate_json(read_input(path))["warmed"])
            except (OSError, ValueError, KeyError):
                raise ConfigurationError(f"{path} is no state of this command; name another with --state") from None

    def __contains__(self, digest: str) -> bool:
        return digest in self._digests

    def add(self, digest: str) -> None:
        from semblend_trt.files import write_bytes

        self._digests[digest] = None
        write_bytes(self._path, json.dumps({"warmed": list(self._digests)}).encode())


class Warming:
    """Sends documents behind `prefix` to a server with the request's `fields`, and counts what became of them. `tokens`
    are those of the prompts that were sent."""

    def __init__(self, server: Server, fields: dict[str, Any], prefix: str, state: State, bar: tqdm) -> None:
        self._server, self._fields, self._prefix, self._state, self._bar = server, fields, prefix, state, bar
        self._running: dict[Future[int], tuple[Document, str]] = {}
        self.sent = self.sent_before = self.failed = self.tokens = 0

    def send(self, files: Sequence[Path], concurrency: int) -> None:
        """Sends the documents of all files, `concurrency` at a time. Raises SemBlendError when the server fails."""
        with ThreadPoolExecutor(concurrency) as threads:
            try:
                for document in documents_of(files):
                    while len(self._running) >= concurrency:
                        self._take_answers()
                    self._begin(document, threads)
                while self._running:
                    self._take_answers()
            except BaseException:
                self._server.hang_up()
                raise

    def told(self) -> str:
        """One line about all documents so far."""
        return (
            f"{self.sent} document{'s' * (self.sent != 1)} sent ({self.tokens:,} tokens), {self.sent_before} sent "
            f"before, {self.failed} failed\n"
        )

    def _begin(self, document: Document, threads: ThreadPoolExecutor) -> None:
        prompt = self._prefix + document.text
        digest = self._digest(prompt)
        if document.problem is not None:
            self._fail(document, document.problem)
        elif digest in self._state or any(digest == under_way for _, under_way in self._running.values()):
            self.sent_before += 1
            self._bar.update(document.size)
        else:
            body = json.dumps({**self._fields, "prompt": prompt}).encode()
            self._running[threads.submit(self._server.prefill, body)] = document, digest

    def _take_answers(self) -> None:
        for future in wait(self._running, return_when=FIRST_COMPLETED).done:
            document, digest = self._running.pop(future)
            try:
                self.tokens += future.result()
            except RefusedError as refusal:
                self._fail(document, str(refusal))
                continue
            self.sent += 1
            self._state.add(digest)
            self._bar.update(document.size)

    def _fail(self, document: Document, problem: str) -> None:
        self.failed += 1
        self._bar.write(printable(f"{document.place}: {problem}"), file=sys.stderr)
        self._bar.update(document.size)

    def _digest(self, prompt: str) -> str:
        told = [self._server.url, self._fields["model"], self._fields.get("cache_salt"), prompt]
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()


# -- the server -------------------------------------------------------------------------------------------------------


class RefusedError(SemBlendError):
    """The server refuses a document."""


_TOKENS, _MODEL = AliasPath("usage", "prompt_tokens"), AliasPath("data", 0, "id")
_MESSAGE = AliasChoices(AliasPath("error", "message"), "message")


class _Answer(BaseModel):
    """What is read of an answer."""

    tokens: Annotated[Annotated[StrictInt, Field(ge=0, le=1 << 40)] | None, Field(validation_alias=_TOKENS)] = None
    model: Annotated[str | None, Field(validation_alias=_MODEL)] = None
    message: Annotated[Any, Field(validation_alias=_MESSAGE)] = None


class Server:
    """An OpenAI-compatible server at `url`, which may end in /v1. `key` is its API key. Redirects are not followed."""

    def __init__(self, url: str) -> None:
        """Raises ArgumentTypeError for a text that is no address."""
        try:
            parts = urlsplit(url)
            self._host, self._port = parts.hostname or "", parts.port
        except ValueError:
            self._host = ""
        if not self._host or parts.scheme not in ("http", "https") or {*"@?#"} & {*url}:
            raise argparse.ArgumentTypeError("it is no address such as http://127.0.0.1:8001; give one without a user")
        self._connection = HTTPSConnection if parts.scheme == "https" else HTTPConnection
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self.url = f"{parts.scheme}://{parts.netloc}{self._path}"
        self.key = ""
        self._open: set[HTTPConnection] = set()
        self._ended = threading.Event()

    def first_model(self) -> str:
        """The name of the first model. Raises SemBlendError without one."""
        status, answer, _ = self._ask("GET", "/v1/models")
        if not answer.model:
            raise SemBlendError(f"{self.url} names no model ({_said(status, answer)}); give it with --model")
        return answer.model

    def prefill(self, body: bytes) -> int:
        """Sends a document; returns its tokens. Raises RefusedError where it is refused, and SemBlendError when the
        server fails or takes nothing for minutes."""
        for attempt in range(ATTEMPTS):
            status, answer, retry = self._ask("POST", "/v1/completions", body)
            if status not in BUSY or self._ended.wait(pause(retry, 2**attempt)):
                break
        if status == 200 and answer.tokens is not None:
            return answer.tokens
        if status in REFUSED:
            raise RefusedError(f"the server refuses it ({_said(status, answer)})")
        raise SemBlendError(f"{self.url} cannot be used ({_said(status, answer)}); the next run goes on from here")

    def hang_up(self) -> None:
        """Ends the requests that are under way."""
        self._ended.set()
        for connection in list(self._open):
            with suppress(OSError, AttributeError):
                connection.sock.shutdown(socket.SHUT_RDWR)

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, _Answer, str]:
        """The answer's status, what it says and its Retry-After."""
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        connection = self._connection(self._host, self._port, timeout=CONNECT_SECONDS)
        self._open.add(connection)
        try:
            connection.connect()
            if self._ended.is_set():  # `hang_up` may have come before there was a socket
                raise ConnectionAbortedError
            connection.sock.settimeout(ANSWER_SECONDS)
            connection.request(method, self._path + path, body, headers)
            response = connection.getresponse()
            content, retry = response.read(MAX_ANSWER_BYTES), response.getheader("Retry-After", "")
        except (OSError, HTTPException, UnicodeError) as error:
            why = getattr(error, "strerror", None) or str(error)[:MAX_SHOWN] or type(error).__name__
            raise SemBlendError(f"{self.url} is out of reach ({why}); the next run goes on from here") from None
        finally:
            self._open.discard(connection)
            connection.close()
        try:
            answer = _Answer.model_validate(json.loads(content))
        except (ValueError, RecursionError):
            answer = _Answer()
        return response.status, answer, retry


def pause(retry_after: str, otherwise: float) -> float:
    """Seconds until a server is asked again, at most MAX_PAUSE: what its header says as a number or a date."""
    text, seconds = retry_after.strip(), otherwise
    if text.isascii() and text.isdecimal():
        seconds = int(text.lstrip("0")[:5] or "0")  # of more digits than Python reads, too
    with suppress(ValueError, TypeError, IndexError, OverflowError):
        seconds = parsedate_to_datetime(text).timestamp() - time.time()
    return min(MAX_PAUSE, max(0.0, seconds))


def _said(status: int, answer: _Answer) -> str:
    said = answer.message
    return f"{status}: {said[:MAX_SHOWN]}" if said and isinstance(said, str) else f"status {status}"
