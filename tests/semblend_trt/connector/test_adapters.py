"""An adapter is known by its content: neither its name nor its task id tells it from another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from semblend_trt.connector import adapters
from semblend_trt.connector.adapters import Adapters
from semblend_trt.namespace import is_content, is_unknown

if TYPE_CHECKING:
    from pathlib import Path


def adapter(folder: Path, weights: bytes = b"w", config: str = '{"r": 8}') -> str:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    (folder / "adapter_config.json").write_text(config)
    return str(folder)


def engine(*folders: str) -> Adapters:
    return Adapters(SimpleNamespace(lora_config=SimpleNamespace(lora_dir=list(folders))))


def request(task: int | None, path: str | None = None) -> SimpleNamespace:
    return SimpleNamespace(lora_task_id=task, py_lora_path=path)


def of(engine: Adapters, task: int, path: str | None) -> str:
    found = engine.of(request(task, path))
    assert found is not None
    return found


def test_the_base_model_has_none() -> None:
    assert engine().of(request(None)) is None
    assert Adapters(SimpleNamespace(lora_config=None)).of(SimpleNamespace()) is None


def test_equal_content_is_one_adapter_for_every_engine_name_and_task(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "deep" / "two")
    identity = of(engine(one), 1, one)
    assert is_content(identity)
    assert identity == of(engine(one, two), 7, two) == of(engine(one), 3, one)


@pytest.mark.parametrize("change", [{"weights": b"x"}, {"config": '{"r": 16}'}])
def test_other_content_under_the_same_name_and_task_is_another(tmp_path: Path, change: dict) -> None:
    path = adapter(tmp_path / "one")
    before = of(engine(path), 1, path)
    adapter(tmp_path / "one", **change)
    after = of(engine(path), 1, path)
    assert is_content(after)
    assert after != before


def test_what_was_not_read_at_the_start_is_known_for_the_life_of_its_engine(tmp_path: Path) -> None:
    path, running = adapter(tmp_path / "one"), engine()
    for named in (path, "a name", None):
        task = hash(named)
        assert is_unknown(of(running, task, named))
        assert of(running, task, named) == of(running, task, named)
        assert of(running, task, named) != of(engine(), task, named)
    assert of(running, 1, "a name") != of(running, 2, "a name")


def test_another_adapter_under_a_task_that_was_seen_matches_nothing(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one"), adapter(tmp_path / "two", b"x")
    running = engine(one, two)
    first = of(running, 1, one)
    assert is_unknown(of(running, 1, two))
    assert of(running, 1, two) != of(running, 1, two)
    assert of(running, 1, one) == first


def test_an_adapter_that_changed_before_it_was_used_matches_nothing(tmp_path: Path) -> None:
    path = adapter(tmp_path / "one")
    running = engine(path)
    adapter(tmp_path / "one", b"longer")
    assert is_unknown(of(running, 1, path))


def test_one_that_cannot_be_read_matches_nothing(tmp_path: Path) -> None:
    path = str(tmp_path / "none")
    assert is_unknown(of(engine(path), 1, path))
    assert [is_unknown(identity) for identity in engine(path).identities] == [True]


def test_an_adapter_in_one_file_counts_too(tmp_path: Path) -> None:
    path = tmp_path / "legal.nemo"
    seen = set()
    for content in (b"a", b"b"):
        path.write_bytes(content)
        seen.add(of(engine(str(path)), 1, str(path)))
    assert len(seen) == 2


def test_so_many_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "MAX_REMEMBERED", 2)
    running = engine()
    for task in range(4):
        assert (of(running, task, "a name") == of(running, task, "a name")) == (task < 2)
