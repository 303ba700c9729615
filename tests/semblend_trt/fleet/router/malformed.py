"""Malformed HTTP requests from a seed, and the answers that a server may give to them."""

from __future__ import annotations

import asyncio
import json
import random
from itertools import islice
from typing import Any

AT_ONCE = 64
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
_LONGEST_BODY = 65_536
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
    b" " * (_LONGEST_BODY + 1),
    b'{"prompt": "' + b"a" * 60_000 + b'"}',
    b'{"prompt": "\\ud800", "max_tokens": -1}',
)
# Requests with a whole header: each is answered, none is served.
_REQUESTS = (
    *(
        line + b" HTTP/1.1\r\nHost: a\r\n\r\n"
        for line in (
            *(b"GET /v1/completions", b"DELETE /v1/models", b"PUT /health", b"BREW /v1/completions", b"GET /nothing"),
            *(b"GET /../../etc/passwd", b"GET /%00", b"GET /%ff%fe", b"GET /" + b"x" * 20_000),
        )
    ),
    *(
        b"GET /nothing HTTP/1.1\r\nHost: a\r\n" + header + b"\r\n\r\n"
        for header in (b"X: " + b"y" * 20_000, b"Bad header", b"X: \x00")
    ),
    *(b"GET\r\n\r\n", b"\r\n \r\n\r\n", b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", b"GET / SPDY\r\n\r\n"),
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"\x00" * 64 + b"\r\n\r\n"),
    *(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + rest
        for rest in (
            *(b"Content-Length: " + length + b"\r\n\r\n" for length in (b"-1", b"x", b"99999999999")),
            b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
            b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
            b"Transfer-Encoding: nothing\r\n\r\n{}",
            *(b"Expect: " + what + b"\r\nContent-Length: 2\r\n\r\n{}" for what in (b"nothing", b"\xff")),
            *(b"Content-Encoding: " + kind + b"\r\nContent-Length: 2\r\n\r\n{}" for kind in (b"gzip", b"br")),
            b"Content-Length: 99\r\n\r\n{",
        )
    ),
    b'POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 17\r\n\r\n{"messages": [7]}',
)


def bad_requests():
    """Requests of which no server takes one."""
    for body in _NO_JSON:
        yield _request(body)
    for name, values in _WRONG_FIELDS.items():
        # Only one of the two names of this number may be given.
        good = {each: other for each, other in _GOOD.items() if name != "max_completion_tokens" or each != "max_tokens"}
        for value in values:
            yield _request(json.dumps(good | {name: value}).encode())
    yield _request(json.dumps({name: value for name, value in _GOOD.items() if name != "prompt"}).encode())
    yield _request(json.dumps(_GOOD | {"prompt": [1] * 20_000}).encode())
    yield from _REQUESTS
    for cut in (1, 10, 30, 60):
        yield _request(b"{}")[:cut]


def good_request():
    """A request that is served."""
    return _request(json.dumps(_GOOD).encode())


def _request(body):
    header = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    return header + b"Authorization: Bearer key of a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def spoiled_bytes(rng, data):
    """The same with some bytes changed, added, or missing."""
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 1, 2, 8, 64)))
    noise = rng.randbytes(end - start)
    return rng.choice(
        (
            data[:start],
            data[:start] + data[end:],
            data[:start] + noise + data[end:],
            data[:start] + noise + data[start:],
            data[:end] + data[start:],
            data[:start] + bytes([data[start] ^ 1 << rng.randrange(8)]) + data[start + 1 :],
        )
    )


def malformed(seed):
    """Bad requests, and spoiled good ones, of which some are still good."""
    drawn, bad = random.Random(seed), list(bad_requests())
    while True:
        yield drawn.choice(bad) if drawn.random() < 0.5 else spoiled_bytes(drawn, good_request())


async def answered(address, request):
    """The server's whole answer to these bytes."""
    reader, writer = await asyncio.open_connection(*address.removeprefix("http://").split(":"))
    try:
        writer.write(request)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def error_of(answer):
    """An answer's status and the code of its error object, if it is one."""
    head, _, body = answer.partition(b"\r\n\r\n")
    if head == b"HTTP/1.1 100 Continue":
        return error_of(body)
    status = int(head.split(b" ")[1])
    # One request may be two to a server; the first answer counts.
    return status, json.JSONDecoder().raw_decode(body.decode())[0]["error"].get("code") if status >= 400 else None


async def statuses(address, seed, count):
    """The statuses of the answers to `count` requests. An incomplete request may get none."""
    found: list[int] = []
    requests = malformed(seed)
    while batch := list(islice(requests, min(AT_ONCE, count))):
        count -= len(batch)
        answers = await asyncio.gather(*(answered(address, request) for request in batch))
        found += [error_of(answer)[0] for answer in answers if answer]
    return found
