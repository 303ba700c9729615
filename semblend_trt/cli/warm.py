"""Prefills documents ahead, so that the first request that holds one can reuse it.

Each document is sent to /v1/completions of an OpenAI-compatible server (of the embedded engine, the router, or
`vllm serve`) with one token to answer. A FILE is the text of one document, or JSONL (*.jsonl) with {"text": "..."} a
line. What was sent is remembered in a state file, and a second run goes on after it; remove that file when the server
has lost its donors. A document that cannot be read, or that the server refuses, is named, and the rest goes on. It
exits with 0, and with 2 when nothing could be sent or the server does not answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from dataclasses import dataclass
from http.client import HTTPException
from itertools import islice
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

from pydantic import AliasChoices, AliasPath, BaseModel, Field, StrictInt, TypeAdapter

from semblend_trt.command_line import USAGE_ERROR, count, named, printable
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import bounded_lines, check_writable, open_input, read_input, read_text, too_long, write_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tqdm import tqdm

SUMMARY = "prefill documents ahead, so that requests can reuse them"
STATE_NAME = ".semblend-warm.json"
KEY_VARIABLE = "OPENAI_API_KEY"
# A document may wait long while the server has other work.
_ANSWER_SECONDS = 3600.0
_MAX_ANSWER_BYTES = 1 << 20
_MAX_SHOWN = 300
# Statuses of a server that takes nothing now; the times that it is asked, and the seconds at most between them.
_BUSY, _ATTEMPTS, MAX_PAUSE = (429, 503), 6, 60.0
# Statuses that are about the document; others are about the server.
_REFUSED = (400, 413, 422, 500)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the server, the documents and how they are sent."""
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text of one document, or *.jsonl")
    parser.add_argument("--url", type=Server, required=True, help="the server, such as http://127.0.0.1:8001")
    parser.add_argument("--model", type=named, help="what requests call the model (default: the server's first)")
    parser.add_argument("--api-key", type=named, help=f"the server's API key (default: the variable {KEY_VARIABLE})")
    parser.add_argument("--salt", type=named, help="cache_salt of the requests that are to reuse the documents")
    parser.add_argument(
        "--prefix",
        type=Path,
        metavar="FILE",
        help="text to put before each document: the beginning of your prompts, with a document or two; a reuse "
        "profile's check passes more KV that was computed after it",
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
    """Send the documents. Raises SemBlendError when the server or the state file cannot be used."""
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
    with (
        tqdm(total=total, unit="B", unit_scale=True, desc="documents", leave=False, disable=None) as bar,
        ThreadPool(arguments.concurrency) as threads,
    ):
        warming = Warming(server, fields, prefix, state, bar)
        documents = documents_of(files)
        try:
            while batch := list(islice(documents, arguments.concurrency)):
                warming.send(batch, threads)
        finally:
            sys.stdout.write(warming.summary())
    return 0 if warming.counts["sent"] or warming.counts["before"] else USAGE_ERROR


@dataclass(frozen=True, slots=True)
class Document:
    """One document of `size` bytes in its file. `place` names it; `problem` says why it has no text."""

    place: str
    size: int
    text: str = ""
    problem: str | None = None


def documents_of(files: Sequence[Path]) -> Iterator[Document]:
    """Yield the documents of all files, those that cannot be read with their problem."""
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
    text, problem = "", None
    try:
        text = json.loads(content.decode("utf-8"))["text"] if is_line else content.decode("utf-8")
        if not text.strip():
            problem = "the document is empty; give it text, or leave it out"
    except UnicodeDecodeError as error:
        problem = f"byte {content[error.start]:#04x} at {error.start} is not UTF-8; write the document in UTF-8"
    except (ValueError, RecursionError):
        problem = 'the line is not JSON; give {"text": "..."}'
    except (KeyError, TypeError, AttributeError):
        problem = 'the line has no text; give {"text": "..."}'
    return Document(place, len(content), text, problem)


class State:
    """Digests of the documents sent, in a file that is whole at any time. Raises ConfigurationError for a bad file."""

    def __init__(self, path: Path) -> None:
        check_writable(path)
        self._path, self.digests = path, dict[str, None]()
        if path.exists():
            try:
                kept = TypeAdapter(dict[str, list[str]]).validate_json(read_input(path))
                self.digests |= dict.fromkeys(kept["warmed"])
            except (OSError, ValueError, KeyError):
                raise ConfigurationError(f"{path} is no state of this command; name another with --state") from None

    def add(self, digest: str) -> None:
        self.digests[digest] = None
        write_bytes(self._path, json.dumps({"warmed": list(self.digests)}).encode())


class Warming:
    """Sends documents after `prefix` to a server with the request's `fields`, and counts what became of them."""

    def __init__(self, server: Server, fields: dict[str, Any], prefix: str, state: State, bar: tqdm) -> None:
        self._server, self._fields, self._prefix, self._state, self._bar = server, fields, prefix, state, bar
        self.counts: Counter[str] = Counter()

    def send(self, documents: Sequence[Document], threads: ThreadPool) -> None:
        """Send the documents at once, and wait for their answers. Raises SemBlendError when the server fails."""
        about = self._server.url, self._fields["model"], self._fields.get("cache_salt")
        fresh: dict[str, Document] = {}
        for document in documents:
            seen = json.dumps([*about, self._prefix + document.text])
            digest = hashlib.blake2b(seen.encode(), digest_size=16).hexdigest()
            if document.problem is not None:
                self._fail(document, document.problem)
            elif digest in self._state.digests or digest in fresh:
                self.counts["before"] += 1
            else:
                fresh[digest] = document
        bodies = [json.dumps({**self._fields, "prompt": self._prefix + each.text}).encode() for each in fresh.values()]
        answers = threads.imap(self._server.prefill, bodies)
        for (digest, document), tokens in zip(fresh.items(), answers, strict=True):
            if isinstance(tokens, str):
                self._fail(document, tokens)
            else:
                self.counts.update(sent=1, tokens=tokens)
                self._state.add(digest)
        self._bar.update(sum(document.size for document in documents))

    def summary(self) -> str:
        """Return one line about all documents so far."""
        sent = self.counts["sent"]
        return (
            f"{sent} document{'s' * (sent != 1)} sent ({self.counts['tokens']:,} tokens), {self.counts['before']} sent "
            f"before, {self.counts['failed']} failed\n"
        )

    def _fail(self, document: Document, problem: str) -> None:
        self.counts["failed"] += 1
        self._bar.write(printable(f"{document.place}: {problem}"), file=sys.stderr)


class _Answer(BaseModel):
    tokens: StrictInt | None = Field(
        default=None, ge=0, le=1 << 40, validation_alias=AliasPath("usage", "prompt_tokens")
    )
    model: str | None = Field(default=None, validation_alias=AliasPath("data", 0, "id"))
    message: Any = Field(default=None, validation_alias=AliasChoices(AliasPath("error", "message"), "message"))


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class Server:
    """An OpenAI-compatible server at `url`, which may end in /v1. `key` is its API key. Redirects are not followed."""

    def __init__(self, url: str) -> None:
        """Raises ArgumentTypeError for a text that is no address."""
        try:
            parts = urlsplit(url)
            is_address = bool(parts.hostname) and parts.port != 0 and parts.scheme in ("http", "https")
        except ValueError:
            is_address = False
        if not is_address or {*"@?#"} & {*url}:
            raise argparse.ArgumentTypeError("it is no address such as http://127.0.0.1:8001; give one without a user")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self.key = ""
        self._opener = build_opener(_NoRedirects)

    def first_model(self) -> str:
        """Return the name of the first model. Raises SemBlendError without one."""
        status, answer, _ = self._ask("/v1/models")
        if not answer.model:
            raise SemBlendError(f"{self.url} names no model ({_said(status, answer)}); give it with --model")
        return answer.model

    def prefill(self, body: bytes) -> int | str:
        """Send a document; return its tokens, or why it is refused. Raises SemBlendError when the server fails."""
        for attempt in range(_ATTEMPTS):
            status, answer, retry = self._ask("/v1/completions", body)
            if status not in _BUSY:
                break
            time.sleep(pause(retry, 2**attempt))
        if status == 200 and answer.tokens is not None:
            return answer.tokens
        if status in _REFUSED:
            return f"the server refuses it ({_said(status, answer)})"
        raise SemBlendError(f"{self.url} cannot be used ({_said(status, answer)}); the next run goes on from here")

    def _ask(self, path: str, body: bytes | None = None) -> tuple[int, _Answer, str]:
        """The answer's status, what it says and its Retry-After."""
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {self.key}"} if self.key else {})}
        try:
            try:
                response = self._opener.open(Request(self.url + path, body, headers), timeout=_ANSWER_SECONDS)
            except HTTPError as error:
                response = error
            with response:
                status, content = response.status, response.read(_MAX_ANSWER_BYTES)
                retry = response.headers.get("Retry-After", "")
        except (OSError, HTTPException, UnicodeError) as error:
            reason = error.reason if isinstance(error, URLError) else error
            why = getattr(reason, "strerror", None) or str(reason)[:_MAX_SHOWN] or type(reason).__name__
            raise SemBlendError(f"{self.url} is out of reach ({why}); the next run goes on from here") from None
        try:
            answer = _Answer.model_validate(json.loads(content))
        except (ValueError, RecursionError):
            answer = _Answer()
        return status, answer, retry


def pause(retry_after: str, otherwise: float) -> float:
    """Return the seconds until a server is asked again, at most MAX_PAUSE: what its header says as a number."""
    text = retry_after.strip()
    is_number = text.isascii() and text.isdecimal()
    return min(MAX_PAUSE, int(text.lstrip("0")[:5] or "0") if is_number else otherwise)


def _said(status: int, answer: _Answer) -> str:
    said = answer.message
    return f"{status}: {said[:_MAX_SHOWN]}" if said and isinstance(said, str) else f"status {status}"
