"""An outside judge: a command that reads one comparison as JSON and prints a score."""

from __future__ import annotations

import json
import math
import shlex
import shutil
import subprocess
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation.arms import COLD, is_reusing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from validation.cases import Case
    from validation.samples import Sample

TIMEOUT_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Judge:
    """Runs `command` once a comparison with `{"id", "arm", "prompt", "reference", "cold", "answer"}` on its stdin.

    It answers with a number of 0 (worse than cold) to 1 (as good) as the only thing on its stdout.
    """

    command: tuple[str, ...]
    timeout_seconds: float = TIMEOUT_SECONDS

    @classmethod
    def parse(cls, line: str) -> Judge:
        """Splits a command line as a shell would; raises ConfigurationError when nothing can be started by it."""
        try:
            command = tuple(shlex.split(line))
        except ValueError as error:
            raise ConfigurationError(f"--judge-command {line!r} cannot be split: {error}.") from error
        if not command or shutil.which(command[0]) is None:
            raise ConfigurationError(f"--judge-command {line!r} names no program that can be run.")
        return cls(command)

    def score(self, comparison: dict[str, str | None]) -> tuple[float | None, str | None]:
        """The score and None, or None and why there is none."""
        try:
            done = subprocess.run(
                self.command,
                input=json.dumps(comparison),
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                timeout=self.timeout_seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return None, f"no answer within {self.timeout_seconds:g} s"
        except OSError as error:
            return None, f"cannot be started: {error.strerror or error}"
        if done.returncode:
            return None, f"exit status {done.returncode}: {done.stderr.strip()[-200:]}"
        try:
            score = float(done.stdout.strip())
        except ValueError:
            return None, f"printed {done.stdout.strip()[:80]!r} instead of a number"
        if not (math.isfinite(score) and 0.0 <= score <= 1.0):
            return None, f"printed {score}, which is not between 0 and 1"
        return score, None


def judged(
    samples: Sequence[Sample], cases: Sequence[Case], judge: Judge, on_step: Callable[[str], None] = lambda _: None
) -> list[Sample]:
    """The samples, those of the reusing arms with the judge's score or the reason why there is none."""
    prompts = {case.id: case.prompt for case in cases}
    cold = {(sample.case_id, sample.repeat): sample.answer for sample in samples if sample.arm == COLD}
    scored = []
    for sample in samples:
        if is_reusing(sample.arm):
            score, problem = judge.score(
                {
                    "id": sample.case_id,
                    "arm": sample.arm,
                    "prompt": prompts[sample.case_id],
                    "reference": sample.reference,
                    "cold": cold[sample.case_id, sample.repeat],
                    "answer": sample.answer,
                }
            )
            scored.append(replace(sample, judge_score=score, judge_error=problem))
            on_step(sample.case_id)
        else:
            scored.append(sample)
    return scored
