"""Rotating to a position and moving by the kernels' rotation are one: R(p + s) = R(s) R(p)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_wrapper.trtllm.planned_rows import RopeAngles
from kernels.rope import RopeRotation, rotate_keys


@pytest.mark.parametrize("interleaved", [False, True])
@settings(max_examples=25)
@given(start=st.integers(0, 4000), shift=st.integers(-4000, 4000), planes=st.integers(1, 4))
def test_a_rotation_to_a_position_moves_as_the_kernels_move_keys(
    interleaved: bool, start: int, shift: int, planes: int
) -> None:
    rotation = RopeRotation(tuple(10000.0 ** (-i / planes) for i in range(planes)), 2 * planes, interleaved)
    heads = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(start))
    shift = max(shift, -start)
    positions = torch.arange(start, start + 3)
    moved = rotate_keys(RopeAngles.at(positions, rotation).rotate(heads).transpose(0, 1), shift, rotation)
    direct = RopeAngles.at(positions + shift, rotation).rotate(heads).transpose(0, 1)
    torch.testing.assert_close(moved, direct, atol=1e-5, rtol=0)
    # Channels behind the planes pass.
    assert torch.equal(direct[..., 2 * planes :], heads.transpose(0, 1)[..., 2 * planes :])


def test_rows_that_stay_keep_their_angles() -> None:
    angles = RopeAngles.at(torch.tensor([3, 9, 27]), RopeRotation((1.0, 0.1), 4))
    kept = angles.keep(torch.tensor([0, 2]))
    heads = torch.randn(3, 1, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(kept.rotate(heads[[0, 2]]), angles.rotate(heads)[[0, 2]])
