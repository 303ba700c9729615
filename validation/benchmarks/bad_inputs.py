"""Bad inputs that were refused with a sentence or a status 4xx, at every door: none crashed, hung or ended in 500.

`python -m validation.benchmarks.bad_inputs` gives bad command lines and settings, requests to a router and a worker,
donor events, and files. Some are written down here, some are spoiled good ones (seeded); what is still good after it
was spoiled does not count. Commands end with status 2 and one sentence, requests are answered with 4xx, files are
refused with a sentence, and bad events and donors' files are counted and change nothing. Each has a time to end in.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from engine_wrapper.embedded import server
from kernels.results import Count, Results, run_counted
from semblend_trt.cli.main import main as semblend_trt_main
from semblend_trt.config import settings_table
from validation import cli
from validation.benchmarks.bad_data import Answer, TooLongError, Tried, event_tries, file_tries, spoiled_bytes, within
from validation.benchmarks.server_process import fleet, key_of, worker
from validation.engines import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from validation.benchmarks.server_process import ServerProcess

logger = logging.getLogger(__name__)

PATIENCE, PROCESS_PATIENCE = 60.0, 120.0
# Exit statuses of a refusal; doctor ends with 1 for any problem.
REFUSED, DOCTOR_REFUSED = 2, 1
MOST_SAID = 20_000
PROGRAMS: dict[str, tuple[tuple[str, ...], Callable[[Sequence[str]], int]]] = {
    "semblend-trt": (("-c", "import sys; from semblend_trt.cli.main import main; sys.exit(main())"), semblend_trt_main),
    "validation": (("-m", "validation"), cli.main),
    "server": (("-m", "engine_wrapper.embedded.server"), server.main),
}
_NO_NUMBER = ("", "x", "nan", "-7", "1e99", "0x10", "1,5", "--", "99999999999999999999999", "\x1b[31m")
_NO_COUNT = (*_NO_NUMBER, "0", "1.5", "inf")
_NO_FILE = ("/proc/nonexistent/x", "/dev/null/x", "/proc/self/mem/x", "n" * 300)
# A program, the words before an option, the option, and values that it must not take.
_OPTIONS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    *(
        ("validation", "", option, _NO_COUNT)
        for option in ("--max-tokens", "--min-match-length", "--repeat", "--boundary")
    ),
    *(("validation", "", option, _NO_FILE) for option in ("--prompts", "--profile", "--output", "--audit-path")),
    ("validation", "", "--seed", _NO_NUMBER),
    ("validation", "", "--min-speedup", ("", "x", "1,5", "--", "0x10")),
    ("validation", "", "--arms", ("", "x", "cold,x", "boundary_x", "epic_-1", "boundary_99")),
    ("validation", "", "--policy", ("", "x", "cold_x")),
    ("validation", "", "--device", ("x", "cuda:99", "cpu:x")),
    ("validation", "", "--dtype", ("", "int8")),
    ("validation", "", "--model", ("", " ", "/proc/nonexistent", "/dev/null")),
    ("validation", "", "--judge-command", ("", "/proc/nonexistent/judge", "'")),
    ("validation", "", "--machine", ("", "a/b", "../x", "\n")),
    *(
        ("validation", command, option, _NO_COUNT)
        for command in ("quality", "calibrate")
        for option in ("--groups", "--questions", "--tokens", "--batch", "--max-tokens")
    ),
    ("validation", "quality", "--families", ("", "x", "header_trap,x")),
    ("validation", "quality", "--profile", _NO_FILE),
    ("validation", "quality", "--form", ("", "x")),
    ("validation", "calibrate", "--max-tries", ("", "x", "-7", "1e99")),
    ("validation", "calibrate", "--prompts", _NO_FILE),
    ("validation", "confirm", "--profile", _NO_FILE),
    ("validation", "replay", "--trace", _NO_FILE),
    ("validation", "replay", "--workload", ("", "x")),
    ("validation", "replay --workload agent", "--requests", _NO_COUNT),
    ("validation", "replay --workload agent", "--capacity-tokens", _NO_COUNT),
    ("validation", "replay --workload agent", "--policies", ("", "x")),
    ("validation", "replay --workload agent", "--latency-profile", _NO_FILE),
    ("validation", "scoreboard", "--results", _NO_FILE),
    ("validation", "scoreboard --check", "--readme", _NO_FILE),
    ("semblend-trt", "router", "--config", (*_NO_FILE, "/", "/dev/null")),
    *(("semblend-trt", f"events {action}", "--seconds", _NO_COUNT[:-2]) for action in ("tail", "check", "stats")),
    ("semblend-trt", "events tail", "--limit", _NO_COUNT),
    *(
        ("semblend-trt", f"events {action} --seconds 1", "--url", ("nats://127.0.0.1:1", "x://", "nats://[", " "))
        for action in ("tail", "check", "stats")
    ),
    ("semblend-trt", "events tail --seconds 1", "--subject", ("", "a b", "a..b", "x" * 300)),
    ("semblend-trt", "estimate pyproject.toml", "--kv-bytes-a-token", _NO_COUNT),
    *(("semblend-trt", "estimate pyproject.toml", option, _NO_FILE) for option in ("--json", "--profile", "--ttft")),
    ("semblend-trt", "doctor", "--engine-options", (*_NO_FILE, "/", "/dev/null")),
    ("semblend-trt", "doctor", "--kv-dtype", ("", "int3")),
    ("semblend-trt", "doctor", "--model", ("", "/proc/nonexistent", "/dev/null", "x" * 5_000, "\ud800")),
    *(
        ("server", "--model /proc/nonexistent", option, _NO_NUMBER)
        for option in ("--port", "--header-seconds", "--body-seconds", "--max-connections", "--max-body-bytes")
    ),
    ("server", "--model /proc/nonexistent", "--max-batch-size", ("", "x", "1.5")),
    ("server", "", "--model", ("", "/proc/nonexistent", "/dev/null", "\x00")),
)
_WORDS = (
    ("semblend-trt", ""),
    ("semblend-trt", "nope"),
    ("semblend-trt", "config --x"),
    ("semblend-trt", "config --json --markdown"),
    ("semblend-trt", "events"),
    ("semblend-trt", "events nope"),
    ("semblend-trt", "router"),
    ("validation", "nope"),
    ("validation", "--unknown 1"),
    ("validation", "replay"),
    ("validation", "replay --trace a --workload b"),
    ("validation", "confirm"),
    ("validation", "scoreboard --check --write"),
    ("server", ""),
)
# An empty value counts as unset.
_WRONG_SETTINGS = ("x", "nan", "-7e99", "1e99", "\x1b[31m", "9" * 400, "truely", "[]")
# Seconds in which a client must have sent a header, and a body.
GRANTED = 2
SENDERS, LONGEST_BODY = 8, 65_536
_TENANT = "a"
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
# The router sets these itself, from the tenant.
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
# Only the router asks for a key.
_AUTHORIZATIONS = (b"", b"Bearer", b"Bearer x", b"Bearer \xff", b"Basic YTpi", b"x" * 5_000, b"Bearer " + b"\xc3" * 99)
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")
SPOILED, PROCESSES, LEAST = 100, 12, 1_000


def command_tries(folder: Path, processes: int) -> Iterator[Tried]:
    """Runs every command line in this process, and `processes` random ones in processes of their own, in `folder`."""
    asked = [(program, words.split()) for program, words in _WORDS]
    asked += [(program, [*words.split(), option, each]) for program, words, option, bad in _OPTIONS for each in bad]
    before = Path.cwd()
    os.chdir(folder)
    try:
        for program, words in asked:
            yield _in_this_process(program, words)
        for setting in settings_table():
            if setting.allowed != "a path" and not setting.allowed.startswith("a text"):
                for value in _WRONG_SETTINGS:
                    with environment({setting.variables[0]: value}):
                        yield _in_this_process("semblend-trt", ["config"], f"{setting.variables[0]}={value[:40]!r}")
    finally:
        os.chdir(before)
    drawn = random.Random(0).sample([each for each in asked if "\x00" not in "".join(each[1])], processes)
    with ThreadPoolExecutor(2) as threads:
        yield from threads.map(partial(_in_a_process, folder), drawn)


def _in_this_process(program: str, words: Sequence[str], what: str = "") -> Tried:
    _, run = PROGRAMS[program]
    shown = what or f"{program} {' '.join(words)!r:.160}"
    said = io.StringIO()
    try:
        with within(PATIENCE), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status: object = run(list(words))
    except SystemExit as end:
        status = end.code
    except (Exception, TooLongError) as error:
        return Tried("command line", shown, Answer.FAULT, repr(error))
    return _judged_command(shown, words, status, said.getvalue())


def _in_a_process(folder: Path, asked: tuple[str, Sequence[str]]) -> Tried:
    program, words = asked
    root = str(Path(__file__).resolve().parents[2])
    shown = f"process {program} {' '.join(words)!r:.160}"
    try:
        ended = subprocess.run(
            [
                sys.executable,
                *PROGRAMS[program][0],
                *(os.fsencode(word.encode("utf-8", "surrogatepass")) for word in words),
            ],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": root},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROCESS_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        return Tried("command line", shown, Answer.FAULT, str(error))
    return _judged_command(shown, words, ended.returncode, (ended.stdout + ended.stderr).decode("utf-8", "replace"))


def _judged_command(shown: str, words: Sequence[str], status: object, said: str) -> Tried:
    refusals = {REFUSED, DOCTOR_REFUSED} if words and words[0] == "doctor" else {REFUSED}
    is_sentence = said.strip() and "Traceback" not in said and "\x1b" not in said and len(said) <= MOST_SAID
    if status in refusals and is_sentence:
        return Tried("command line", shown, Answer.REFUSED)
    return Tried("command line", shown, Answer.FAULT, f"status {status}: {said.strip()[-400:]!r}")


def request_tries(folder: Path, spoiled: int) -> Iterator[Tried]:
    """Sends every bad request and `spoiled` spoiled ones to a router and to its worker, and then a good one."""
    granted = ("--header-seconds", str(GRANTED), "--body-seconds", str(GRANTED), "--max-body-bytes", str(LONGEST_BODY))
    serving = worker("--worker-id", "1", "--max-batch-size", "2", *granted)
    limits: dict[str, Any] = {"header_seconds": GRANTED, "body_seconds": GRANTED, "max_body_bytes": LONGEST_BODY}
    with fleet(folder, [serving], [_TENANT], **limits) as front:
        for name, server in (("router", front), ("worker", serving)):
            rng, good = random.Random(0), good_request()
            asked = list(bad_requests(name))
            asked += [(f"spoiled {number}", spoiled_bytes(rng, good), False) for number in range(spoiled)]
            port = urlsplit(server.address()).port or 0
            with ThreadPoolExecutor(SENDERS) as threads:
                yield from threads.map(partial(_tried, name, port), asked)
            yield _is_well(name, server, port)


def bad_requests(server: str) -> Iterator[tuple[str, bytes, bool]]:
    """A name for each request, its bytes, and whether it is certainly bad."""
    for body in _NO_JSON:
        yield f"body {body[:40]!r}", _request(body), True
    for name, values in _WRONG_FIELDS.items():
        for value in () if server == "router" and name in _SET_BY_ROUTER else values:
            # Only one of the two names of this number may be given.
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


def good_request() -> bytes:
    """A request that is served."""
    return _request(json.dumps(_GOOD).encode())


def _request(body: bytes, authorization: bytes = b"Bearer " + key_of(_TENANT).encode()) -> bytes:
    header = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    return header + b"Authorization: %b\r\nContent-Length: %d\r\n\r\n%b" % (authorization, len(body), body)


def _tried(server: str, port: int, asked: tuple[str, bytes, bool]) -> Tried:
    """A 4xx is a refusal. Without a whole header, the connection may also be closed without an answer."""
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
    """All bytes that the server sends; a sentence in front of them where no whole answer came in time."""
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
    """Whether the server still serves, without a traceback in its log. This does not count as an input."""
    said = _answer(good_request(), port)
    is_well = said.startswith(b"HTTP/1.1 200") and "Traceback" not in server.log
    return Tried(
        name, "a good request", Answer.TAKEN if is_well else Answer.FAULT, f"{said[:200]!r} {server.log[-600:]}"
    )


def tries(folder: Path, spoiled: int, processes: int) -> Iterator[Tried]:
    """Every bad input, with `spoiled` spoiled ones of each kind."""
    places = [folder / name for name in ("requests", "files", "commands")]
    for each in places:
        each.mkdir()
    yield from request_tries(places[0], spoiled)
    yield from event_tries(2 * spoiled, spoiled)
    yield from file_tries(places[1], spoiled)
    yield from command_tries(places[2], processes)


def run(spoiled: int, processes: int, rows: Results) -> None:
    """Gives them all. A fault is logged at once, and the row does not hold."""
    refused: Counter[str] = Counter()
    taken = faults = 0
    with tempfile.TemporaryDirectory(prefix="bad-inputs-") as folder:
        for each in tries(Path(folder), spoiled, processes):
            refused[each.door] += each.answer is Answer.REFUSED
            taken += each.answer is Answer.TAKEN
            faults += each.answer is Answer.FAULT
            if each.answer is Answer.FAULT:
                logger.warning("%s, %s: %s", each.door, each.what, each.told)
    by_door = ", ".join(f"{count:,} {door}" for door, count in refused.items())
    told = f"{refused.total() + faults:,} bad inputs: {by_door}; {faults} crashed, hung, ended in 500 or were taken"
    goal = max(LEAST, refused.total() + faults)
    rows.add("bad_inputs_refused", refused.total(), "inputs", told, goal, "higher")
    logger.info("%d spoiled inputs were still good ones", taken)


_COUNTS = (
    Count("spoiled", SPOILED, "of each kind"),
    Count("processes", PROCESSES, "command lines that get a process of their own", 0),
)
main = partial(run_counted, "bad_inputs", __doc__, _COUNTS, run)


if __name__ == "__main__":
    main()
