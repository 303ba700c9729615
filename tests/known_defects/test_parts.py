"""Defects of public connectors that show in one part alone."""

import numpy as np
import pytest
import torch

from kernels.kv_move import Move
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from kernels.rope import RopeRotation
from semblend_trt.discovery.span_index import SpanIndex
from tests.kernels.builders import interpret


@pytest.mark.known_defect(16)
@pytest.mark.parametrize(("spans", "tokens"), [(1, 40), (8, 2000)])
def test_a_plan_of_any_size_is_one_launch(monkeypatch, spans, tokens):
    pytest.importorskip("triton", reason="skipped: Triton is not installed")
    if not torch.cuda.is_available():
        interpret(monkeypatch)  # as the kernels' tests import it, whichever comes first
    from kernels.kv_move import triton_move

    launches = []
    monkeypatch.setattr(triton_move, "launch", lambda _, grid, *__, **___: launches.append(grid[0]))
    geometry = KvGeometry(num_layers=28, kv_heads=1, head_dim=16, block_size=16)
    donor = ContiguousKv(torch.zeros(28, 2, 1, tokens, 16))
    blocks = -(-spans * (tokens + 5) // 16)
    target = PagedKv(torch.zeros(blocks, 28, 2, geometry.row_elements), torch.arange(blocks), geometry)
    moves = [Move(donor, 0, number * (tokens + 5), tokens, turn=37) for number in range(spans)]
    triton_move.prepared(moves, target, RopeRotation(tuple(0.1**power for power in range(8)), 16))(range(28), 0)
    assert len(launches) == 1
    assert launches[0] > 0


@pytest.mark.known_defect(36)
def test_ten_thousand_donors_come_and_go_in_the_memory_of_ten_thousand():
    """Donors enter and leave one by one; the next ones take their room, and none is renumbered."""
    count, length = 10_000, 128
    random = np.random.default_rng(0)
    index = SpanIndex()
    tokens = random.integers(0, 32_000, (2 * count, length), dtype=np.int32)
    for number in range(count):
        index.add("space", f"donor-{number}", tokens[number])
    full = index.used_bytes()
    assert full <= 8 * count * length
    for number in range(count, 2 * count):
        assert index.remove(f"donor-{number - count}")
        index.add("space", f"donor-{number}", tokens[number])
    assert len(index._donors) == count
    assert index.used_bytes() <= 1.5 * full
    for number in (count, 2 * count - 1, *random.integers(count, 2 * count, 20)):
        (run,) = index.find("space", tokens[number]).runs
        assert (run.donor_id, run.length) == (f"donor-{number}", length)
    assert index.find("space", tokens[0]).runs == []
