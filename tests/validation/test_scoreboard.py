"""Tables on pages are made from rows, agree with them, and leave the text around them alone."""

import json
from dataclasses import asdict, fields

import pytest

from semblend_trt.errors import ConfigurationError
from validation import results, scoreboard
from validation.cli import main

TEXT = "# Title\n\n<!-- results:cpu_* machine/other -->\n<!-- /results -->\n\nThe end.\n"


@pytest.fixture
def row(measured):
    def make(name="row", value=2.0, goal=1.05):
        rows = results.Results(measured=measured)
        rows.add(name, value, "x", "cold | warm", goal, "higher")
        return rows.rows[0]

    return make


@pytest.fixture
def rows(row):
    return {"machine/first": [row("cpu_a", 3.14159), row("gpu_b", 2.0)], "machine/other": [row("gpu_c", 1.0)]}


def test_a_table_holds_the_rows_that_match(rows):
    table = scoreboard.markdown_table("cpu_* machine/other", rows).splitlines()
    assert table[2:] == [
        "| `cpu_a` | 3.142 x | >= 1.05 | cold \\| warm | machine/first |",
        "| `gpu_c` | **1 x** | >= 1.05 | cold \\| warm | machine/other |",
    ]


def test_a_row_on_a_page_links_to_its_file(rows):
    [line] = scoreboard.markdown_table("cpu_*", rows, "../results").splitlines()[2:]
    assert line == "| `cpu_a` | 3.142 x | >= 1.05 | [machine/first](../results/machine/first.json) |"


def test_rows_of_a_file_can_share_a_line(rows):
    lines = scoreboard.markdown_table("files *_b *_a machine/other", rows, "../results").splitlines()[2:]
    assert lines == [
        "| [machine/first](../results/machine/first.json) | `gpu_b` 2 x (>= 1.05), `cpu_a` 3.142 x (>= 1.05) |",
        "| [machine/other](../results/machine/other.json) | `gpu_c` **1 x** (>= 1.05) |",
    ]


def test_columns_stand_side_by_side_with_a_line_for_what_the_star_stands_for(row):
    rows = {
        "card/one": [row("em_f32_a", 0.95, None), row("em_f32_b", 0.5), row("em_bf16_b", 2.0)],
        "card/two": [row("em_f32_c", 1.5)],
    }
    columns = "float32=card/one/em_f32_* bfloat16=em_bf16_* float32=card/two/em_f32_* goal=em_bf16_*"
    assert scoreboard.markdown_table(columns, rows).splitlines() == [
        "|  | float32 | bfloat16 | goal |",
        "|---|---|---|---|",
        "| `a` | 0.95 | - | - |",
        "| `b` | **0.5** | 2 | >= 1.05 |",
        "| `c` | 1.5 | - | - |",
    ]
    assert "| `-` | **0.5** |" in scoreboard.markdown_table("float32=em_f32_b*", rows)


def test_a_pattern_may_name_the_machine_and_the_file_of_its_rows_and_a_column_of_two_machines_must(row):
    rows = {place: [row("em_a"), row("other")] for place in ("card/one", "processor/one")}
    [line] = scoreboard.markdown_table("card/one/em_*", rows).splitlines()[2:]
    assert (line.split(" | ")[0], line.split(" | ")[-1]) == ("| `em_a`", "card/one |")
    with pytest.raises(ConfigurationError, match="Two rows match"):
        scoreboard.markdown_table("x=em_*", rows)
    assert "| `a` | 2 |" in scoreboard.markdown_table("x=card/one/em_*", rows)


def test_tables_are_replaced_and_the_text_stays(rows):
    once = scoreboard.with_tables(TEXT, rows, "results")
    assert scoreboard.with_tables(once, rows, "results") == once
    assert once.startswith("# Title\n\n<!-- results:cpu_* machine/other -->\n| row |")
    assert once.endswith("<!-- /results -->\n\nThe end.\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("results:cpu_* -->\n", "close it"),
        ("results:tpu_* -->\n<!-- /results -->\n", "No result row matches 'tpu_"),
        ("results:x=cpu_* y=other_* -->\n<!-- /results -->\n", "No result row matches 'other_"),
        *(
            (f"results:x={names} -->\n<!-- /results -->\n", "exactly one")
            for names in ("cpu_*_*", "cpu_a", "cpu_* plain")
        ),
    ],
)
def test_a_marker_without_rows_or_an_end_and_a_column_without_a_star_are_refused(rows, text, problem):
    with pytest.raises(ConfigurationError, match=problem):
        scoreboard.with_tables(f"<!-- {text}", rows, "results")


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (3.0, "3"), (1234567.0, "1,234,567"), (0.000012345, "1.234e-05"), (-0.5, "-0.5")]
)
def test_figures_are_short(value, shown):
    assert scoreboard.figure(value) == shown


def test_the_command_checks_and_rewrites(tmp_path, rows, capsys):
    for place, each in rows.items():
        results.write_rows(tmp_path / "results" / f"{place}.json", each)
    readme, other = tmp_path / "README.md", tmp_path / "results.md"
    readme.write_text(TEXT)
    other.write_text("No table.\n")
    where = ["scoreboard", "--results", str(tmp_path / "results"), "--pages", str(other), str(readme)]
    assert main(where) == 0
    assert "gpu_b" in capsys.readouterr().out
    assert main([*where, "--check"]) == 1
    assert "differ" in capsys.readouterr().err
    assert main([*where, "--write"]) == main([*where, "--check"]) == 0
    assert main(["scoreboard", "--results", str(tmp_path / "missing")]) == 2
    assert main([*where, "--check", "--write"]) == 2


def test_rows_round_trip_with_exactly_the_agreed_fields(tmp_path, row):
    rows = [row(), row("other", 0.5), row("free", 0.5, None)]
    results.write_rows(tmp_path / "cpu-2core" / "run.json", rows)
    assert scoreboard.read_rows(tmp_path) == {"cpu-2core/run": rows}
    written = json.loads((tmp_path / "cpu-2core" / "run.json").read_text())
    assert all(list(each) == [field.name for field in fields(results.Row)] for each in written)
    assert [each.holds for each in rows] == [True, False, True]


@pytest.mark.parametrize(
    "change", ["holds False", "value fast", "better bigger", "extra 1", "date yesterday", "name a b", None]
)
def test_a_file_with_a_bad_row_or_without_rows_is_named(tmp_path, row, change):
    changed = {} if change is None else dict([change.split(" ", 1)])
    changed |= {"holds": False} if "holds" in changed else {}
    (tmp_path / "bad.json").write_text("{" if change is None else json.dumps([asdict(row()) | changed]))
    with pytest.raises(ConfigurationError, match=r"bad\.json"):
        scoreboard.read_rows(tmp_path)


def test_a_machine_has_one_row_of_a_name(tmp_path, row):
    for name in ("one", "two"):
        results.write_rows(tmp_path / "machine" / f"{name}.json", [row()])
    with pytest.raises(ConfigurationError, match="keep one"):
        scoreboard.read_rows(tmp_path)
    with pytest.raises(ConfigurationError, match="not a folder"):
        scoreboard.read_rows(tmp_path / "missing")
