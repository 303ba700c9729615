"""Files appear whole or not at all."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from validation.files import write_json, write_text

if TYPE_CHECKING:
    from pathlib import Path


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "file.txt"
    write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(path.parent.iterdir()) == [path]


def test_json_has_no_values_that_json_lacks(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"a": [float("nan"), 1.5, {"b": float("-inf")}], "c": (1, 2)})
    assert json.loads((tmp_path / "a.json").read_text()) == {"a": [None, 1.5, {"b": None}], "c": [1, 2]}
