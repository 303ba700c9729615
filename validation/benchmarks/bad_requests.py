"""Bad requests: bodies, headers and bytes that are no HTTP, over raw sockets, for a router and a worker."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from validation.benchmarks.server_process import MODEL, router, worker
from validation.benchmarks.spoiling import Answer, Tried, spoiled_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from validation.benchmarks.server_process import ServerProcess

# What clients are granted for a header and for a body, in seconds, and how long an answer may take.
GRANTED, PATIENCE = 2, 60.0
SENDERS, LONGEST_BODY = 8, 65_536
_KEY = "a key of the benchmark"
_GOOD: dict[str, Any] = {"prompt": "How many lamps are there?", "max_tokens": 2, "temperature": 0}
_WRONG_FIELDS: dict[str, tuple[Any, ...]] = {
    "prompt": (7, 1.5, True, {}, [], "", [""], [-1], [1.5], [1 << 31], ["a", 1], [[1], [2]], [None], [True], [[]]),
    "model": (7, {}, [], "another", ""),
    **dict.fromkeys(("max_tokens", "max_completion_tokens"), (-1, 0, 1.5, "x", [], {}, 1 << 40, float("inf"))),
    "temperature": (-1, "hot", [], {}, float("nan"), float("inf")),
    "top_p": (-0.1, 0, 1.1, "x", [], {}, float("nan")),
    "top_k": (-7, 1.5, "x", [], {}),
    "seed": (1.5, "x", [], {}, 1 << 80),
    "ignore_eos": (7, "x", [], {}),
    "stream": (7, "x", [], {}),
    "stream_options": (7, "x", [], {"include_usage": "x"}),
    "stop": (7, {}, [7], ["x"] * 100, [""], ""),
    "stop_token_ids": (7, "x", {}, ["x"], [1.5]),
    "cache_salt": (7, [], {}, "x" * 100_000),
    "n": (0, 2, -1, "x", []),
    "best_of": (2, "x"),
    "logprobs": (0, 5, True),
    "echo": (True,),
    "suffix": ("x",),
    "logit_bias": ({"1": 5},),
    "presence_penalty": (1, "x"),
    "frequency_penalty": (-1, []),
    "min_p": (0.5,),
    "min_tokens": (2,),
    "lora_request": ({"x": 1},),
    "guided_json": ({},),
    "prompt_logprobs": (1,),
}
# The router has the tenants' salts, and puts them in the place of what a caller says.
_SET_BY_ROUTER = ("cache_salt",)
_NO_JSON = (
    b"",
    b"{",
    b"}",
    b"null",
    b"7",
    b"[]",
    b'"x"',
    b"\xff\xfe{}",
    b"\x00" * 100,
    b"[" * 60_000,
    b'{"a":' * 10_000,
    b'{"prompt": "a", }',
    b"{'prompt': 'a'}",
    b"prompt=a",
    b" " * (LONGEST_BODY + 1),
    b'{"prompt": "' + b"a" * 60_000 + b'"}',
    b'{"prompt": "\\ud800", "max_tokens": -1}',
)
# Requests whose header is whole: each gets an answer. None of them is one that is served.
_REQUESTS = (
    b"GET /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n",
    b"DELETE /v1/models HTTP/1.1\r\nHost: a\r\n\r\n",
    b"PUT /health HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /%00 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET /%ff%fe HTTP/1.1\r\nHost: a\r\n\r\n",
    b"BREW /v1/completions HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET\r\n\r\n",
    b"\r\n \r\n\r\n",
    b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
    b"GET / SPDY\r\n\r\n",
    b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: " + b"y" * 20_000 + b"\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: a\r\nBad header\r\n\r\n",
    b"GET /nothing HTTP/1.1\r\nHost: a\r\nX: \x00\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    b"\x00" * 64 + b"\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: nothing\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nExpect: nothing\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Encoding: br\r\nContent-Length: 2\r\n\r\n{}",
    b'POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 17\r\n\r\n{"messages": [7]}',
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n{",
)
# The router alone asks who is there.
_AUTHORIZATIONS = (b"", b"Bearer", b"Bearer x", b"Bearer \xff", b"Basic YTpi", b"x" * 5_000, b"Bearer " + b"\xc3" * 99)
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


def tries(folder: Path, spoiled: int) -> Iterator[Tried]:
    """Sends every bad request, and `spoiled` ones, to a router and to its worker. Both must serve a good one then."""
    granted = ("--header-seconds", str(GRANTED), "--body-seconds", str(GRANTED), "--max-body-bytes", str(LONGEST_BODY))
    with contextlib.ExitStack() as ending:
        serving = worker("--worker-id", "1", "--max-batch-size", "2", *granted)
        ending.callback(serving.kill)
        front = router(_config(folder, serving.address()), ROUTER_SECRET="a secret of the router")
        ending.callback(front.kill)
        for name, server in (("router", front), ("worker", serving)):
            rng = random.Random(0)
            asked = list(_bad(name)) + [
                (f"spoiled {number}", spoiled_bytes(rng, _request(json.dumps(_GOOD).encode())), False)
                for number in range(spoiled)
            ]
            port = urlsplit(server.address()).port or 0
            with ThreadPoolExecutor(SENDERS) as threads:
                yield from threads.map(partial(_tried, name, port), asked)
            yield _is_well(name, server, port)


def _bad(server: str) -> Iterator[tuple[str, bytes, bool]]:
    """What each is, its bytes, and whether it is bad for certain."""
    for body in _NO_JSON:
        yield f"body {body[:40]!r}", _request(body), True
    for name, values in _WRONG_FIELDS.items():
        for value in () if server == "router" and name in _SET_BY_ROUTER else values:
            # Of two numbers of tokens one counts.
            good = {
                each: other for each, other in _GOOD.items() if name != "max_completion_tokens" or each != "max_tokens"
            }
            yield f"{name} {value!r:.40}", _request(json.dumps(good | {name: value}).encode()), True
    without = {name: value for name, value in _GOOD.items() if name != "prompt"}
    yield "no prompt", _request(json.dumps(without).encode()), True
    yield "too long a prompt", _request(json.dumps(_GOOD | {"prompt": [1] * 20_000}).encode()), True
    for request in _REQUESTS:
        yield f"{request[:60]!r}", request, True
    for value in _AUTHORIZATIONS if server == "router" else ():
        yield f"Authorization {value[:40]!r}", _request(json.dumps(_GOOD).encode(), value), True
    for cut in (1, 10, 30, 60):
        yield f"a header of {cut} bytes", _request(b"{}")[:cut], True


def _request(body: bytes, authorization: bytes = b"Bearer " + _KEY.encode()) -> bytes:
    header = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    return header + b"Authorization: %b\r\nContent-Length: %d\r\n\r\n%b" % (authorization, len(body), body)


def _tried(server: str, port: int, asked: tuple[str, bytes, bool]) -> Tried:
    """A 4xx refuses. What has no whole header is no request yet, and may also be ended without an answer."""
    what, sent, is_bad = asked
    said = _answer(sent, port)
    status = int(found[1]) if (found := _STATUS.match(said)) else 0
    is_request = b"\r\n\r\n" in sent
    answer = Answer.FAULT
    if 400 <= status < 500 or (not is_request and said == b""):
        answer = Answer.REFUSED
    elif not is_bad and 200 <= status < 300:
        answer = Answer.TAKEN
    return Tried(server, what, answer, f"{said[:300]!r} to {sent[:200]!r}")


def _answer(sent: bytes, port: int) -> bytes:
    """What the server says until it says no more; a sentence where it says nothing and stays."""
    said = b""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        try:
            connection.sendall(sent)
            while part := connection.recv(65_536):
                said += part
                if _is_whole(said):
                    break
        except TimeoutError:
            return b"no answer in time " + said
        except OSError:
            return said
    return said


def _is_whole(said: bytes) -> bool:
    header, end, body = said.partition(b"\r\n\r\n")
    length = re.search(rb"(?i)\r\ncontent-length: (\d+)", header)
    return bool(end) and length is not None and len(body) >= int(length[1])


def _is_well(name: str, server: ServerProcess, port: int) -> Tried:
    """The server still serves, and its log tells of no defect. That is no input of its own."""
    said = _answer(_request(json.dumps(_GOOD).encode()), port)
    is_well = said.startswith(b"HTTP/1.1 200") and "Traceback" not in server.log
    return Tried(
        name, "a good request", Answer.TAKEN if is_well else Answer.FAULT, f"{said[:200]!r} {server.log[-600:]}"
    )


def _config(folder: Path, address: str) -> Path:
    digest = hashlib.sha256(_KEY.encode()).hexdigest()
    text = (
        f'port = 0\nmodel = "{MODEL}"\nsecret_env = "ROUTER_SECRET"\nheader_seconds = {GRANTED}\n'
        f"body_seconds = {GRANTED}\nmax_body_bytes = {LONGEST_BODY}\n"
        f'[[replicas]]\nurl = "{address}"\nworker_id = 1\n[[keys]]\nsha256 = "{digest}"\ntenants = ["a"]\n'
    )
    path = folder / "router.toml"
    path.write_text(text)
    return path
