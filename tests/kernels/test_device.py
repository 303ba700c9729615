"""Triton serves where it can and is never needed where it cannot; a copy to the host holds what the tensor held."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.device import HostCopy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
from kernels.deviation import FreshRows, deviation
from kernels.kv_move import Move, kv_move
from kernels.layout import ContiguousKv
from kernels.rope import RopeRotation
donor, target = (ContiguousKv(torch.ones(1, 2, 1, 4, 8)) for _ in range(2))
kv_move([Move(donor, 0, 1, 3)], target, RopeRotation((1.0,), 2))
deviation([Move(donor, 0, 1, 3)], FreshRows(*target.tensor[0].transpose(1, 2)), 0, RopeRotation((1.0,), 2))
"""


def run(code, **options):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stderr


def test_the_kernels_work_without_triton():
    run(WITHOUT_TRITON)


@pytest.mark.parametrize("package", ["engine_wrapper", "validation"])  # both import semblend_trt
def test_a_checkout_is_found_beside_another_package_that_is_called_kernels(tmp_path, package):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = 7")
    places = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    code = f"import {package}; from kernels import theirs; from kernels.layout import PagedKv"
    run(code, cwd=tmp_path, env=os.environ | {"PYTHONPATH": places})


def test_a_copy_is_of_what_the_tensor_held():
    tensor = torch.arange(6, device=DEVICE).view(2, 3)
    whole, turned = HostCopy(tensor), HostCopy(tensor.t())
    tensor.zero_()
    assert whole.read().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert turned.read().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert HostCopy(tensor[:0]).read().shape == (0, 3)
