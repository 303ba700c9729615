"""Next tokens of a batch."""

from __future__ import annotations

import math

import pytest
import torch

from engine_wrapper.embedded.sampling import BatchLogits


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_the_first_of_equal_logits_is_taken_in_every_row(device):
    logits = torch.randn(7, 50_257, generator=torch.Generator().manual_seed(0))
    for row in range(7):
        logits[row, [100 * row + 5, 40_000, 50_256]] = 9.5
    batch = BatchLogits(logits.to(device))
    assert [batch.largest(row) for row in range(7)] == [(9.5, 100 * row + 5) for row in range(7)]


def test_a_row_that_is_not_finite_leaves_its_neighbours_alone():
    logits = torch.zeros(3, 10)
    logits[0, 4], logits[1, 3], logits[2, 7] = 1.0, math.nan, 2.0
    batch = BatchLogits(logits)
    assert batch.largest(0) == (1.0, 4)
    assert math.isnan(batch.largest(1)[0])
    assert batch.largest(2) == (2.0, 7)


def test_the_batch_is_fetched_once(monkeypatch):
    batch = BatchLogits(torch.eye(4))
    fetched = []
    tolist = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: fetched.append(tensor.shape) or tolist(tensor))
    assert [batch.largest(row)[1] for row in range(4)] == [0, 1, 2, 3]
    assert len(fetched) == 1
