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
from typing import NamedTuple

import numpy as np

from benchmarks.program import parser_of
from engine_wrapper.embedded.llm import LLM
from semblend_trt.errors import ConfigurationError
from semblend_trt.plan import SemanticKvPlan
from semblend_trt.reuse_profile import ReuseProfile
from validation.calibration.bound import Broken
from validation.cases import Tokeniser
from validation.documents import counted_list
from validation.embedded_engine import open_cold, open_llm
from validation.families.group import Group
from validation.metrics import CONFIDENCE, MARGIN, exact_match
from validation.models import load, profile_of, shipped_model
from validation.output import progress
from validation.prompts import PromptForm, form_for
from validation.results import Results

QUERIES, DOCUMENTS, EACH = 600, 600, 8
# The share of the prompts, the last ones, whose documents are counted.
COUNTED_SHARE = 1 / 6
GENERATIONS, GOAL = 3, 0.97
# A document counts as reused if donors hold this share of its tokens.
COVERED = 0.9
ANSWER_TOKENS = 16


class Query(NamedTuple):
    """A prompt's token ids, the places in it of its documents by their number, and the right answer."""

    tokens: list[int]
    places: dict[int, range]
    answer: str


class Answered(NamedTuple):
    """`seen` and `reused` count a prompt's documents. `reused_tokens`: offered tokens that stayed after the check."""

    seen: int
    reused: int
    offered_tokens: int
    reused_tokens: int
    is_right: bool


def queries_of(count: int, documents: int, form: PromptForm, encode: Callable[[str], list[int]]) -> list[Query]:
    """Return `count` prompts, each about EACH of `documents` stock lists; equal arguments give equal prompts."""
    draws, rng = np.random.default_rng(0), random.Random(0)
    group = Group("seen_documents", "", form, lambda text: len(encode(text)), rng, 1, 0, Path())
    lists = [counted_list(place, group.counts(group.items())) for place in islice(group.places(), documents)]
    weights = 1.0 / np.arange(1, documents + 1)
    queries = []
    for _ in range(count):
        drawn = [int(each) for each in draws.choice(documents, EACH, replace=False, p=weights / weights.sum())]
        rng.shuffle(drawn)
        instruction, question = rng.choice(form.instructions), rng.choice(lists[rng.choice(drawn)].questions)
        texts = [lists[each].text for each in drawn]
        ends = [len(encode(form.render_pages(instruction, texts[:shown]))) for shown in range(EACH + 1)]
        places = {number: range(*between) for number, between in zip(drawn, pairwise(ends), strict=True)}
        queries.append(Query(encode(form.render(instruction, texts, question.text)), places, question.answer))
    return queries


def answers(llm: LLM, queries: Sequence[Query], tokeniser: Tokeniser, title: str) -> list[Answered]:
    """Serve the prompts one after the other, each once the one before is saved."""
    plans, shown, found = executed_plans(llm), set[int](), list[Answered]()
    with progress(title, len(queries)) as step:
        for query in queries:
            (output,) = llm.generate([query.tokens], tokeniser.sampling(None))
            llm.settle()
            plan = plans.pop(output.request_id, None)
            # A plan is dropped for a reason; then everything is computed.
            spans = () if plan is None or output.reuse_reason is not None else plan.spans
            is_held = np.zeros(len(query.tokens), dtype=bool)
            is_held[: output.cached_tokens] = True
            for span in spans:
                is_held[span.target_start : span.target_end] = True
            reused = sum(is_held[place.start : place.stop].mean() >= COVERED for place in query.places.values())
            offered = sum(span.length for span in spans)
            right = exact_match(tokeniser.text(output.outputs[0].token_ids), query.answer)
            found.append(Answered(len(shown & set(query.places)), reused, offered, output.reused_tokens, right))
            shown |= set(query.places)
            step("")
    return found


def executed_plans(llm: LLM) -> dict[int, SemanticKvPlan]:
    """Return the plans that the engine executes from now on, by request; they come in as it runs."""
    plans, runner = dict[int, SemanticKvPlan](), llm.executor.model_runner
    take = runner.plan_source

    def noted(request_id: int) -> SemanticKvPlan | None:
        plan = None if take is None else take(request_id)
        if plan is not None:
            plans[request_id] = plan
        return plan

    runner.plan_source = noted
    return plans


def add_reused(rows: Results, name: str, found: Sequence[Answered], goal: float | None) -> None:
    """Add the share of the last prompts' seen documents that is reused."""
    last = found[-max(1, round(len(found) * COUNTED_SHARE)) :]
    seen, reused = sum(each.seen for each in last), sum(each.reused for each in last)
    offered, kept = sum(each.offered_tokens for each in last), sum(each.reused_tokens for each in last)
    baseline = (
        f"{reused} of {seen} seen documents, of {EACH * len(last)} in the last {len(last)} of {len(found)} prompts; "
        f"{kept / max(1, offered):.3f} of the tokens that plans offered stayed after the check"
    )
    rows.add(name, reused / max(1, seen), "of seen documents", baseline, goal, "higher")


def add_compared(rows: Results, name: str, found: Sequence[Answered], cold: Sequence[Answered]) -> None:
    """Add the difference in right answers to a cold engine's."""
    differences = [float(ours.is_right) - float(theirs.is_right) for ours, theirs in zip(found, cold, strict=True)]
    lost, count = sum(each < 0.0 for each in differences), len(differences)
    bound = f"{lost} of {count} lost, {CONFIDENCE:.0%} upper bound of that share {Broken(lost, count).upper:.4f}"
    baseline = f"cold {sum(each.is_right for each in cold) / len(cold):.3f}; {bound}"
    rows.add(name, sum(differences) / count, "exact match", baseline, -MARGIN, "higher")


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, serve the prompts thrice, print and write. Raises ConfigurationError."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", metavar="PATH_OR_ID", help="default: the shipped model")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N (default: auto, but cpu for the shipped model)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="default: the one in the model's folder")
    parser.add_argument("--generations", type=int, default=GENERATIONS, help="that the profile shall allow")
    parser.add_argument("--name", default="", help="of model and dtype, at the end of the rows' names")
    parser.add_argument("--queries", type=int, default=QUERIES, help=f"prompts; fewer than {QUERIES} are a dry run")
    parser.add_argument("--documents", type=int, default=DOCUMENTS, help="documents to draw from")
    options = parser.parse_args(arguments)
    if options.queries < 1 or options.documents < EACH:
        parser.error(f"at least 1 prompt and {EACH} documents are needed")
    profile = profile_of(options.model, options.profile)
    if profile is None:
        raise ConfigurationError(f"{options.model} has no reuse profile; name one with --profile.")
    runner, model = load(options.model, options.device, options.dtype), Path(options.model or shipped_model())
    tokenizer, tokeniser = runner.tokenizer, Tokeniser(runner, ANSWER_TOKENS)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    queries = queries_of(options.queries, options.documents, form_for(tokenizer), encode)
    pool_tokens = 4 * max(len(query.tokens) for query in queries)
    is_dry = options.queries < QUERIES or options.documents < DOCUMENTS
    rows, name = Results(arguments, str(runner.device), dry=is_dry), f"_{options.name}" if options.name else ""
    with open_cold(model, runner, pool_tokens) as llm:
        cold = answers(llm, queries, tokeniser, "cold")
    with tempfile.TemporaryDirectory(prefix="seen-documents-") as folder:
        for generations in (0, options.generations):
            path = Path(folder) / f"{generations}.json"
            ReuseProfile.read(profile).model_copy(update={"generations": generations}).write(path)
            variables = {"PROFILE": str(path), "LOOKUP_DEADLINE_MS": "5000"}
            with open_llm(model, runner.share(), variables, pool_tokens=pool_tokens) as llm:
                found = answers(llm, queries, tokeniser, f"{generations} generations")
            kind = "" if generations else "_exact_donors"
            add_reused(rows, f"reuse_of_seen_documents{kind}{name}", found, GOAL if generations else None)
    add_compared(rows, f"reuse_of_seen_documents_em_vs_cold{name}", found, cold)
    rows.write(options.json, f"seen_documents{name}")


if __name__ == "__main__":
    main()
