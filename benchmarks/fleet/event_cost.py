"""What one donor event costs the serving thread, while the publisher sends to a server on this machine.

A registration is two calls (intended, held), a move and an end one each. Each event is timed on the serving thread,
which is busy between the events as a scheduler is. The baseline is the same loop without a fleet. The best of several
rounds counts, since a machine may have other work.
"""

from __future__ import annotations

import gc
import time
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.fleet.server import NAMESPACE, loopback_server, texts
from benchmarks.program import run_counted
from semblend_trt.config import load_settings
from semblend_trt.donors.observer import DonorObserver
from semblend_trt.fleet.announcer import announcer_for
from validation.results import Results

if TYPE_CHECKING:
    import numpy.typing as npt

    from validation.results import Results

ROUNDS = 5
DONORS = 2_000
HELD = 512
TOKENS = 2048
EVENTS_PER_S = 2000.0
WARM_UP = 600


def costs(observer: DonorObserver, donors: int, prefix: str) -> npt.NDArray[np.float64]:
    """Microseconds of each event of `donors` donors that come, move down and go, the oldest first: float64 [events]."""
    prompts = texts(64, TOKENS)
    taken: list[int] = []
    began = time.perf_counter_ns()
    now = time.perf_counter_ns
    for number in range(donors):
        name, tokens = f"{prefix}-{number}", prompts[number % len(prompts)].copy()
        start = now()
        observer.intended(name, NAMESPACE, None)
        observer.held(name, tokens, "device")
        taken.append(now() - start)
        if number >= HELD // 2:
            start = now()
            observer.moved(f"{prefix}-{number - HELD // 2}", "host")
            taken.append(now() - start)
        if number >= HELD:
            start = now()
            observer.gone(f"{prefix}-{number - HELD}")
            taken.append(now() - start)
        _work_until(began + int(len(taken) / EVENTS_PER_S * 1e9))
    return np.array(taken[WARM_UP:]) / 1e3


def best_round(observer: DonorObserver) -> npt.NDArray[np.float64]:
    """The `costs` of the round with the lowest 99th percentile."""
    rounds = [costs(observer, DONORS, f"round-{number}") for number in range(ROUNDS)]
    return min(rounds, key=lambda taken: float(np.percentile(taken, 99)))


def run(results: Results) -> None:
    """Adds both rows."""
    gc.collect()
    silent = best_round(DonorObserver())
    with loopback_server() as server:
        announcer = announcer_for(load_settings(nats_url=server.url, worker_id=0, metrics=False))
        assert announcer is not None
        taken = best_round(announcer)
        announcer.close()
    baseline = (
        f"{len(taken)} events at {EVENTS_PER_S:g} a second, donors of {TOKENS} tokens; with no fleet to tell "
        f"{np.percentile(silent, 99):.2f} us"
    )
    results.add("event_cost_p99_us", float(np.percentile(taken, 99)), "us", goal=20, baseline=baseline)
    results.add("event_cost_p50_us", float(np.percentile(taken, 50)), "us", baseline=baseline)


def _work_until(moment: int) -> None:
    """Keeps the interpreter busy until `time.perf_counter_ns` reaches `moment`."""
    while time.perf_counter_ns() < moment:
        pass


main = partial(run_counted, "fleet_event_cost", __doc__, [], run)

if __name__ == "__main__":
    main()
