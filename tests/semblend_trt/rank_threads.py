"""Ranks that are threads of one process: they exchange real values, and every one of them runs the same work."""

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

from semblend_trt.ranks import EngineRanks

PATIENCE = 20.0  # seconds; a rank that makes a call too few or too many ends its test as a broken barrier


def on_ranks(size, work):
    """What `work` returns on each of `size` ranks."""
    given = [b""] * size
    barrier = threading.Barrier(size, timeout=PATIENCE)

    def gather_of(rank):
        def gather(value):
            given[rank] = pickle.dumps(value)
            barrier.wait()
            gathered = [pickle.loads(each) for each in given]
            barrier.wait()
            return gathered

        return gather

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(EngineRanks(rank, size, gather_of(rank))), range(size)))
