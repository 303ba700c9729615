"""How many of the documents that an engine has seen it reuses, with generations of donors and without.

`python -m benchmarks.evidence.seen_documents` asks about documents that are drawn by Zipf's law, eight a prompt.
Nothing is preloaded: most documents come first after moved KV of others. Counted are the documents of the last
prompts: those that an earlier prompt has shown, and those whose KV is reused. The answers to all prompts are compared
with a cold engine's. The shipped model and its profile are used, or those that are named.
"""

import random
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, pairwise
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import numpy as np

from benchmarks.program import parser_of
from semblend_trt.errors import ConfigurationError
from semblend_trt.reuse_profile import ReuseProfile
from validation.arms import COLD_ARM, VERIFIED, Arm, arm_of
from validation.calibration.bound import Broken
from validation.cases import Case, Expectation
from validation.documents import counted_list
from validation.embedded_engine import EmbeddedEngines
from validation.families.group import Group
from validation.measurement import BatchServer, ServingSettings
from validation.metrics import CONFIDENCE, MARGIN, exact_match
from validation.models import choices_of, load, profile_of, shipped_model
from validation.output import progress
from validation.prompts import PromptForm, form_for
from validation.results import Results
from validation.samples import Reuse

NAME, QUERIES, DOCUMENTS, EACH = "seen_documents", 600, 600, 8
# The share of the prompts, the last ones, whose documents are counted.
COUNTED_SHARE = 1 / 6
GENERATIONS, GOAL = 3, 0.97
# A document counts as reused if donors hold this share of its tokens.
COVERED = 0.9
ANSWER_TOKENS = 16


class Query(NamedTuple):
    """A prompt with the right answer, and the places in its tokens of its documents, by their number."""

    case: Case
    places: dict[int, range]

    def reused(self, reuse: Reuse) -> int:
        """Count the documents whose KV is reused."""
        is_held = np.zeros(max(place.stop for place in self.places.values()), dtype=bool)
        # A plan is dropped for a reason; then everything is computed.
        for start, length in ((0, reuse.exact_prefix_tokens), *(() if reuse.reason else reuse.spans)):
            is_held[start : start + length] = True
        return sum(is_held[place.start : place.stop].mean() >= COVERED for place in self.places.values())


def queries_of(count: int, documents: int, form: PromptForm, encode: Callable[[str], list[int]]) -> list[Query]:
    """Return `count` prompts, each about EACH of `documents` stock lists; equal arguments give equal prompts."""
    draws, rng = np.random.default_rng(0), random.Random(0)
    group = Group(NAME, "", form, lambda text: len(encode(text)), rng, 1, 0, Path())
    lists = [counted_list(place, group.counts(group.items())) for place in islice(group.places(), documents)]
    weights = 1.0 / np.arange(1, documents + 1)
    queries = []
    for number in range(count):
        drawn = [int(each) for each in draws.choice(documents, EACH, replace=False, p=weights / weights.sum())]
        rng.shuffle(drawn)
        instruction, question = rng.choice(form.instructions), rng.choice(lists[rng.choice(drawn)].questions)
        texts, name = [lists[each].text for each in drawn], f"{NAME}-{number}"
        ends = [len(encode(form.render_pages(instruction, texts[:shown]))) for shown in range(EACH + 1)]
        prompt = form.render(instruction, texts, question.text)
        case = Case(name, NAME, "", (), prompt, question.answer, True, Expectation.ANY, name)
        queries.append(Query(case, {each: range(*ends) for each, ends in zip(drawn, pairwise(ends), strict=True)}))
    return queries


def answers(server: BatchServer, arm: Arm, queries: Sequence[Query]) -> tuple[list[bool], list[Reuse]]:
    """Serve the prompts one after the other, each once the one before is saved; say which answers are right."""
    with progress(arm.name, len(queries)) as step:
        found = server.answers(arm, on_step=step)
    right = [exact_match(found[case.id].text, str(case.reference)) for case, _ in queries]
    return right, [found[case.id].reuse for case, _ in queries]


def add_reused(rows: Results, name: str, queries: Sequence[Query], found: Sequence[Reuse], goal: float | None) -> None:
    """Add the share of the last prompts' seen documents that is reused."""
    first = len(queries) - max(1, round(len(queries) * COUNTED_SHARE))
    shown = {document for query in queries[:first] for document in query.places}
    seen = 0
    for query in queries[first:]:
        seen += len(shown & query.places.keys())
        shown |= query.places.keys()
    last = list(zip(queries[first:], found[first:], strict=True))
    reused, kept = sum(query.reused(reuse) for query, reuse in last), sum(reuse.reused_tokens for _, reuse in last)
    offered = sum(reuse.offered_tokens for _, reuse in last if not reuse.reason)
    baseline = (
        f"{reused} of {seen} seen documents, of {EACH * len(last)} in the last {len(last)} of {len(found)} prompts; "
        f"{kept / max(1, offered):.3f} of the tokens that plans offered stayed after the check"
    )
    rows.add(name, reused / max(1, seen), "of seen documents", baseline, goal, "higher")


def add_compared(rows: Results, name: str, right: Sequence[bool], cold: Sequence[bool]) -> None:
    """Add the difference in right answers to a cold engine's."""
    count, lost = len(cold), sum(was and not now for now, was in zip(right, cold, strict=True))
    bound = f"{lost} of {count} lost, {CONFIDENCE:.0%} upper bound of that share {Broken(lost, count).upper:.4f}"
    baseline = f"cold {fmean(cold):.3f}; {bound}"
    rows.add(name, (sum(right) - sum(cold)) / count, "exact match", baseline, -MARGIN, "higher")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, serve the prompts thrice, print and write. Raises ConfigurationError."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", metavar="PATH_OR_ID", help="default: the shipped model")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto, but cpu for the shipped model)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="default: the one in the model's folder")
    parser.add_argument("--name", default="", help="of model and dtype, at the end of the rows' names")
    parser.add_argument("--queries", type=int, default=QUERIES, help=f"prompts; fewer than {QUERIES} are a dry run")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="documents to draw from")
    options = parser.parse_args(arguments)
    if options.queries < 1 or options.documents < EACH:
        parser.error(f"at least 1 prompt and {EACH} documents are needed")
    profile = profile_of(options.model, options.profile)
    if profile is None:
        raise ConfigurationError(f"{options.model} has no reuse profile; name one with --profile.")
    runner, model = load(options.model, options.device, options.dtype), str(options.model or shipped_model())
    encode = partial(runner.tokenizer.encode, add_special_tokens=False)
    queries = queries_of(options.queries, options.documents, form_for(runner.tokenizer), encode)
    is_dry = options.queries < QUERIES or options.documents < DOCUMENTS
    rows, name = Results(arguments, str(runner.device), dry=is_dry), f"_{options.name}" if options.name else ""
    settings = ServingSettings(model, max_tokens=ANSWER_TOKENS, batch=1)
    server = BatchServer(EmbeddedEngines(runner), [query.case for query in queries], settings)
    cold, _ = answers(server, COLD_ARM, queries)
    with tempfile.TemporaryDirectory(prefix="seen-documents-") as folder:
        for generations in (0, GENERATIONS):
            path = Path(folder) / f"{generations}.json"
            ReuseProfile.read(profile).model_copy(update={"generations": generations}).write(path)
            right, found = answers(server, arm_of(VERIFIED, choices_of(runner, None, path)), queries)
            kind, goal = ("", GOAL) if generations else ("_exact_donors", None)
            add_reused(rows, f"reuse_of_{NAME}{kind}{name}", queries, found, goal)
    add_compared(rows, f"reuse_of_{NAME}_em_vs_cold{name}", right, cold)
    rows.write(options.json, f"{NAME}{name}")


if __name__ == "__main__":
    main()
