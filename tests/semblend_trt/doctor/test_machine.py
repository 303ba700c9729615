"""Memory that is asked for and not there is told before an engine asks for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from semblend_trt.config import load_settings
from semblend_trt.doctor import machine as rooms
from semblend_trt.doctor.finding import Finding, Status
from semblend_trt.doctor.machine import machine, pool
from semblend_trt.doctor.model import KnownModel, known_model

if TYPE_CHECKING:
    from pathlib import Path

GIB = 1 << 30


@pytest.fixture(params=["host", "card"])
def place(request, monkeypatch, tmp_path: Path) -> str:
    """A container with 64 GiB, in one of the cases with a card of 8 GiB."""
    (tmp_path / "memory.max").write_text(f"{64 * GIB}\n")
    (tmp_path / "other").write_text("max\n")
    monkeypatch.setattr(rooms, "_LIMITS", (tmp_path / "memory.max", tmp_path / "other", tmp_path / "missing"))
    monkeypatch.setattr(rooms.os, "sysconf", lambda name: {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 1 << 26}[name])
    card = SimpleNamespace(name="a card", major=9, minor=0, total_memory=8 * GIB)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: request.param == "card")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)
    return request.param


def told(findings) -> list[Finding]:
    return [each for each in findings if "lower" in each.text]


def test_what_fits_is_not_mentioned(place: str) -> None:
    assert told(machine(load_settings(device_bytes=4 * GIB))) == []


@pytest.mark.parametrize(
    ("setting", "on_card"),
    [("host_bytes", False), ("device_bytes", True), ("snapshot_bytes", True), ("staging_bytes", True)],
)
def test_a_tier_beyond_the_memory_is_told(place: str, setting: str, on_card: bool) -> None:
    found = told(machine(load_settings(**{setting: 65 * GIB})))
    if place == "host" and setting == "staging_bytes":  # there is none without a card
        assert found == []
        return
    (found,) = found
    assert found.status is (Status.FAILED if place == "card" else Status.NOTE)
    assert f"SEMBLEND_{setting.upper()} ({65 * GIB})" in found.text
    assert f"has {8 * GIB if on_card and place == 'card' else 64 * GIB} bytes" in found.text


def test_a_pool_beyond_the_memory_is_told(place: str, tiny_qwen2_path: Path) -> None:
    known = known_model(str(tiny_qwen2_path), "auto")
    assert isinstance(known, KnownModel)
    assert known.dtype is not None

    def look(tokens: object, ranks: int = 1) -> list[Finding]:
        cache = SimpleNamespace(max_tokens=tokens)
        return list(pool(SimpleNamespace(kv_cache_config=cache, tensor_parallel_size=ranks), known))

    most = (8 if place == "card" else 64) * GIB // known.geometry().bytes_per_token(known.dtype)
    assert look(most) == look(None) == list(pool(None, known)) == []
    (found,) = look(most + 1)
    assert (found.status, "max_tokens" in found.text) == (Status.FAILED if place == "card" else Status.NOTE, True)
    assert look(most + 1, 2) == []
    (found,) = look("many")
    assert (found.status, "'many'" in found.text) == (Status.FAILED, True)
