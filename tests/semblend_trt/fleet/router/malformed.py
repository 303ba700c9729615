"""Malformed HTTP requests from a seed, and the answers that a server may give to them."""

import asyncio
import json
import random
from itertools import islice

AT_ONCE = 64
_GOOD = {"prompt": "How many lamps are there?", "max_tokens": 2, "temperature": 0}
_KINDS = (7, 1.5, "x", [], {}, [7], ["x"] * 100, {"x": 1}, -1, 0, 2, 1 << 80, float("inf"), float("nan"))
# Beside the values of other kinds.
_WRONG_FIELDS = {
    "prompt": (True, "", [""], [-1], [1.5], [1 << 31], ["a", 1], [[1], [2]], [None], [True], [[]], [1] * 20_000),
    "cache_salt": ("x" * 100_000,),
    "stream_options": ({"include_usage": "x"},),
    **dict.fromkeys(("model", "max_tokens", "max_completion_tokens", "top_p", "top_k", "ignore_eos", "stream"), ()),
    **dict.fromkeys(("stop", "stop_token_ids", "n", "best_of", "logprobs", "echo", "suffix", "logit_bias"), ()),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "min_p", "min_tokens", "lora_request", "seed"), ()),
}
_NO_JSON = (
    *(b"", b"{", b"}", b"null", b"7", b"[]", b'"x"', b"\xff\xfe{}", b"\x00" * 100, b"[" * 60_000, b'{"a":' * 10_000),
    *(b'{"prompt": "a", }', b"{'prompt': 'a'}", b"prompt=a", b" " * 65_537, b'{"prompt": "' + b"a" * 60_000 + b'"}'),
    b'{"prompt": "\\ud800", "max_tokens": -1}',
)
_LINES = (
    *(b"GET /v1/completions", b"DELETE /v1/models", b"PUT /health", b"BREW /v1/completions", b"GET /nothing"),
    *(b"GET /../../etc/passwd", b"GET /%00", b"GET /%ff%fe", b"GET /" + b"x" * 20_000),
)
_BODIES = (
    *(b"Content-Length: " + length + b"\r\n\r\n" for length in (b"-1", b"x", b"99999999999")),
    b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}",
    b"Transfer-Encoding: nothing\r\n\r\n{}",
    *(b"Expect: " + what + b"\r\nContent-Length: 2\r\n\r\n{}" for what in (b"nothing", b"\xff")),
    *(b"Content-Encoding: " + kind + b"\r\nContent-Length: 2\r\n\r\n{}" for kind in (b"gzip", b"br")),
    b"Content-Length: 99\r\n\r\n{",
)
# Requests with a whole header: each is answered, none is served.
_REQUESTS = (
    *(line + b" HTTP/1.1\r\nHost: a\r\n\r\n" for line in _LINES),
    *(
        b"GET /nothing HTTP/1.1\r\nHost: a\r\n" + bad + b"\r\n\r\n"
        for bad in (b"X: " + b"y" * 20_000, b"Bad", b"X: \x00")
    ),
    *(b"GET\r\n\r\n", b"\r\n \r\n\r\n", b"GET / HTTP/9.9\r\nHost: a\r\n\r\n", b"GET / SPDY\r\n\r\n"),
    *(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"\x00" * 64 + b"\r\n\r\n"),
    *(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\n" + rest for rest in _BODIES),
    b'POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 17\r\n\r\n{"messages": [7]}',
)


def _request(body):
    header = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    return header + b"Authorization: Bearer key of a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


def _spoiled(rng, data):
    """The same with some bytes changed, added, or missing."""
    start = rng.randrange(len(data))
    end = min(len(data), start + rng.choice((1, 1, 2, 8, 64)))
    noise, flipped = rng.randbytes(end - start), bytes([data[start] ^ 1 << rng.randrange(8)])
    part = data[start:end]
    middle = rng.choice((data[:0], noise, noise + part, part * 2, flipped + part[1:]))
    return data[:start] if rng.random() < 0.2 else data[:start] + middle + data[end:]


def malformed(seed):
    """Bad requests, and spoiled good ones, of which some are still good."""
    drawn, good = random.Random(seed), _request(json.dumps(_GOOD).encode())
    fields = [{name: value} for name, values in _WRONG_FIELDS.items() for value in (*values, *_KINDS)]
    bad_fields = [_request(json.dumps(_GOOD | each).encode()) for each in fields]
    bodies = [*map(_request, _NO_JSON), *(_request(b"{}")[:cut] for cut in (1, 10, 30, 60))]
    while True:
        is_bad = drawn.random() < 0.5
        yield drawn.choice(drawn.choice((bad_fields, bodies, _REQUESTS))) if is_bad else _spoiled(drawn, good)


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
    found = []
    requests = malformed(seed)
    while batch := list(islice(requests, min(AT_ONCE, count))):
        count -= len(batch)
        answers = await asyncio.gather(*(answered(address, request) for request in batch))
        found += [error_of(answer)[0] for answer in answers if answer]
    return found
