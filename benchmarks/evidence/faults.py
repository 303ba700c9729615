"""Injected faults that no request noticed: all finished, with a cold run's tokens, and the fault was counted.

`python -m benchmarks.evidence.faults` injects every fault several times into engines over the shipped model, prints a
table and writes its rows.
"""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest import mock

from prometheus_client import REGISTRY

from benchmarks.program import Count, run_counted
from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.connector import lookup
from semblend_trt.discovery.planner import Deadline
from semblend_trt.donors.disk_tier import FOLDER
from validation.documents import stock_list
from validation.embedded_engine import disk_tier, drain, evict_prefixes, find_donors, open_cold, open_llm
from validation.models import load, shipped_model
from validation.prompts import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from engine_wrapper.embedded.llm import LLM
    from engine_wrapper.embedded.request import RequestOutput
    from validation.results import Results

HOST_BYTES, POOL_TOKENS = 1 << 30, 2048
LOOKUP_DEADLINE_MS = 500
DOCUMENTS, ROWS = 3, 12
ROUNDS = 6
_ANSWER = SamplingParams(max_tokens=8)
STALL_SECONDS = 1.0
_SERVE_AND_DIE = "import sys; from benchmarks.evidence.faults import serve_and_die; serve_and_die(*sys.argv[1:])"
# Nothing listens at a reserved port.
_NO_SERVER = "nats://127.0.0.1:1"
_MOST_REQUESTS_BEFORE_A_CONNECTION_FAILS = 200


def prompts_of(seed: int) -> tuple[str, ...]:
    """A donor's prompt and others that differ from it in the question alone; prompts of two seeds share nothing."""
    rng = random.Random(seed)
    lists = [stock_list(rng, rows=ROWS) for _ in range(DOCUMENTS)]
    texts = [each.text for each in lists]
    return tuple(render(f"{seed}: answer briefly.", texts, each.questions[seed % ROWS].text) for each in lists)


def counted(metric: str, **labels: str) -> float:
    """A counter of this process, as /metrics shows it."""
    return REGISTRY.get_sample_value(f"semblend_{metric}_total", labels) or 0.0


class FaultBench:
    """Engines over one model under policy exact, so that every answer must be a cold run's."""

    def __init__(self) -> None:
        self._runner = load(None, None, "float32")
        self._cold = open_cold(shipped_model(), self._runner, POOL_TOKENS)
        self._answers: dict[str, list[int]] = {}

    def close(self) -> None:
        self._cold.shutdown()

    @contextmanager
    def engine(self, folder: Path | None = None, contract: str = "embedded", **variables: str) -> Iterator[LLM]:
        """An engine with donors in host memory, and with a `folder` on disk too; `contract` is its version's."""
        settings = {
            "POLICY": "exact",
            "HOST_BYTES": str(HOST_BYTES),
            "EMBEDDER": "off",
            # Far above what a lookup takes on a busy machine: only the injected stall may pass it.
            "LOOKUP_DEADLINE_MS": str(LOOKUP_DEADLINE_MS),
            **variables,
        }
        if folder is not None:
            settings |= disk_tier(folder)
        runner = self._runner.share()
        with open_llm(shipped_model(), runner, settings, contract=contract, pool_tokens=POOL_TOKENS) as llm:
            find_donors(llm)
            yield llm

    def serve(self, llm: LLM, prompt: str) -> RequestOutput:
        """Serves a prompt without the engine's own prefix cache, and waits for its save and for transfers."""
        evict_prefixes(llm)
        (output,) = llm.generate([prompt], _ANSWER)
        drain(llm)
        return output

    def wrong_tokens(self, prompt: str, output: RequestOutput) -> int:
        """Tokens of the answer that differ from a cold run's; all of them where the request did not finish."""
        if prompt not in self._answers:
            (cold,) = self._cold.generate([prompt], _ANSWER)
            self._answers[prompt] = list(cold.outputs[0].token_ids)
        given, right = list(output.outputs[0].token_ids), self._answers[prompt]
        if not _is_finished(output):
            given = []
        differing = sum(one != other for one, other in zip(given, right, strict=False))
        return differing + abs(len(given) - len(right))


class Trial:
    """One injection of a fault, and what became of its requests. `reused_tokens` tell whether a donor was read."""

    def __init__(self, bench: FaultBench, name: str, seed: int) -> None:
        self.bench, self.name, self.seed = bench, name, seed
        self.donor, *self.others = prompts_of(seed)
        self.wrong_tokens = self.unfinished = self.reused_tokens = 0
        self.is_counted = False

    @property
    def survived(self) -> bool:
        """Every request finished with a cold run's tokens, and the fault was counted under its name."""
        return not self.wrong_tokens and not self.unfinished and self.is_counted

    def ask(self, llm: LLM, *prompts: str) -> None:
        """Serves prompts and compares their answers with a cold run's."""
        for prompt in prompts:
            output = self.bench.serve(llm, prompt)
            self.unfinished += not _is_finished(output)
            self.wrong_tokens += self.bench.wrong_tokens(prompt, output)
            self.reused_tokens += output.reused_tokens

    @contextmanager
    def counts(self, metric: str, **labels: str) -> Iterator[None]:
        """Notes whether the product counts the fault while the block runs."""
        before = counted(metric, **labels)
        yield
        self.is_counted = counted(metric, **labels) > before


def _is_finished(output: RequestOutput) -> bool:
    return output.outputs[0].finish_reason in ("stop", "length")


def provider_raises(trial: Trial) -> None:
    """The lookup raises."""
    with trial.bench.engine() as llm:
        trial.ask(llm, trial.donor)
        broken = mock.patch.object(llm.connector_scheduler, "_look_up", side_effect=RuntimeError("injected"))
        with trial.counts("refusals", reason="internal_error"), broken:
            trial.ask(llm, trial.others[0])
        trial.ask(llm, trial.others[1])


def lookup_stalls(trial: Trial) -> None:
    """The look-up takes a second, as its clock says."""
    with trial.bench.engine() as llm:
        trial.ask(llm, trial.donor)
        readings = iter([0.0])
        stalled = partial(Deadline, clock=lambda: next(readings, STALL_SECONDS))
        with trial.counts("refusals", reason="lookup_timeout"), mock.patch.object(lookup, "Deadline", stalled):
            trial.ask(llm, trial.others[0])
        trial.ask(llm, trial.others[1])


def disk_full(trial: Trial) -> None:
    """The disk has no room for a donor's file."""

    def full(*_arguments: Any) -> NoReturn:
        raise OSError(errno.ENOSPC, "No space left on device")

    with tempfile.TemporaryDirectory() as folder, trial.bench.engine(Path(folder)) as llm:
        with trial.counts("tier_events", event="write_failed"), mock.patch.object(os, "posix_fallocate", full):
            trial.ask(llm, trial.donor)
            find_donors(llm)
        trial.ask(llm, *trial.others)


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
    """The process is killed while a donor is written, or right after; another process takes the folder over."""
    points = {"writing": "file_refused", "saved": "file_found"}
    point, event = list(points.items())[trial.seed % len(points)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = (folder, point, str(trial.seed))
        ended = subprocess.run([sys.executable, "-c", _SERVE_AND_DIE, *arguments], check=False)
        if ended.returncode != -signal.SIGKILL:
            raise RuntimeError(f"the worker was to be killed while {point}, and ended with {ended.returncode}")
        with trial.counts("tier_events", event=event), trial.bench.engine(Path(folder)) as llm:
            trial.ask(llm, *trial.others)


def nats_down(trial: Trial) -> None:
    """No server answers where NATS should be."""
    before = counted("event_connections", result="failed")
    with trial.bench.engine(NATS_URL=_NO_SERVER) as llm:
        trial.ask(llm, trial.donor, *trial.others)
        for _ in range(_MOST_REQUESTS_BEFORE_A_CONNECTION_FAILS):
            trial.is_counted = counted("event_connections", result="failed") > before
            if trial.is_counted:
                break
            trial.ask(llm, trial.donor)


def donor_lost(trial: Trial) -> None:
    """A donor's bytes are gone when its plan is to be loaded."""
    with trial.bench.engine() as llm:
        trial.ask(llm, trial.donor)
        llm.connector_worker.store.clear()
        with trial.counts("refusals", reason="load_failed"):
            trial.ask(llm, trial.others[0])
        trial.ask(llm, trial.others[1])  # it becomes a donor: the one before found its text held at its look-up
        trial.ask(llm, trial.others[0])


def forward_fails(trial: Trial) -> None:
    """A forward runs out of memory and the engine lives on: its request ends, and must not become a donor."""
    with trial.bench.engine(contract="1.2") as llm:
        failing = mock.patch.object(llm.executor.model_runner, "forward", side_effect=RuntimeError("injected"))
        # TensorRT-LLM does not tell of the end: the connector counts it once others run.
        with trial.counts("refusals", reason="forward_failed"):
            with failing:
                trial.bench.serve(llm, trial.donor)
            trial.ask(llm, *trial.others)


_FAULTS = (
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
FAULTS: dict[str, Callable[[Trial], None]] = {fault.__name__: fault for fault in _FAULTS}


def inject(bench: FaultBench, name: str, seed: int) -> Trial:
    """Serves requests around one fault, with prompts of their own for each seed."""
    trial = Trial(bench, name, seed)
    FAULTS[name](trial)
    return trial


def _serve_from_damaged_file(trial: Trial, damage: Callable[[bytearray, slice], None]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        with trial.bench.engine(folder) as llm:
            trial.ask(llm, trial.donor)
            form = llm.connector_worker.transfers._disk.form
        (path,) = (folder / FOLDER).glob("*.donor.safetensors")
        data = bytearray(path.read_bytes())
        tokens = (len(data) - form.header_bytes) // (form.token_bytes + 4)
        damage(data, slice(form.header_bytes, form.header_bytes + tokens * form.token_bytes))
        path.write_bytes(data)
        with trial.bench.engine(folder, MIN_DONOR_TOKENS="4096") as llm:
            trial.ask(llm, *trial.others)  # the first has the donor fetched
            find_donors(llm)
            trial.ask(llm, trial.donor)


def serve_and_die(folder: str, point: str, seed: str) -> None:
    """Serves one donor; is killed while its file is written, or when it is saved and in no index yet."""

    def kill(*_arguments: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    bench = FaultBench()
    with bench.engine(Path(folder)) as llm:
        worker = llm.connector_worker
        real = worker.saver.finished

        def finished() -> Any:
            if worker.saver._saves:
                worker.saver.drain()
                worker.transfers.drain()
                kill()
            return real()

        if point == "writing":
            mock.patch.object(os, "fsync", kill).start()
        else:
            worker.saver.finished = finished
        bench.serve(llm, prompts_of(int(seed))[0])


def run(rounds: int, rows: Results) -> None:
    """Injects each fault `rounds` times."""
    bench = FaultBench()
    found = [inject(bench, name, seed) for name in FAULTS for seed in range(rounds)]
    bench.close()
    survived = {name: sum(each.survived for each in found if each.name == name) for name in FAULTS}
    by_fault = ", ".join(f"{name} {count} of {rounds}" for name, count in survived.items())
    rows.add("faults_survived", sum(survived.values()), "faults", by_fault, len(found), "higher")
    wrong = sum(each.wrong_tokens for each in found)
    reused = sum(each.reused_tokens for each in found)
    baseline = f"cold answers to the same prompts; {reused:,} tokens reused between the faults"
    rows.add("faults_wrong_tokens", wrong, "tokens", baseline, 0)


main = partial(run_counted, "faults", __doc__, [Count("rounds", ROUNDS, "of each fault")], run)


if __name__ == "__main__":
    main()
