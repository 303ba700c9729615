"""Rows of figures: what they say of themselves is true, a dry run promises nothing, and all is shown and written."""

import json
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from semblend_trt.errors import ConfigurationError
from validation import results
from validation.arguments import beside
from validation.cli import main
from validation.results import Measured, Results, command, describe, versions

MEASURED = Measured("python -m benchmark", {"name": "cpu-2core"}, {"torch": "2.13.0"}, "2026-11-21")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match=f"The row a has the value {value}"):
        Results(measured=MEASURED).add("a", value, "x", "cold")


def test_a_run_is_shown_as_it_goes_and_written_at_its_end(tmp_path, capsys):
    results = Results(measured=MEASURED)
    results.add("fast", 4, "x", "cold", 2, "higher")
    results.add("slow", 4, "ms", "cold", 2)
    assert "fast" in (shown := capsys.readouterr().out)
    assert [line.endswith("MISSED") for line in shown.splitlines()] == [False, True]
    earlier = tmp_path / "machine" / "run.json"
    earlier.parent.mkdir()
    earlier.write_text("earlier")
    with earlier.open() as reading:
        results.write(tmp_path / "machine", "run")
        assert reading.read() == "earlier"  # a file that is being read is replaced, not written into
    assert "cold" in capsys.readouterr().out
    written = json.loads((tmp_path / "machine" / "run.json").read_text())
    assert [(each["name"], each["goal"], each["holds"]) for each in written] == [("fast", 2, True), ("slow", 2, False)]
    assert {each["command"] for each in written} == {"python -m benchmark"}


def test_a_dry_run_has_no_goals_and_needs_a_folder_to_be_written(tmp_path):
    for dry in (True, False):
        results = Results(dry=dry, measured=MEASURED)
        results.add("slow", 4, "ms", "cold", 2)
        assert results.rows[0].goal == (None if dry else 2)
        results.write(None, f"dry-{dry}", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["dry-False.json"]


def test_a_row_tells_how_it_was_measured():
    told = Results(["--sizes", "1", "a b"], "cpu").measured
    assert told.command == command(["--sizes", "1", "a b"])
    assert told.command.endswith("--sizes 1 'a b'")
    assert told.versions == versions()
    assert "torch" in told.versions
    assert (told.machine["gpu"], told.machine["name"]) == (None, f"cpu-{told.machine['cores']}core")
    assert describe("cpu", "mine")["name"] == "mine"


def test_nothing_is_put_beside_what_is_no_file(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to("/dev/null")
    assert [beside(path, ".md") for path in (Path("/dev/null"), link)] == [None, None]
    (tmp_path / "old.json").touch()
    assert [beside(tmp_path / name, ".md") for name in ("old.json", "old")] == [tmp_path / "old.md"] * 2


def test_json_has_no_values_that_json_lacks(tmp_path):
    results.write_json(tmp_path / "a.json", {"a": [float("nan"), 1.5, {"b": float("-inf")}], "c": (1, 2)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [None, 1.5, {"b": None}], "c": [1, 2]}


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


def test_a_table_holds_the_rows_that_match_and_on_a_page_their_files_which_can_have_a_line_each(rows):
    table = results.markdown_table("cpu_* machine/other", rows).splitlines()
    assert table[2:] == [
        "| `cpu_a` | 3.142 x | >= 1.05 | cold \\| warm | machine/first |",
        "| `gpu_c` | **1 x** | >= 1.05 | cold \\| warm | machine/other |",
    ]
    [line] = results.markdown_table("cpu_*", rows, "../results").splitlines()[2:]
    assert line == "| `cpu_a` | 3.142 x | >= 1.05 | [machine/first](../results/machine/first.json) |"
    lines = results.markdown_table("files *_b *_a machine/other", rows, "../results").splitlines()[2:]
    assert lines == [
        "| [machine/first](../results/machine/first.json) | `gpu_b` 2 x (>= 1.05), `cpu_a` 3.142 x (>= 1.05) |",
        "| [machine/other](../results/machine/other.json) | `gpu_c` **1 x** (>= 1.05) |",
    ]


@pytest.mark.promise("commands", "The result tables agree with the...")
def test_columns_stand_side_by_side_with_a_line_for_what_the_star_stands_for(row):
    one = [row("em_f32_a", 0.95, None), row("em_f32_b", 0.5), row("em_bf16_b", 2.0)]
    rows = {"card/one": one, "card/two": [row("em_f32_c", 1.5)]}
    columns = "float32=card/one/em_f32_* bfloat16=em_bf16_* float32=card/two/em_f32_* goal=em_bf16_*"
    assert results.markdown_table(columns, rows).splitlines() == [
        "|  | float32 | bfloat16 | goal |",
        "|---|---|---|---|",
        "| `a` | 0.95 | - | - |",
        "| `b` | **0.5** | 2 | >= 1.05 |",
        "| `c` | 1.5 | - | - |",
    ]
    assert "| `-` | **0.5** |" in results.markdown_table("float32=em_f32_b*", rows)


def test_a_pattern_may_name_the_machine_and_the_file_of_its_rows_and_a_column_of_two_machines_must(row):
    rows = {place: [row("em_a"), row("other")] for place in ("card/one", "processor/one")}
    [line] = results.markdown_table("card/one/em_*", rows).splitlines()[2:]
    assert (line.split(" | ")[0], line.split(" | ")[-1]) == ("| `em_a`", "card/one |")
    with pytest.raises(ConfigurationError, match="Two rows match"):
        results.markdown_table("x=em_*", rows)
    assert "| `a` | 2 |" in results.markdown_table("x=card/one/em_*", rows)


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
        results.with_tables(f"<!-- {text}", rows, "results")


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (3.0, "3"), (1234567.0, "1,234,567"), (0.000012345, "1.234e-05"), (-0.5, "-0.5")]
)
def test_figures_are_short(value, shown):
    assert results.figure(value) == shown


@pytest.mark.promise("commands", "The result tables agree with the recorded rows")
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
    assert results.read_rows(tmp_path) == {"cpu-2core/run": rows}
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
        results.read_rows(tmp_path)


def test_a_machine_has_one_row_of_a_name(tmp_path, row):
    for name in ("one", "two"):
        results.write_rows(tmp_path / "machine" / f"{name}.json", [row()])
    with pytest.raises(ConfigurationError, match="keep one"):
        results.read_rows(tmp_path)
    with pytest.raises(ConfigurationError, match="not a folder"):
        results.read_rows(tmp_path / "missing")
