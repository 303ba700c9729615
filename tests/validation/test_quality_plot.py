"""The plot is drawn from result rows alone, a panel for each file of a run."""

import pytest

from semblend_trt.errors import ConfigurationError
from validation import results
from validation.cli import main
from validation.quality_plot import Point, draw, noise_floor, points_of


@pytest.fixture
def folder(tmp_path, measured):
    """Rows of two runs, the second of a name with another one's name in front."""
    for name, score in (("tiny", 0.2), ("tiny_fp8", 0.4)):
        values = {
            f"trap_em_{name}_cold": 0.98,
            f"trap_em_{name}_cold_again": 0.95,
            f"trap_em_{name}_epic_16": score,
            f"trap_computed_share_{name}_epic_16": 0.25,
            f"harmless_em_{name}_epic_16": 1.0,
        }
        rows = [results.row(each, value, "", baseline="", measured=measured) for each, value in values.items()]
        results.write_rows(tmp_path / f"quality_{name}.json", rows)
    return tmp_path


@pytest.mark.parametrize(("name", "score"), [("tiny", 0.2), ("tiny_fp8", 0.4)])
def test_a_file_gives_the_arms_of_its_run(folder, name, score):
    assert points_of(folder / f"quality_{name}.json") == [
        Point("cold", 0.98, 1.0),
        Point("cold_again", 0.95, 1.0),
        Point("epic_16", score, 0.25),
    ]


def test_the_command_draws_all_files_again_alike(folder, capsys):
    files = [str(folder / f"quality_{name}.json") for name in ("tiny", "tiny_fp8")]
    plots = [folder / "one.png", folder / "two.png"]
    for plot in plots:
        assert main(["quality-plot", *files, "--plot", str(plot)]) == 0
    assert plots[0].read_bytes() == plots[1].read_bytes()
    assert plots[0].read_bytes().startswith(b"\x89PNG")
    assert str(plots[0]) in capsys.readouterr().out


def test_a_file_without_traps_is_named_and_nothing_is_drawn(folder, capsys):
    other = folder / "other.json"
    other.write_text((folder / "quality_tiny.json").read_text())
    with pytest.raises(ConfigurationError, match=r"other\.json has no row trap_em"):
        points_of(other)
    assert main(["quality-plot", str(other), "--plot", str(folder / "plot.png")]) == 2
    assert "other.json has no row" in capsys.readouterr().err
    assert not (folder / "plot.png").exists()


def test_the_band_is_the_noise_floor_and_at_least_the_margin():
    cold, again = Point("cold", 0.9, 1.0), Point("cold_again", 0.87, 1.0)
    assert noise_floor([cold, again]) == pytest.approx((0.87, 0.93))
    assert noise_floor([cold]) == pytest.approx((0.89, 0.91))
    assert noise_floor([Point("verified", 0.9, 0.2)]) is None


@pytest.mark.parametrize("count", [0, 1, 2, 5])
def test_any_number_of_panels_and_every_arm_can_be_drawn(count):
    arms = ("cold", "exact_prefix", "position_fix", "epic_8", "cacheblend_30", "boundary", "boundary_3", "verified")
    panels = {f"run {index}": [Point(arm, 0.5, 0.5) for arm in arms] for index in range(count)}
    assert draw(panels, "title").startswith(b"\x89PNG")
