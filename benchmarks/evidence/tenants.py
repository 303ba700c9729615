"""Measure whether a tenant's times to the first token, or any count, show that another tenant's donor holds its text.

`python -m benchmarks.evidence.tenants` serves prompts under one salt, in random order. Before a prompt, the other
salt has served the same document or another one. A two-sample Kolmogorov-Smirnov test compares the times. A third
arm, whose own salt holds the document, shows that the test sees a difference.

Then each of many salts has a prompt of its own served: what the process keeps of them is bounded by its settings.
"""

import random
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from scipy.stats import ks_2samp

from benchmarks.bench_model import Prompts, make_runner
from benchmarks.program import Count, run_counted
from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig
from validation.embedded_engine import ONE_TOKEN, RANDOM_WEIGHTS, open_llm
from validation.results import Results

SAMPLES, SALTS = 250, 3000
WARM_UPS = 10
LAYERS, SIZE = 3, 512
LEAST_P, MOST_MB = 0.05, 64
# Steady after the warm-ups: every new donor pushes an old one out.
MAX_DONORS = 16
OWN_SALT, OTHER_SALT = "tenant-b", "tenant-a"
NO_TENANT, OTHER, OWN = "none", "other", "own"


class Served(NamedTuple):
    """Seconds to a request's first token, and its counts, which must be the same for all requests of two arms."""

    seconds: float
    counts: tuple[object, ...]


def sample(llm: LLM, prompts: Prompts, holder: str) -> Served:
    """Serve a document for `holder`, and then a prompt with it. Where no tenant holds it, serve another one first."""
    document = prompts.document(SIZE)
    held = prompts.document(SIZE) if holder == NO_TENANT else document
    llm.generate([prompts.donor(held)], ONE_TOKEN, cache_salt=OWN_SALT if holder == OWN else OTHER_SALT)
    llm.settle()
    (output,) = llm.generate([prompts.shifted(document)], ONE_TOKEN, cache_salt=OWN_SALT)
    assert output.time_to_first_token is not None
    report = llm.connector_scheduler.reuse_of(output.request_id)
    counts = output.cached_tokens, output.computed_tokens, output.outputs[0].finish_reason, report
    llm.settle()
    return Served(output.time_to_first_token, counts)


@contextmanager
def engine() -> Iterator[tuple[LLM, Prompts]]:
    """Yield an engine after its warm-ups, and the prompts for it."""
    # A busy machine may delay a look-up, which says nothing of a tenant.
    variables = RANDOM_WEIGHTS | {"POLICY": "position_fix", "EMBEDDER": "off", "LOOKUP_DEADLINE_MS": "1000"}
    variables["MAX_DONORS"] = str(MAX_DONORS)
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(Path(folder), LAYERS)
        prompts = Prompts(int(runner.config.vocab_size))
        # Two random prompts may begin with the same token, whose block is no secret.
        cache = KvCacheConfig(max_tokens=8 * SIZE, enable_partial_reuse=False)
        with open_llm(Path(folder), runner, variables, kv_cache_config=cache) as llm:
            for _ in range(WARM_UPS):
                sample(llm, prompts, OWN)
            yield llm, prompts


def arms_of(samples: int) -> dict[str, list[Served]]:
    """Send `samples` requests of each arm, in random order: no tenant, another one or their own holds the document."""
    order = random.Random(0).sample([NO_TENANT, OTHER, OWN] * samples, 3 * samples)
    arms: dict[str, list[Served]] = {holder: [] for holder in (NO_TENANT, OTHER, OWN)}
    with engine() as (llm, prompts):
        for holder in order:
            arms[holder].append(sample(llm, prompts, holder))
    return arms


def memory_of(salts: int) -> float:
    """Return the MB by which the process grows while each of `salts` salts has a prompt served."""
    with engine() as (llm, prompts):
        before = resident_mb()
        for number in range(salts):
            llm.generate([prompts.document(SIZE)], ONE_TOKEN, cache_salt=f"tenant-{number}")
            llm.settle()
        return resident_mb() - before


def resident_mb() -> float:
    """Return the memory that this process holds, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def run(samples: int, salts: int, rows: Results) -> None:
    """Measure all rows."""
    arms = arms_of(samples)
    baseline = f"{samples} prompts of {SIZE} tokens an arm, in random order; two-sample Kolmogorov-Smirnov test"
    none, other, own = ([each.seconds for each in arms[holder]] for holder in (NO_TENANT, OTHER, OWN))
    against = f"no tenant holds the document; {baseline}"
    rows.add("tenant_ks_p", ks_2samp(other, none).pvalue, "p", against, LEAST_P, "higher")
    against = "the same where one's own salt holds it: the test sees a difference"
    rows.add("tenant_own_donor_ks_p", ks_2samp(own, none).pvalue, "p", against)
    expected = arms[NO_TENANT][0].counts
    differing = sum(each.counts != expected for each in arms[NO_TENANT] + arms[OTHER])
    rows.add("tenant_counts_differing", differing, "requests", "what a request says of its tokens and reuse", 0)
    growth = f"{salts:,} salts, with a prompt of {SIZE} tokens each, where SEMBLEND_MAX_DONORS is {MAX_DONORS}"
    rows.add(f"salts_{SALTS}_memory_mb", memory_of(salts), "MB", f"growth of the process over {growth}", MOST_MB)


COUNTS = [Count("samples", SAMPLES, "prompts of each arm"), Count("salts", SALTS, "salts with a prompt each")]
main = partial(run_counted, {"tenants": run}, __doc__, COUNTS)


if __name__ == "__main__":
    main()
