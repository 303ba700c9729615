"""Serves one donor and is killed: `python -m validation.benchmarks.killed_worker FOLDER POINT SEED`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from validation.benchmarks.fault_bench import FaultBench, prompts_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM


def _kill(*_arguments: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_writing(_llm: LLM) -> None:
    """The donor's bytes have been handed to the system, and its file has no name yet."""
    mock.patch.object(os, "fsync", _kill).start()


def kill_once_saved(llm: LLM) -> None:
    """Memory and file hold the donor, and nobody has been told so."""
    worker = llm.connector_worker
    real = worker.saver.finished

    def finished() -> Any:
        if worker.saver._saves:
            worker.saver.drain()
            worker.keeper.drain()
            _kill()
        return real()

    worker.saver.finished = finished


POINTS = {"writing": kill_while_writing, "saved": kill_once_saved}


def main(arguments: Sequence[str]) -> None:
    """Ends by the signal."""
    folder, point, seed = arguments
    bench = FaultBench()
    with bench.engine(Path(folder)) as llm:
        POINTS[point](llm)
        bench.serve(llm, prompts_of(int(seed)).donor)


if __name__ == "__main__":
    main(sys.argv[1:])
