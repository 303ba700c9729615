"""Files appear whole or not at all."""

import json
from pathlib import Path

from validation.output import beside, write_json


def test_nothing_is_put_beside_what_is_no_file(tmp_path):
    link = tmp_path / "link.json"
    link.symlink_to("/dev/null")
    assert [beside(path, ".md") for path in (Path("/dev/null"), link)] == [None, None]
    (tmp_path / "old.json").touch()
    assert [beside(tmp_path / name, ".md") for name in ("old.json", "old")] == [tmp_path / "old.md"] * 2


def test_json_has_no_values_that_json_lacks(tmp_path):
    write_json(tmp_path / "a.json", {"a": [float("nan"), 1.5, {"b": float("-inf")}], "c": (1, 2)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [None, 1.5, {"b": None}], "c": [1, 2]}
