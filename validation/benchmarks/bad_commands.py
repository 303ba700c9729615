"""Bad command lines and settings: of semblend-trt, of python -m validation, and of the embedded engine's server."""

from __future__ import annotations

import contextlib
import io
import os
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from engine_wrapper.embedded import server
from semblend_trt.cli.main import main as semblend_trt_main
from semblend_trt.config import settings_table
from validation import cli
from validation.benchmarks.spoiling import Answer, TooLongError, Tried, within
from validation.engines import environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

PATIENCE, PROCESS_PATIENCE = 60.0, 120.0
# A status that says that an input is refused; doctor tells of it as of any problem, with 1.
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
# An empty one is as good as none.
_WRONG_SETTINGS = ("x", "nan", "-7e99", "1e99", "\x1b[31m", "9" * 400, "truely", "[]")


def tries(folder: Path, processes: int) -> Iterator[Tried]:
    """Gives every command line in this process, and `processes` of them, drawn by lot, in processes of their own.

    `folder` is the working directory meanwhile.
    """
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
    return _judged(shown, words, status, said.getvalue())


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
    return _judged(shown, words, ended.returncode, (ended.stdout + ended.stderr).decode("utf-8", "replace"))


def _judged(shown: str, words: Sequence[str], status: object, said: str) -> Tried:
    refusals = {REFUSED, DOCTOR_REFUSED} if words and words[0] == "doctor" else {REFUSED}
    is_sentence = said.strip() and "Traceback" not in said and "\x1b" not in said and len(said) <= MOST_SAID
    if status in refusals and is_sentence:
        return Tried("command line", shown, Answer.REFUSED)
    return Tried("command line", shown, Answer.FAULT, f"status {status}: {said.strip()[-400:]!r}")
