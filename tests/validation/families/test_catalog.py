"""Every family is seeded, keeps to its budget, and knows its answers. Token by token, what a trap shares with its donor
holds the asked row, and lacks what gives the row its meaning; a plain-English prompt differs, and has its answers."""

import re

import pytest

from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.errors import ConfigurationError
from validation import prompts
from validation.cases import Expectation, equal_start, groups
from validation.families.catalog import FAMILIES, TIMED, Kind, family, write_timed

BUILT_IN = [each.name for each in FAMILIES if not each.needs_eval_data]
# Families whose answer has to be inferred from more than one line.
INFERRED = ("link", "edited_field")
READ_BY_ROW = [each.name for each in FAMILIES if each.marks is not False and not each.is_text]
READ_BY_ROW = [name for name in READ_BY_ROW if name not in INFERRED]
EXPECTED = {Kind.NONE: Expectation.NONE, Kind.EXACT: Expectation.EXACT_PREFIX}


@pytest.mark.parametrize("name", BUILT_IN)
def test_cases_are_seeded_and_those_of_a_group_share_donors_and_ask_differently(writer, name):
    cases = writer.write(name)
    assert writer.write(name) == cases
    assert writer.write(name, groups=1) == cases[:4]
    assert not {case.prompt for case in writer.write(name, seed=4)} & {case.prompt for case in cases}
    assert len(cases) == len({case.id for case in cases}) == 8
    expected = EXPECTED.get(family(name).kind, Expectation.REUSE)
    assert {(case.expects, case.workload) for case in cases} == {(expected, name)}
    for group in groups(cases):
        assert len(group) == len({case.prompt for case in group}) == 4
        assert len({case.donors for case in group}) == 1
        assert [case.is_timed for case in group] == [True, False, False, False]


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("tokens", [700, 1_400])
def test_prompts_and_donors_keep_to_the_budget_and_use_it(writer, name, tokens):
    # A register of more lists than six is not answered.
    least = min(tokens / 3, 500) if name in INFERRED else tokens / 3
    for case in writer.write(name, tokens=tokens):
        assert least <= max(writer.count(text) for text in (*case.donors, case.prompt)) <= tokens


@pytest.mark.parametrize("name", [each for each in BUILT_IN if each in READ_BY_ROW])
def test_the_row_that_is_asked_for_stands_under_the_asked_heading(writer, name):
    for case in writer.write(name):
        assert case.known_answer
        assert answer_in(case.prompt, case.prompt) == case.reference
        if name != "near_duplicates":
            assert (case.donor_answer is not None) == (family(name).kind is Kind.TRAP)
        if case.donor_answer is not None:
            assert case.donor_answer != case.reference
            assert answer_in(case.donors[0], case.prompt) == case.donor_answer


@pytest.mark.parametrize("name", INFERRED)
def test_the_answer_follows_from_what_stands_in_front(writer, name):
    for case in writer.write(name, tokens=1_536):
        assert case.known_answer
        assert counted_at(case.prompt, case.prompt) == case.reference
        assert counted_at(case.donors[0], case.prompt) == case.donor_answer != case.reference


def counted_at(text, prompt):
    """The count in the list whose name belongs to the asked place."""
    asked = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", prompt)
    [owner] = re.findall(rf"\n(List \w+) belongs to {asked[2]}\.", text)
    [document] = [each for each in text.split(prompts.DOCUMENT_MARK)[2:] if f"{owner}." in each]
    return re.search(rf"\n{asked[1]}: (\d+)", document)[1]


def answer_in(text, prompt):
    """What `text`'s list of the place says of the item that `prompt` asks for."""
    asked = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", prompt)
    for document in text.split(prompts.DOCUMENT_MARK)[1:]:
        if re.match(rf"Stock list of {asked[2]}[.,]", document):
            row = re.search(rf"\n{asked[1]}: (\d+)", document)
            return None if row is None else row[1]
    return None


def test_prose_goes_on_as_its_reference_and_repeats_were_served_word_for_word(writer):
    for case in writer.write("prose"):
        assert str(case.reference).startswith(" ")
        assert not case.prompt.endswith(" ")
        assert not case.known_answer
    assert all(case.prompt in case.donors for case in writer.write("repeat"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "riddles"}, "'riddles' is unknown; use reordered, "),
        ({"tokens": 100}, r"leave \d+ for documents; ask for at least"),
        ({"questions": 500}, "but 501 are needed"),
        ({"name": "squad"}, "name their folder with --eval-data"),
    ],
)
def test_what_cannot_be_written_is_refused(writer, changes, message):
    with pytest.raises(ConfigurationError, match=message):
        writer.write(**({"name": "reordered"} | changes))


def test_a_timed_run_has_seeded_prompts_that_fit_the_context(shipped):
    cases = write_timed(shipped, 1, 8_192, full=True)
    assert len({case.id for case in cases}) == len(cases) == 107
    assert write_timed(shipped, 1, 3_000, full=True) == [case for case in cases if case.size != "4096"]
    with pytest.raises(ConfigurationError, match="leaves 1000 for a prompt; bring shorter cases"):
        write_timed(shipped, 1, min(row[-1] for row in TIMED) - 24, full=True)


@pytest.mark.promise(
    "commands",
    "`make validate` serves a part of the full run's prompts, of every kind, and shows headline, figures and gates "
    "on one screen",
)
def test_a_first_look_serves_a_part_of_a_full_run_of_every_kind(shipped):
    cases = write_timed(shipped, 1, 8_192, full=False)
    every = {case.id: case for case in write_timed(shipped, 1, 8_192, full=True)}
    assert {family(case.workload).kind for case in cases} == set(Kind)
    assert all(every[case.id] == case for case in cases)
    assert {case.size for case in cases if case.workload == "reordered"} == {"2048", "4096"}
    assert sum(case.known_answer and case.expects is Expectation.REUSE for case in cases) == 54


# Shortest span that the quality runs reuse; a yardstick list of nine rows is hardly longer.
MIN_SPAN = 48
EXCHANGED = ["header_trap", "planted", "mid_sentence_trap", "alias_trap", "pronoun_trap", "unit_trap", "date_trap"]
ENGLISH = [each.name for each in FAMILIES if each.marks is False]


def runs_of(writer, case):
    index = SpanIndex()
    for number, donor in enumerate(case.donors):
        index.add("namespace", str(number), writer.tokenizer.encode(donor).ids)
    return index.find("namespace", writer.tokenizer.encode(case.prompt).ids).runs


def shared_tokens(writer, case):
    runs = runs_of(writer, case)
    return len({place for run in runs for place in range(run.target_start, run.target_start + run.length)})


def place_of(writer, case, run):
    offsets = writer.tokenizer.encode(case.prompt).offsets
    return slice(offsets[run.target_start][0], offsets[run.target_start + run.length - 1][1])


def shared_row(writer, case):
    """The run that holds the number of the asked row, its text, and the asked place; None when no run does."""
    asked = re.search(r"How many (\w+) are in ([^?<]+)\?<\|a\|>$", case.prompt)
    heading = re.search(rf"{re.escape(prompts.DOCUMENT_MARK)}Stock list of {asked[2]}[.,]", case.prompt)
    row = re.compile(rf"\n{asked[1]}: (\d+)").search(case.prompt, heading.end())
    for run in runs_of(writer, case):
        place = place_of(writer, case, run)
        if place.start <= row.start(1) and row.end(1) <= place.stop:
            return run, case.prompt[place], asked[2]
    return None


@pytest.mark.parametrize("name", [*EXCHANGED, "far_header_trap"])
def test_the_asked_row_is_shared_and_its_heading_is_not(writer, name):
    for case in writer.write(name):
        run, text, place = shared_row(writer, case)
        assert run.length >= MIN_SPAN
        assert place not in text
        # Tokens end where the meaning does: the token in front of the run differs from the donor's.
        prompt, donor = (writer.tokenizer.encode(each).ids for each in (case.prompt, case.donors[0]))
        assert prompt[run.target_start - 1] != donor[run.donor_start - 1]
        assert run.target_start != run.donor_start or name != "header_trap"


def test_a_number_that_differs_is_in_no_shared_text(writer):
    changed = [case for case in writer.write("near_duplicates") if case.donor_answer is not None]
    assert changed
    for case in changed:
        assert shared_row(writer, case) is None
        assert sum(run.length for run in runs_of(writer, case)) > 0.6 * writer.count(case.prompt)
        assert sum(a != b for a, b in zip(case.reference or "", case.donor_answer or "", strict=True)) == 1


def test_unrelated_prompts_share_no_run(writer):
    for case in writer.write("unrelated", groups=6):
        assert all(run.length < MIN_SPAN for run in runs_of(writer, case))


@pytest.mark.parametrize("name", ["reordered", "system_prompt", "cut_turns", "prose"])
def test_harmless_prompts_share_nearly_all_of_their_documents(writer, name):
    for case in writer.write(name, tokens=1_500):
        assert shared_tokens(writer, case) > 0.7 * writer.count(case.prompt)


@pytest.mark.parametrize("name", ENGLISH)
def test_most_of_an_english_prompt_was_seen_before_and_not_at_its_beginning_alone(english, name):
    for case in english.write(name, groups=3, tokens=1_200, seed=5):
        donor, prompt = (english.tokenizer.encode(each).ids for each in (case.donors[0], case.prompt))
        assert shared_tokens(english, case) > 0.6 * len(prompt) > equal_start(donor, prompt)


@pytest.mark.parametrize("name", ENGLISH)
def test_an_english_prompt_holds_the_right_answer_and_a_traps_donor_a_wrong_one(english, name):
    cases = english.write(name, groups=3, tokens=1_200, seed=5)
    assert all(case.known_answer and case.reference in case.prompt for case in cases)
    wrong = [case for case in cases if case.donor_answer is not None]
    assert (len(wrong) > len(cases) / 2) == (family(name).kind is Kind.TRAP)
    assert all(case.donor_answer != case.reference and case.donor_answer in case.donors[0] for case in wrong)


@pytest.mark.parametrize(("name", "premise"), [("link", r"belongs to"), ("edited_field", r"List \w+\.")])
def test_what_draws_a_conclusion_is_shared_and_its_premise_is_not(writer, name, premise):
    for case in writer.write(name, tokens=1_536):
        item = re.search(r"many (\w+)[^|]*\|a\|>$", case.prompt)[1]
        row = re.compile(rf"\n{item}: {case.reference}\b")
        runs = [run for run in runs_of(writer, case) if run.length >= MIN_SPAN]
        texts = [case.prompt[place_of(writer, case, run)] for run in runs]
        assert any(row.search(text) for text in texts)
        assert not any(re.search(premise, text) for text in texts if row.search(text))
