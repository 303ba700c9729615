"""The judge gets one comparison as JSON; what goes wrong is reported and costs only that score."""

import contextlib
import os
import select
import sys

import pytest

from semblend_trt.errors import ConfigurationError
from validation.cases import Case, Expectation
from validation.judge import MAX_OUTPUT_BYTES, Judge, judged

CASE = Case("case", "reordered", "2k", (), "prompt", "42", True, Expectation.REUSE, "case")
TOO_MUCH = f"printed more than {MAX_OUTPUT_BYTES} bytes"
SLOW = (None, "no answer within 1 s")
COMPARISON = {"id": "a", "arm": "position_fix", "prompt": "p", "reference": None, "cold": "42", "answer": "42"}


def python_judge(code, **changes):
    return Judge((sys.executable, "-c", code), **changes)


def test_the_score_is_what_the_command_prints():
    code = "import json, sys; c = json.load(sys.stdin); print(1.0 if c['answer'] == c['cold'] else 0.25)"
    assert python_judge(code).score(COMPARISON) == (1.0, None)
    assert python_judge(code).score(COMPARISON | {"answer": "43"}) == (0.25, None)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("print('good')", "'good' instead of a number"),
        ("print(1.5)", "not between 0 and 1"),
        ("print('nan')", "not between 0 and 1"),
        ("import sys; sys.exit('no key')", "exit status 1: no key"),
        ("pass", "'' instead of a number"),
        (r"import sys; sys.stdout.buffer.write(b'\xff')", "'\N{REPLACEMENT CHARACTER}' instead of a number"),
        ("while True: print('x' * 1000)", TOO_MUCH),
        ("import sys\nwhile True: print('x' * 1000, file=sys.stderr)", TOO_MUCH),
    ],
)
def test_a_failure_has_a_reason(code, reason):
    score, problem = python_judge(code).score(COMPARISON)
    assert score is None
    assert reason in str(problem)


def test_what_a_judge_has_started_ends_with_it(tmp_path):
    """Its child holds its output open, so that waiting for the output's end would be waiting for the child."""
    pid = tmp_path / "pid"
    code = (
        "import pathlib, subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'input()'], "
        f"stdin=subprocess.PIPE); pathlib.Path({str(pid)!r}).write_text(str(child.pid)); child.wait()"
    )
    assert python_judge(code, timeout_seconds=3.0).score(COMPARISON) == (None, "no answer within 3 s")
    with contextlib.suppress(ProcessLookupError):  # it has ended already
        child = os.pidfd_open(int(pid.read_text()))
        assert select.select([child], [], [], 30.0)[0] == [child]  # readable once the process has ended
        os.close(child)


def test_a_judge_that_always_hangs_is_not_asked_for_ever(make_sample, monkeypatch):
    told = iter([(1.0, None), (None, "no answer within 1 s"), (None, "exit status 1: "), *3 * [SLOW]])
    monkeypatch.setattr(Judge, "score", lambda judge, comparison: next(told))
    samples = [make_sample(arm="cold"), *8 * [make_sample()]]
    problems = [sample.judge_error for sample in judged(samples, [CASE], Judge(("judge",)))][2:]
    assert problems[:5] == [SLOW[1], "exit status 1: ", *3 * [SLOW[1]]]
    assert problems[5:] == 2 * ["not asked: it took too long 3 times in a row"]


@pytest.mark.parametrize("line", ["", "  ", "'unclosed", "no-such-program-anywhere --flag"])
def test_a_command_that_cannot_be_started_is_refused(line):
    with pytest.raises(ConfigurationError, match="--judge-command"):
        Judge.parse(line)


def test_only_reusing_arms_are_judged(make_sample):
    samples = [make_sample(arm="cold"), make_sample(), make_sample(arm="exact_prefix")]
    judge = python_judge("import json, sys; print(json.load(sys.stdin)['prompt'] == 'prompt' and 0.5)")
    assert [sample.judge_score for sample in judged(samples, [CASE], judge)] == [None, 0.5, None]
