"""How often do a server's receipts say that an answer equals the cold run's, on prompts that are made to break reuse?

`python -m validation.benchmarks.receipts` serves the trap families with the shipped model over HTTP. Each prompt comes
behind its donors with `X-SemBlend-Verify: cold`, once under `verified` and once under `position_fix`, which checks
nothing: there the receipts have to tell of answers that differ. As in `quality`, families that the model does not
answer cold show nothing: their receipts are told apart and are in no share.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from aiohttp import ClientSession

from engine_wrapper.embedded.sampling import SamplingParams
from engine_wrapper.embedded.server import BOUNDS, Worker
from kernels.results import Count, Results, run_counted
from semblend_trt.fleet.router.cold_runs import VERIFY_HEADER
from semblend_trt.fleet.router.serving import Connections, listening
from semblend_trt.outcome import RECEIPT
from validation import models
from validation.arms import POSITION_FIX, VERIFIED
from validation.cases import Tokeniser, groups
from validation.embedded_engine import EmbeddedEngines, open_cold, open_llm
from validation.families.catalog import FAMILIES, FamilyRequest, Kind, write_cases
from validation.metrics import exact_match, mean
from validation.samples import is_known

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine_wrapper.embedded.llm import LLM
    from engine_wrapper.embedded.model_runner import ModelRunner
    from validation.cases import Case

TRAPS = tuple(each.name for each in FAMILIES if each.kind is Kind.TRAP)
# The profile was calibrated with another seed.
GROUPS, QUESTIONS, TOKENS, SEED = 4, 4, 1_536, 200_000
# Shorter than the default: a list of nine rows is then reused whole.
ANSWER_TOKENS, MIN_SPAN = 8, 48
LEAST_EQUAL, MOST_EQUAL_UNCHECKED = 0.99, 0.5


@dataclass(slots=True)
class Receipts:
    """What the receipts of one policy say: how many have each `result`, and of those with `reused` tokens how many."""

    results: Counter[str] = field(default_factory=Counter)
    reused: Counter[str] = field(default_factory=Counter)

    def add(self, receipt: dict[str, Any]) -> None:
        """Counts one."""
        result = receipt["verified"]["result"]
        self.results[result] += 1
        self.reused[result] += receipt["reused_tokens"] > 0

    def __add__(self, other: Receipts) -> Receipts:
        return Receipts(self.results + other.results, self.reused + other.reused)

    @property
    def equal_share(self) -> float:
        """Of those that were compared. Raises ZeroDivisionError where none was."""
        return self.results["equal"] / (self.results["equal"] + self.results["differs"])

    @property
    def told(self) -> str:
        """The counts as a sentence's part."""
        reused = f"{self.reused['equal']} of {self.reused['equal'] + self.reused['differs']} with reused tokens equal"
        return ", ".join(f"{count} {result}" for result, count in sorted(self.results.items())) + f"; {reused}"


async def serve(llm: LLM, cases: Sequence[Case], stop_token_ids: Sequence[int]) -> dict[str, Receipts]:
    """Serves every group's donors and its prompts one by one, and shuts the engine down. The receipts are by family."""
    worker = Worker(llm, "model")
    found: dict[str, Receipts] = defaultdict(Receipts)
    asked = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "stop_token_ids": list(stop_token_ids)}
    try:
        async with (
            listening(worker.app(), "127.0.0.1", 0, Connections(BOUNDS)) as address,
            ClientSession(address, raise_for_status=True) as client,
        ):
            for group in groups(cases):
                for donor in group[0].donors:
                    async with client.post("/v1/completions", json={"prompt": donor, "max_tokens": 1}):
                        pass
                    while llm.executor.pending_transfers:
                        await asyncio.sleep(0.001)
                for case in group:
                    body = {**asked, "prompt": case.prompt}
                    async with client.post("/v1/completions", json=body, headers={VERIFY_HEADER: "cold"}) as answer:
                        found[case.workload].add((await answer.json())["usage"][RECEIPT])
    finally:
        worker.close()
    return found


def answered_cold(runner: ModelRunner, cases: Sequence[Case], tokeniser: Tokeniser) -> set[str]:
    """The families of `cases` whose references the model gives without reuse, as often as `quality` asks for."""
    right: dict[str, list[bool]] = defaultdict(list)
    with open_cold(models.shipped_model(), runner, 2 * TOKENS) as llm:
        for case in cases:
            sampling = SamplingParams(max_tokens=ANSWER_TOKENS, stop_token_ids=tokeniser.stop_token_ids)
            answer = llm.generate([case.prompt], sampling)[0].outputs[0].token_ids
            right[case.workload].append(exact_match(tokeniser.text(answer), str(case.reference)))
    return {family for family, found in right.items() if is_known(mean(found), None, len(runner.tokenizer))}


def run(groups_each: int, rows: Results) -> None:
    """Adds a row for each policy."""
    runner = models.load(None, "cpu", "float32")
    engines = EmbeddedEngines(runner)
    cases = write_cases(engines, FamilyRequest(TRAPS, groups_each, QUESTIONS, TOKENS, SEED))
    tokeniser = Tokeniser(engines, ANSWER_TOKENS)
    answered = answered_cold(runner, cases, tokeniser)
    profile = {"PROFILE": str(models.shipped_model() / models.PROFILE_NAME)}
    what = f"{len(answered)} of {len(TRAPS)} trap families, those answered cold, at most {TOKENS:,} tokens a prompt: "
    for policy, variables in ((VERIFIED, profile), (POSITION_FIX, {})):
        variables = {**variables, "POLICY": policy, "MIN_SPAN": str(MIN_SPAN), "LOOKUP_DEADLINE_MS": "5000"}
        llm = open_llm(models.shipped_model(), runner.share(), variables)
        by_family = asyncio.run(serve(llm, cases, tokeniser.stop_token_ids))
        found = sum((each for family, each in by_family.items() if family in answered), Receipts())
        others = sum((each for family, each in by_family.items() if family not in answered), Receipts())
        what_else = f"; the other {len(by_family) - len(answered)}: {others.told}" if others.results else ""
        if policy == VERIFIED:
            rows.add(
                "receipt_equal_share",
                found.equal_share,
                "of answers",
                what + found.told + what_else,
                LEAST_EQUAL,
                "higher",
            )
        else:
            control = f"the control, which has to differ; {what}{found.told}{what_else}"
            rows.add(f"receipt_equal_share_{policy}", found.equal_share, "of answers", control, MOST_EQUAL_UNCHECKED)


main = partial(run_counted, "receipts", __doc__, [Count("groups", GROUPS, "groups of each trap family")], run)


if __name__ == "__main__":
    main()
