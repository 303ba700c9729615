"""The command line of a benchmark: which runs are dry or refused."""

import json

import pytest

from benchmarks.program import Count, run_counted


@pytest.mark.parametrize(("given", "goal"), [([], 9), (["--tries", "3"], None)])
def test_a_run_of_fewer_than_the_full_count_is_dry(tmp_path, given, goal):
    def run(tries, victims, rows):
        rows.add("tried", tries + victims, "tries", "cold", 9)

    counts = [Count("tries", 5, "how many"), Count("victims", 4, "of each")]
    run_counted({"run": run}, "what it does", counts, [*given, "--json", str(tmp_path)])
    (written,) = json.loads((tmp_path / "run.json").read_text())
    assert (written["value"], written["goal"]) == ((7, None) if given else (9, goal))


def test_too_few_are_refused(capsys):
    with pytest.raises(SystemExit):
        run_counted({}, None, [Count("tries", 5, "how many")], ["--tries", "0"])
    assert "--tries 0 is too few; at least 1 is needed" in capsys.readouterr().err
