"""Evaluation sets are read in their published form, refused in another, and asked about with known references."""

import json

import pytest

from semblend_trt.errors import ConfigurationError
from tests.validation.families.conftest import SHARED
from validation.families import datasets
from validation.families.catalog import FAMILIES, FamilyRequest, write_family
from validation.prompts import SHIPPED

NAMES = [each.name for each in FAMILIES if each.needs_eval_data]
WORDS = "the old clock on the wall of the long hall stood still for years"


def words(text):
    return len(text.split())


def asked(folder, groups=1, questions=2):
    return FamilyRequest(groups=groups, questions=questions, tokens=700, seed=1, eval_data=folder)


@pytest.fixture
def folder(tmp_path):
    """Small files in the published forms."""
    asked = [{"question": f"When did clock {n} ring?", "answers": [{"text": f"{n} past noon"}]} for n in range(30)]
    shown = [f"Clock {n} rang at {n} past noon. {WORDS}." for n in range(30)]
    paragraphs = [{"context": text, "qas": [each]} for text, each in zip(shown, asked, strict=True)]
    squad = {"version": "1.1", "data": [{"title": "Clocks", "paragraphs": paragraphs}]}
    (tmp_path / "squad-dev-v1.1.json").write_text(json.dumps(squad), "utf-8")
    meeting = {
        "meeting_transcripts": [{"speaker": f"S{turn % 3}", "content": f"{turn} {WORDS}"} for turn in range(120)],
        "specific_query_list": [{"query": f"What of {n}?", "answer": f"It {n}."} for n in (0, 90)],
        "general_query_list": [{"query": "Summarize the meeting", "answer": "Clocks."}],
    }
    (tmp_path / "qmsum").mkdir()
    (tmp_path / "qmsum" / "M1.json").write_text(json.dumps(meeting), "utf-8")
    story = {
        "document": "\n \n".join(f"Sentence {number}: {WORDS}." for number in range(120)),
        "questions": [
            {"question_text": f"Why {n}?", "responses": [{"response_text": f"Because {n}."}, {"response_text": "No."}]}
            for n in range(3)
        ],
    }
    (tmp_path / "squality-dev.jsonl").write_text(json.dumps(story) + "\n", "utf-8")
    for name, text, summary in (("dialogsum", "dialogue", "summary1"), ("xsum", "document", "summary")):
        lines = "\n".join([*[WORDS] * 9, *["late " * 90] * 2])
        texts = [{text: f"Clock {n}\n{lines}", summary: f"It is {n}."} for n in range(50)]
        (tmp_path / f"{name}.test.jsonl").write_text("\n".join(map(json.dumps, texts)), "utf-8")
    return tmp_path


@pytest.mark.parametrize("name", NAMES)
def test_the_donor_holds_the_pieces_in_another_order(folder, name):
    cases = write_family(name, SHIPPED, words, asked(folder, 3))
    assert cases == write_family(name, SHIPPED, words, asked(folder, 3))
    assert len(cases) == 6
    for case in cases:
        [donor] = case.donors
        shown, before = (text.partition("<|q|>")[0].split("<|doc|>")[1:] for text in (case.prompt, donor))
        assert sorted(shown) == sorted(before)
        assert shown != before
        assert case.reference
        assert case.known_answer == (name == "squad")
        assert case.reference in case.prompt or not case.known_answer
        assert max(words(case.prompt), words(donor)) <= 700


@pytest.mark.parametrize(
    ("read", "answers"),
    [
        (datasets.qmsum_texts, ["It 0.", "It 90.", "Clocks."]),
        (datasets.squality_texts, ["Because 0.", "Because 1.", "Because 2."]),
    ],
)
def test_every_part_of_a_text_has_the_questions_on_all_of_it(folder, read, answers):
    [text] = read(folder)
    assert " ".join(part.text for part in text).count(WORDS) == 120
    assert all([each.answer for each in part.questions] == answers for part in text)
    assert max(len(part.text) for part in text) < 1_100


@pytest.mark.parametrize(("name", "noun"), [("dialogsum", "Dialogue"), ("xsum", "Article")])
def test_a_text_shows_its_number_and_first_whole_lines_and_is_asked_for_its_summary(folder, name, noun):
    first, second = datasets.summarised_texts(name, noun, folder)
    assert (len(first), len(second)) == (40, 10)
    assert first[7].text == "\n".join([f"{noun} 8", "Clock 7", *[WORDS] * 9])
    [question] = first[7].questions
    assert (question.text, question.answer) == (f"Summarise {noun.lower()} 8 in one sentence.", "It is 7.")
    for case in write_family(name, SHIPPED, words, asked(folder, 3)):
        number = case.prompt.partition("<|q|>")[2].split()[2]
        assert f"<|doc|>{noun} {number}\n" in case.prompt


SQUAD, DIALOGSUM = ("squad", "squad-dev-v1.1.json"), ("dialogsum", "dialogsum.test.jsonl")
XSUM, QMSUM = ("xsum", "xsum.test.jsonl"), ("qmsum", "qmsum/M1.json")
SQUALITY = ("squality", "squality-dev.jsonl")


@pytest.mark.parametrize(
    ("name", "path", "content", "message"),
    [
        (*SQUAD, '{"data": [{"paragraphs": [{"context": ""}]}]}', r"data\.0\.paragraphs\.0"),
        (*SQUAD, None, "cannot be read: No such file"),
        (*DIALOGSUM, None, r"holds no dialogsum\*.jsonl; put the published file there"),
        (*XSUM, '{"summary": "x"}', "xsum.test.jsonl is not of the expected form: document"),
        (*SQUALITY, '{"document": "x", "questions": [{}]}', r"questions\.0\.question_text: Field required"),
        (*QMSUM, "[]", "M1.json is not of the expected form"),
        (*QMSUM, None, "holds no meeting"),
        (*XSUM, "", "No text of xsum answers 2 questions"),
    ],
)
def test_other_files_are_refused(folder, name, path, content, message):
    (folder / path).unlink()
    if content is not None:
        (folder / path).write_text(content, "utf-8")
    with pytest.raises(ConfigurationError, match=message):
        write_family(name, SHIPPED, words, asked(folder))


@pytest.mark.parametrize("name", NAMES)
def test_the_published_files_are_read(writer, name):
    if not (SHARED / "data" / "eval").is_dir():
        pytest.skip("../shared not present")
    for case in writer.write(name, tokens=1_500, eval_data=SHARED / "data" / "eval"):
        assert max(writer.count(text) for text in (*case.donors, case.prompt)) <= 1_500
        assert case.reference
