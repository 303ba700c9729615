"""Scores of answers by an external judge."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, replace

from semblend_trt.errors import ConfigurationError
from validation.arms import COLD, is_reusing
from validation.cases import Case
from validation.samples import Sample

TIMEOUT_SECONDS = 120.0
MAX_OUTPUT_BYTES = 1 << 16
# A judge that times out this often in a row is not asked for the remaining answers.
MAX_TIMEOUTS = 3
_SLOW = "no answer within"


@dataclass(frozen=True, slots=True)
class Judge:
    """Run `command` for each comparison, a JSON object on its stdin. Its child processes end with it.
    It prints one number from 0 (worse than cold) to 1 (as good), within `timeout_seconds` and MAX_OUTPUT_BYTES."""

    command: tuple[str, ...]
    timeout_seconds: float = TIMEOUT_SECONDS

    @classmethod
    def parse(cls, line: str) -> Judge:
        """Split a command line as a shell would. Raises ConfigurationError if it cannot start a program."""
        try:
            command = tuple(shlex.split(line))
        except ValueError as error:
            raise ConfigurationError(f"--judge-command {line!r} cannot be split: {error}.") from error
        if not command or shutil.which(command[0]) is None:
            raise ConfigurationError(f"--judge-command {line!r} names no program that can be run.")
        return cls(command)

    def score(self, comparison: dict[str, str | None]) -> tuple[float | None, str | None]:
        """Return the score and None, or None and the reason."""
        try:
            status, printed, errors = self._run(json.dumps(comparison).encode())
        except ValueError as error:  # it printed too much
            return None, str(error)
        except (subprocess.TimeoutExpired, futures.TimeoutError):
            return None, f"{_SLOW} {self.timeout_seconds:g} s"
        except OSError as error:
            return None, f"cannot be started: {error.strerror or error}"
        if status:
            return None, f"exit status {status}: {errors.strip()[-200:]}"
        try:
            score = float(printed.strip())
        except ValueError:
            return None, f"printed {printed.strip()[:80]!r} instead of a number"
        if not 0.0 <= score <= 1.0:
            return None, f"printed {score}, which is not between 0 and 1"
        return score, None

    def _run(self, given: bytes) -> tuple[int, str, str]:
        """Return exit status, output and errors. Raises OSError, ValueError for too much output, and a timeout."""
        deadline = time.monotonic() + self.timeout_seconds
        with tempfile.TemporaryFile() as stdin:
            stdin.write(given)
            stdin.seek(0)
            process = subprocess.Popen(
                self.command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        with process, futures.ThreadPoolExecutor(2) as readers:
            try:
                pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
                reads = [readers.submit(pipe.read, MAX_OUTPUT_BYTES + 1) for pipe in pipes]
                for read in futures.as_completed(reads, max(0.0, deadline - time.monotonic())):
                    if len(read.result()) > MAX_OUTPUT_BYTES:
                        raise ValueError(f"printed more than {MAX_OUTPUT_BYTES} bytes")
                printed, errors = (read.result().decode("utf-8", "replace") for read in reads)
                return process.wait(max(0.0, deadline - time.monotonic())), printed, errors
            finally:
                # The pipes, which its children hold open too, end with them.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


def judged(
    samples: Sequence[Sample], cases: Sequence[Case], judge: Judge, on_step: Callable[[str], None] = lambda _: None
) -> list[Sample]:
    """Return the samples; those of reusing arms with the judge's score, or the reason for its absence."""
    prompts = {case.id: case.prompt for case in cases}
    cold = {(sample.case_id, sample.repeat): sample.answer for sample in samples if sample.arm == COLD}
    done, timeouts = [], 0
    for sample in samples:
        if not is_reusing(sample.arm):
            done.append(sample)
            continue
        score: float | None = None
        problem: str | None = f"not asked: it took too long {MAX_TIMEOUTS} times in a row"
        if timeouts < MAX_TIMEOUTS:
            given = {"prompt": prompts[sample.case_id], "reference": sample.reference}
            answers = {"cold": cold[sample.case_id, sample.repeat], "answer": sample.answer}
            score, problem = judge.score({"id": sample.case_id, "arm": sample.arm, **given, **answers})
            timeouts = timeouts + 1 if problem is not None and problem.startswith(_SLOW) else 0
        done.append(replace(sample, judge_score=score, judge_error=problem))
        on_step(sample.case_id)
    return done
