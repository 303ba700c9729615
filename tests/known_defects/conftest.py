"""Engines over one tiny model, each with settings of its own, and a record of what their loads copy."""

import pytest

from semblend_trt.transfer import load as loader
from tests.builders.engine import Engines


@pytest.fixture
def engine(tiny_qwen2_path, tmp_path):
    """Builds engines, with the wrapper and policy position_fix unless other ones are asked for."""
    engines = Engines(tmp_path / "audit.jsonl", model=tiny_qwen2_path, dtype="float32", device="cpu")
    yield lambda *module, **settings: engines(*module, **{"POLICY": "position_fix", "METRICS": "0", **settings})
    engines.shutdown()


@pytest.fixture
def copied(monkeypatch):
    """Tokens of every move that a load makes."""
    lengths, real = [], loader.prepared

    def record(moves, *arguments):
        lengths.extend(move.length for move in moves)
        return real(moves, *arguments)

    monkeypatch.setattr(loader, "prepared", record)
    return lengths
