"""The faults: how each is injected, and the name under which the product counts it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

from semblend_trt.connector import library
from semblend_trt.discovery.deadline import Deadline
from semblend_trt.donors.disk import FOLDER
from semblend_trt.donors.file_size import FileSize
from validation.benchmarks.fault_bench import FaultBench, Prompts, counted, prompts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine_wrapper.embedded.llm import LLM

STALL_SECONDS = 1.0
# Nothing listens there: the port is reserved.
_NO_SERVER = "nats://127.0.0.1:1"
_MOST_REQUESTS_BEFORE_A_CONNECTION_FAILS = 200


@dataclass(slots=True)
class Injection:
    """One fault and what came of it. `reused_tokens` tell whether a donor was read behind the fault."""

    name: str
    wrong_tokens: int = 0
    unfinished: int = 0
    reused_tokens: int = 0
    is_counted: bool = False

    @property
    def survived(self) -> bool:
        """Every request finished with a cold run's tokens, and the fault was counted under its name."""
        return not self.wrong_tokens and not self.unfinished and self.is_counted


class Trial:
    """The requests of one injection."""

    def __init__(self, bench: FaultBench, injection: Injection, seed: int) -> None:
        self.bench, self.injection, self.seed = bench, injection, seed
        self.prompts: Prompts = prompts_of(seed)

    def ask(self, llm: LLM, *prompts: str) -> None:
        """Serves prompts and compares what comes out."""
        for prompt in prompts:
            output = self.bench.serve(llm, prompt)
            self.injection.unfinished += output.outputs[0].finish_reason not in ("stop", "length")
            self.injection.wrong_tokens += self.bench.wrong_tokens(prompt, output)
            self.injection.reused_tokens += output.reused_tokens

    @contextmanager
    def counts(self, metric: str, **labels: str) -> Iterator[None]:
        """Notes whether the product counts the fault while the block runs."""
        before = counted(metric, **labels)
        yield
        self.injection.is_counted = counted(metric, **labels) > before


def provider_raises(trial: Trial) -> None:
    """The lookup raises."""
    with trial.bench.engine() as llm:
        trial.ask(llm, trial.prompts.donor)
        broken = mock.patch.object(llm.connector_scheduler.library, "plan", side_effect=RuntimeError("injected"))
        with trial.counts("refusals", reason="internal_error"), broken:
            trial.ask(llm, trial.prompts.others[0])
        trial.ask(llm, trial.prompts.others[1])


def lookup_stalls(trial: Trial) -> None:
    """The lookup works for a second; its clock is moved on instead of waiting."""
    with trial.bench.engine() as llm:
        trial.ask(llm, trial.prompts.donor)
        readings = iter([0.0])
        stalled = partial(Deadline, clock=lambda: next(readings, STALL_SECONDS))
        with trial.counts("refusals", reason="lookup_timeout"), mock.patch.object(library, "Deadline", stalled):
            trial.ask(llm, trial.prompts.others[0])
        trial.ask(llm, trial.prompts.others[1])


def disk_full(trial: Trial) -> None:
    """The disk has no room for a donor's file."""

    def full(*_arguments: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with _folder() as folder, trial.bench.engine(folder) as llm:
        with (
            trial.counts("tier_events", event="write_failed"),
            mock.patch.object(os, "posix_fallocate", full),
        ):
            trial.ask(llm, trial.prompts.donor)
            trial.bench.hear(llm)
        trial.ask(llm, *trial.prompts.others)


def corrupt_kv(trial: Trial) -> None:
    """KV in a donor's file has changed since it was written."""

    def damage(data: bytearray, kv: slice) -> None:
        data[kv] = bytes(byte ^ 0x40 for byte in data[kv])

    with trial.counts("tier_events", event="fetch_failed"):
        _serve_from_damaged_file(trial, damage)


def corrupt_text(trial: Trial) -> None:
    """A token in a donor's file has changed: another text would be served from its KV."""

    def damage(data: bytearray, kv: slice) -> None:
        data[kv.stop + 4 * 10] ^= 1

    with trial.counts("tier_events", event="file_refused"):
        _serve_from_damaged_file(trial, damage)


def worker_killed(trial: Trial) -> None:
    """The process is killed between a donor's save and the release of its blocks; another takes the folder over."""
    points = {"writing": "file_refused", "saved": "file_found"}
    point, event = list(points.items())[trial.seed % len(points)]
    with _folder() as folder:
        arguments = (str(folder), point, str(trial.seed))
        ended = subprocess.run([sys.executable, "-m", "validation.benchmarks.killed_worker", *arguments], check=False)
        if ended.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the worker was to be killed while {point}, and ended with {ended.returncode}")
        with trial.counts("tier_events", event=event), trial.bench.engine(folder) as llm:
            trial.ask(llm, *trial.prompts.others)


def nats_down(trial: Trial) -> None:
    """Nobody answers where NATS should be."""
    before = counted("event_connections", result="failed")
    with trial.bench.engine(NATS_URL=_NO_SERVER) as llm:
        trial.ask(llm, trial.prompts.donor, *trial.prompts.others)
        for _ in range(_MOST_REQUESTS_BEFORE_A_CONNECTION_FAILS):
            trial.injection.is_counted = counted("event_connections", result="failed") > before
            if trial.injection.is_counted:
                break
            trial.ask(llm, trial.prompts.donor)


def donor_lost(trial: Trial) -> None:
    """A donor's bytes are gone when its plan is to be loaded."""
    with trial.bench.engine() as llm:
        trial.ask(llm, trial.prompts.donor)
        llm.connector_worker.store.clear()
        with trial.counts("refusals", reason="load_failed"):
            trial.ask(llm, trial.prompts.others[0])
        trial.ask(llm, trial.prompts.others[1])


def forward_fails(trial: Trial) -> None:
    """A forward runs out of memory and the engine lives on: its request ends, and must not become a donor."""
    with trial.bench.engine(contract="1.1") as llm:
        failing = mock.patch.object(llm.executor.model_runner, "forward", side_effect=RuntimeError("injected"))
        with trial.counts("refusals", reason="forward_failed"), failing:
            trial.bench.serve(llm, trial.prompts.donor)
        trial.ask(llm, *trial.prompts.others)


FAULTS: dict[str, Callable[[Trial], None]] = {
    fault.__name__: fault
    for fault in (
        provider_raises,
        lookup_stalls,
        disk_full,
        corrupt_kv,
        corrupt_text,
        worker_killed,
        nats_down,
        donor_lost,
        forward_fails,
    )
}


def inject(bench: FaultBench, name: str, seed: int) -> Injection:
    """Serves requests around one fault, of prompts that no other seed has."""
    injection = Injection(name)
    FAULTS[name](Trial(bench, injection, seed))
    return injection


def _serve_from_damaged_file(trial: Trial, damage: Callable[[bytearray, slice], None]) -> None:
    with _folder() as folder:
        with trial.bench.engine(folder) as llm:
            trial.ask(llm, trial.prompts.donor)
            geometry = llm.connector_worker._runtime.pool.geometry
        (path,) = (folder / FOLDER).glob("*.donor.safetensors")
        data = bytearray(path.read_bytes())
        size = FileSize(geometry.num_layers, geometry.bytes_per_token(llm.executor.model_runner.dtype))
        tokens = (len(data) - size.header_bytes) // (size.bytes_per_token + 4)
        damage(data, slice(size.header_bytes, size.header_bytes + tokens * size.bytes_per_token))
        path.write_bytes(data)
        with trial.bench.engine(folder, MIN_DONOR_TOKENS="4096") as llm:
            trial.ask(llm, *trial.prompts.others)  # the first has the donor fetched
            trial.bench.hear(llm)
            trial.ask(llm, trial.prompts.donor)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
