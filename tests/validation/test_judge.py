"""The judge gets one comparison as JSON; whatever goes wrong is reported and costs only that score."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest

from semblend_trt.errors import ConfigurationError
from validation.cases import Case, Expectation
from validation.judge import Judge, judged

if TYPE_CHECKING:
    from collections.abc import Callable

    from validation.samples import Sample

COMPARISON = {"id": "a", "arm": "position_fix", "prompt": "p", "reference": None, "cold": "42", "answer": "42"}


def python_judge(code: str, **changes: float) -> Judge:
    return Judge((sys.executable, "-c", code), **changes)


def test_the_score_is_what_the_command_prints() -> None:
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
    ],
)
def test_a_failure_has_a_reason(code: str, reason: str) -> None:
    score, problem = python_judge(code).score(COMPARISON)
    assert score is None
    assert problem is not None
    assert reason in problem


def test_a_judge_that_hangs_is_given_up() -> None:
    assert python_judge("input(); input()", timeout_seconds=0.2).score(COMPARISON)[0] is None


@pytest.mark.parametrize("line", ["", "  ", "'unclosed", "no-such-program-anywhere --flag"])
def test_a_command_that_cannot_be_started_is_refused(line: str) -> None:
    with pytest.raises(ConfigurationError, match="--judge-command"):
        Judge.parse(line)


def test_only_reusing_arms_are_judged(make_sample: Callable[..., Sample]) -> None:
    case = Case("case", "reordered", "2k", (), "prompt", "42", True, Expectation.REUSE, "case")
    samples = [make_sample(arm="cold"), make_sample(), make_sample(arm="exact_prefix")]
    judge = python_judge("import json, sys; print(json.load(sys.stdin)['prompt'] == 'prompt' and 0.5)")
    assert [sample.judge_score for sample in judged(samples, [case], judge)] == [None, 0.5, None]
