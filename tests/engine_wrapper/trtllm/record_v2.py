"""`python -m tests.engine_wrapper.trtllm.record_v2 FOLDER` records rows of a default engine of 1.4, as it is played.

They come from its lives and faults. STATEFUL_STEPS: the steps of all lives of the embedded engine."""

import os
import sys
from collections import defaultdict
from pathlib import Path

import pytest

STEPS = 190_000
HERE = "tests/engine_wrapper"
LIVES, FAULTS = f"{HERE}/embedded/test_stateful.py", f"{HERE}/trtllm/test_faults.py"
WHERE = "as far as it can be played on a CPU: TensorRT-LLM itself was not run"


class Properties:
    """What the tests have recorded, and the kinds of faults that were survived in either loop."""

    def __init__(self):
        self.found, self.faults, self.failed = defaultdict(list), defaultdict(set), []

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.failed.append(report.nodeid)
        if report.when == "call" and report.passed:
            for name, value in report.user_properties:
                self.found[name].append(value)
            if "test_no_fault" in report.nodeid:
                kind, loop = report.nodeid.rstrip("]").split("[")[1].rsplit("-", 1)
                self.faults[kind.removesuffix("-in")].add(loop)


def main(folder):
    from validation.results import Results  # after the settings of the tests

    seen, rows = Properties(), Results([str(folder)])
    pytest.main(["-q", "-p", "no:cacheprovider", LIVES, f"{HERE}/trtllm/test_default_engine.py", FAULTS], [seen])
    found, lives = seen.found, f"random lives over V2's habits, both loops; {WHERE}"
    rows.add("trtllm_v2_lives_clean", sum(found["steps"]), "steps", lives, 100_000, "higher")
    for name, unit in (("wrong_tokens", "tokens"), ("leaked_pages", "pages"), ("donors_lost_to_exchange", "donors")):
        rows.add(f"trtllm_v2_{name}", sum(found[name]), unit, f"in those lives; {WHERE}", 0)
    survived = sum(len(loops) == 2 for loops in seen.faults.values())
    where = f"before and inside forwards with a plan, in both loops: neighbours unharmed, no wrong token; {WHERE}"
    rows.add("trtllm_v2_faults_survived", survived, "kinds", where, 54, "higher")
    steps = f"our functions that run in {max(found['decode_steps'])} decode steps beyond one look-up; {WHERE}"
    rows.add("trtllm_v2_hook_calls_in_decode_steps", max(found["hook_calls"]), "calls", steps, 0)
    exactness = f"largest difference of logits from a cold engine's, every layer computed; float32; {WHERE}"
    rows.add("trtllm_v2_wrapper_exactness_max_logit_diff", max(found["logit_difference"]), "logits", exactness, 1e-4)
    rows.add("trtllm_v2_tests_failed", len(seen.failed), "tests", f"of this run; {WHERE}", 0)
    rows.write(folder / rows.measured.machine["name"], "trtllm_v2")


if __name__ == "__main__":
    os.environ.setdefault("STATEFUL_STEPS", str(STEPS))
    main(Path(sys.argv[1]))
