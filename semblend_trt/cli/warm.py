"""Prefills documents ahead, so that the first request that holds one can reuse it.

Each document is sent to /v1/completions of an OpenAI-compatible server (of the embedded engine, a gateway,
or `vllm serve`) with one token to answer. A FILE is the text of one document, or JSONL (*.jsonl) with {"text": "..."} a
line. What was sent is remembered in a state file, and a second run goes on after it; remove that file when the server
has lost its donors. A document that cannot be read, or that the server refuses, is named, and the rest goes on. It
exits with 0, and with 2 when nothing could be sent or the server does not answer.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import TimeoutError
from multiprocessing.pool import IMapIterator, ThreadPool
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, Field, StrictInt, TypeAdapter
from tqdm import tqdm

from semblend_trt.cli._server import Server, add_server, said
from semblend_trt.command_line import USAGE_ERROR, count, named, printable
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import bounded_lines, check_writable, open_input, read_input, read_text, too_long, write_bytes
from semblend_trt.policy import EXACT_ONLY

SUMMARY = "prefill documents ahead, so that requests can reuse them"
STATE_NAME = ".semblend-warm.json"
_STATE = TypeAdapter(dict[Literal["warmed"], list[str]])
# Statuses that are about the document; others are about the server.
_REFUSED = (400, 413, 422, 500)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="text of one document, or *.jsonl")
    add_server(parser)
    parser.add_argument("--model", type=named, help="what requests call the model (default: the server's first)")
    parser.add_argument("--salt", type=named, help="cache_salt of the requests that are to reuse the documents")
    about = "text to put before each document: the beginning of your prompts, with a document or two; a reuse "
    about += "profile's check passes more KV that was computed after it"
    parser.add_argument("--prefix", type=Path, metavar="FILE", help=about)
    about = "with 1 or more, requests come before documents: on the embedded engine's server, and on vLLM with "
    about += "--scheduling-policy priority (without that vLLM may refuse it)"
    parser.add_argument("--priority", type=int, metavar="N", help=about)
    about = "documents under way at once (default: %(default)s)"
    parser.add_argument("--concurrency", type=count, default=1, metavar="N", help=about)
    parser.add_argument("--state", type=Path, help=f"the state file (default: {STATE_NAME} beside the first FILE)")


def run(arguments: argparse.Namespace) -> int:
    """Send the documents. Raises SemBlendError when the server or the state file cannot be used."""
    files, server = arguments.files, arguments.url
    prefix = read_text(arguments.prefix, may_be_pipe=True) if arguments.prefix else ""
    server.use_key(arguments.api_key)
    fields = {
        "model": arguments.model or server.first_model(),
        "max_tokens": 1,
        "temperature": 0,
        "kv_transfer_params": {EXACT_ONLY: True},
        "cache_salt": arguments.salt,
        "priority": arguments.priority,
    }
    fields = {name: value for name, value in fields.items() if value is not None}
    warming = Warming(server, fields, prefix, arguments.state or files[0].parent / STATE_NAME)
    documents = iter(tqdm(documents_of(files, warming.fail), desc="documents", leave=False, disable=None))
    counts = warming.counts
    with ThreadPool(arguments.concurrency) as threads:
        try:
            while batch := list(islice(documents, arguments.concurrency)):
                warming.send(batch, threads)
        finally:
            sent = f"{counts['sent']} document{'s' * (counts['sent'] != 1)} sent ({counts['tokens']:,} tokens)"
            sys.stdout.write(f"{sent}, {counts['before']} sent before, {counts['failed']} failed\n")
    return 0 if counts["sent"] or counts["before"] else USAGE_ERROR


def documents_of(files: Sequence[Path], fail: Callable[[str, str], None]) -> Iterator[tuple[str, str]]:
    """Yield place and text of each document; call `fail` with the place of one that cannot be read, and why."""
    for path in files:
        try:
            if path.suffix != ".jsonl":
                yield from _document(str(path), read_input(path, may_be_pipe=True), fail, is_line=False)
                continue
            with open_input(path) as file:
                for number, (line, _) in enumerate(bounded_lines(file), 1):
                    if why := too_long(line):
                        fail(f"{path}:{number}", f"the line is {why}; give a shorter one")
                    elif line.strip():
                        yield from _document(f"{path}:{number}", line, fail, is_line=True)
        except OSError as error:
            fail(str(path), f"it cannot be read ({error.strerror}); name another file")


def _document(
    place: str, content: bytes, fail: Callable[[str, str], None], *, is_line: bool
) -> Iterator[tuple[str, str]]:
    """Yield place and text of one document, or call `fail`."""
    try:
        text = json.loads(content.decode("utf-8"))["text"] if is_line else content.decode("utf-8")
        if text.strip():
            yield place, text
        else:
            fail(place, "the document is empty; give it text, or leave it out")
    except UnicodeDecodeError as error:
        byte = f"byte {content[error.start]:#04x} at {error.start}"
        fail(place, f"{byte} is not UTF-8; write the document in UTF-8")
    except (ValueError, RecursionError):
        fail(place, 'the line is not JSON; give {"text": "..."}')
    except (KeyError, TypeError, AttributeError):
        fail(place, 'the line has no text; give {"text": "..."}')


class Warming:
    """Sends documents after `prefix` to a server with the request's `fields`, and counts what became of them.

    The file at `state` has the digests of those sent, and is whole at any time. Raises ConfigurationError for a bad
    one."""

    def __init__(self, server: Server, fields: dict[str, Any], prefix: str, state: Path) -> None:
        check_writable(state)
        self._server, self._fields, self._prefix = server, fields, prefix
        self._state, self._sent = state, dict[str, None]()
        self.counts: Counter[str] = Counter()
        if state.exists():
            try:
                self._sent |= dict.fromkeys(_STATE.validate_json(read_input(state))["warmed"])
            except (OSError, ValueError, KeyError):
                raise ConfigurationError(f"{state} is no state of this command; name another with --state") from None

    def send(self, documents: Sequence[tuple[str, str]], threads: ThreadPool) -> None:
        """Send the documents at once, and wait for their answers. Raises SemBlendError when the server fails."""
        about = self._server.url, self._fields["model"], self._fields.get("cache_salt")
        fresh: dict[str, tuple[str, bytes]] = {}
        for place, text in documents:
            seen = json.dumps([*about, self._prefix + text])
            digest = hashlib.blake2b(seen.encode(), digest_size=16).hexdigest()
            if digest in self._sent or digest in fresh:
                self.counts["before"] += 1
            else:
                fresh[digest] = place, json.dumps({**self._fields, "prompt": self._prefix + text}).encode()
        answers = threads.imap(partial(_prefill, self._server), [body for _, body in fresh.values()])
        for digest, (place, _) in fresh.items():
            if isinstance(tokens := _next(answers), str):
                self.fail(place, tokens)
            else:
                self.counts.update(sent=1, tokens=tokens)
                self._sent[digest] = None
                write_bytes(self._state, json.dumps({"warmed": list(self._sent)}).encode())

    def fail(self, place: str, problem: str) -> None:
        self.counts["failed"] += 1
        tqdm.write(printable(f"{place}: {problem}"), file=sys.stderr)


class _Answer(BaseModel):
    tokens: Annotated[StrictInt, Field(ge=0, le=1 << 40, validation_alias=AliasPath("usage", "prompt_tokens"))]


def _next(answers: IMapIterator[int | str]) -> int | str:
    """Return the next answer. A wait without an end can miss an interrupt that comes just before it."""
    while True:
        with suppress(TimeoutError):
            return answers.next(timeout=0.2)


def _prefill(server: Server, body: bytes) -> int | str:
    """Send a document; return its tokens, or why it is refused. Raises SemBlendError when the server fails."""
    status, content = server.post("/v1/completions", body)
    if status == 200:
        with suppress(ValueError, RecursionError):
            return _Answer.model_validate(json.loads(content)).tokens
    if status in _REFUSED:
        return f"the server refuses it ({said(status, content)})"
    raise SemBlendError(f"{server.url} cannot be used ({said(status, content)}); the next run goes on from here")
