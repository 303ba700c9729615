"""The command on the shipped model with a few short prompts: its files, its findings, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from validation import results
from validation.cli import main
from validation.quality import QualityReport, _show, quality_rows

OUTPUT = Path("quality.json")


@pytest.mark.promise("commands", "`make quality` leaves a document with every figure, and shows that the trap bites")
def test_a_run_shows_that_the_header_trap_bites_and_leaves_its_files(tmp_path, capsys):
    places = ["--record", str(tmp_path / "rows"), "--machine", "m", "--name", "shipped"]
    what = ["--arms", "wrapper_without_plan,position_fix", "--families", "reordered,prose,header_trap,unrelated"]
    path = tmp_path / "out" / "quality.json"
    short = ["--groups", "2", "--questions", "1", "--tokens", "400", "--max-tokens", "4", "--output", str(path)]
    assert main(["quality", *short, *what, *places]) == 0
    lines = {(line["family"], line["arm"]): line for line in json.loads(path.read_text())["lines"]}
    assert lines["reordered", "position_fix"]["exact_match"] == lines["reordered", "cold"]["exact_match"] == 1.0
    assert lines["header_trap", "cold"]["exact_match"] == 1.0
    assert lines["header_trap", "position_fix"]["follows_donor"] >= 0.5
    arms = ("cold", "cold_again", "cold_otherwise", "wrapper_without_plan", "position_fix")
    assert {arm for _, arm in lines} == set(arms)
    assert lines["reordered", "position_fix"]["reused_share"] == 1.0
    assert not lines["header_trap", "position_fix"]["non_inferior"]
    assert lines["unrelated", "position_fix"]["fires"] == 0
    assert lines["prose", "position_fix"]["ppl_ratio"] == pytest.approx(1.0, abs=0.02)
    assert all(line["first_token_kl"] < 1e-6 for (_, arm), line in lines.items() if arm in arms[1:4])
    [(place, rows)] = results.read_rows(tmp_path / "rows").items()
    assert place == "m/quality_shipped"
    assert {row.name for row in rows} == {
        *(f"cold_em_shipped_{family}" for family in ("reordered", "header_trap", "unrelated")),
        "position_fix_em_shipped_header_trap",
        *(f"{kind}_em_shipped_{arm}" for kind in ("harmless", "trap") for arm in arms),
        *(f"{kind}_computed_share_shipped_position_fix" for kind in ("harmless", "trap")),
        *("unrelated_fires_shipped", "answer_kl_shipped_position_fix_prose"),
    }
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("unchecked: ")
    assert said[-1].endswith("/quality.json")
    assert len(said) <= 24
    assert max(map(len, said[:-2])) <= 80
    assert '<mark class="reused">' in path.with_suffix(".html").read_text()


ARMS = ("cold", "cold_again", "position_fix", "verified")
# A blind guess loses 2.08 nats a token.
VOCABULARY = 8
KINDS = {"reordered": "harmless", "prose": "harmless", "header_trap": "trap", "unrelated": "none"}


@pytest.fixture
def report(make_sample, measured):
    samples = []
    for arm in ARMS:
        reuses = arm in ("position_fix", "verified")
        for family in KINDS:
            for index in range(8):
                places = reuses and family != "unrelated"
                is_right = not (arm == "position_fix" and family == "header_trap")
                changes = {
                    "exact_match": None if family == "prose" else is_right,
                    "loss": (2.002 if reuses else 2.0) if family == "prose" else None,
                    "offered_tokens": 900 if places else 0,
                    "reused_tokens": (880 if arm == "verified" else 900) if places else 0,
                }
                case_id = f"{family}-{index}"
                samples.append(make_sample(case_id=case_id, workload=family, group=case_id, arm=arm, **changes))
    return QualityReport("tiny", samples, KINDS, {}, measured, {}, VOCABULARY)


def test_rows_have_the_values_and_goals_of_the_run(report):
    rows = {row.name: row for row in quality_rows(report)}
    assert set(rows) == {
        *(f"verified_em_{what}_{family}" for what in ("vs_cold", "bound") for family in KINDS if family != "prose"),
        *("verified_reused_share", "verified_ppl_ratio", "position_fix_em_header_trap", "unrelated_fires"),
        *(f"cold_em_{family}" for family in KINDS if family != "prose"),
        *(f"{kind}_em_{arm}" for kind in ("harmless", "trap") for arm in ARMS),
        *(f"{kind}_computed_share_{arm}" for kind in ("harmless", "trap") for arm in ARMS[2:]),
    }
    assert all(row.holds for row in rows.values())
    assert (rows["verified_em_vs_cold_header_trap"].value, rows["verified_em_vs_cold_header_trap"].goal) == (0.0, -0.01)
    assert rows["verified_reused_share"].value == pytest.approx(880 / 900)
    assert rows["verified_ppl_ratio"].value == pytest.approx(1.002002, abs=1e-6)
    assert (rows["position_fix_em_header_trap"].value, rows["position_fix_em_header_trap"].goal) == (0.0, 0.5)
    assert "cold 1.000" in rows["position_fix_em_header_trap"].baseline
    assert (rows["trap_em_position_fix"].value, rows["harmless_em_position_fix"].value) == (0.0, 1.0)
    assert "-1.0000 from cold, one-sided 95 % lower bound -1.0000; 8 prompts" in rows["trap_em_position_fix"].baseline
    assert rows["trap_computed_share_verified"].value == pytest.approx(0.4)
    assert rows["unrelated_fires"].value == 0
    assert "8 unrelated prompts under each of position_fix, verified" in rows["unrelated_fires"].baseline


@pytest.mark.promise("policies", "A trap that the model cannot answer cold decides nothing in `quality`")
def test_a_trap_that_the_model_cannot_answer_decides_nothing(report, capsys):
    def lost(family, arms):
        is_lost = [each.workload == family and each.arm in arms for each in report.samples]
        pairs = zip(report.samples, is_lost, strict=True)
        return replace(report, samples=[replace(each, exact_match=False) if lost else each for each, lost in pairs])

    assert not _show(lost("header_trap", {"verified"}), OUTPUT)
    unknown = lost("header_trap", {"cold", "position_fix"})
    assert unknown.unknown() == ["header_trap"]
    assert {line.family for line in unknown.kind_lines} == {"harmless", "none"}
    assert _show(lost("header_trap", {"cold", "verified"}), OUTPUT)
    # Answers that are all wrong are alike, and say nothing of reuse.
    found = {each["family"]: each["non_inferior"] for each in lost("header_trap", ARMS).to_dict()["lines"]}
    assert found == {"reordered": True, "prose": True, "header_trap": None, "unrelated": True}
    said = " ".join(capsys.readouterr().out.split())
    assert "decides nothing, as cold rarely answers word for word: header_trap" in said
    assert {line.family for line in lost("reordered", {"cold"}).kind_lines} == {"harmless", "trap", "none"}
    # A family that the model cannot answer gets no row.
    names = {row.name for row in quality_rows(lost("reordered", ARMS))}
    assert {"verified_em_vs_cold_header_trap", "verified_reused_share"} <= names
    assert not {name for name in names if name.endswith("_reordered")}


def test_every_figure_has_the_rounding_floor_beside_it_and_what_shows_nothing_shows_answers(report, capsys):
    kls = {"cold": 0.0, "cold_again": 0.001, "cold_otherwise": 0.002, "position_fix": 0.03}
    said = {"exact_match": False, "contains_reference": False, "answer": "It\nis 4821.", "reference": "48"}
    said |= {"offered_tokens": 900, "reused_tokens": 800}
    cold = [each for each in report.samples if each.arm == "cold" and each.workload != "unrelated"]
    samples = [replace(each, arm=arm, answer_kl=kl, **said) for arm, kl in kls.items() for each in cold]
    judged = replace(report, samples=samples)
    assert judged.floor() == pytest.approx(0.002)
    assert judged.to_dict()["rounding_floor"] == judged.floor("prose")
    _show(judged, OUTPUT)
    said = " ".join(capsys.readouterr().out.split())
    assert said.startswith("unchecked: 0 of 24 answers changed, furthest in reordered, KL 0.03; checked: not measured")
    assert "prose unchecked 0.03 0.002 0.03 0% 0% 0%" in said
    assert f"header_trap cold answered {'; '.join(3 * [repr('It is 4821.') + ', not ' + repr('48')])}" in said
    # The families of marked stock lists keep to exact match.
    [row] = [row for row in quality_rows(judged, "_m") if row.name.startswith("answer_kl")]
    assert (row.name, row.value, row.unit) == ("answer_kl_m_position_fix_prose", pytest.approx(0.03), "nats")
    assert row.baseline.startswith("floor 0.002; ")
