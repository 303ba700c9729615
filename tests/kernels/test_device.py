"""The kernels are found beside a package of their name; a copy to the host holds what the tensor held."""

import os
import sys
from pathlib import Path

import torch

from kernels.device import HostCopy
from tests.server_process import ended

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_checkout_is_found_beside_another_package_that_is_called_kernels(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = 7")
    places = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    code = "import engine_wrapper, validation; from kernels import theirs; from kernels.layout import PagedKv"
    done = ended(sys.executable, "-c", code, cwd=tmp_path, PYTHONPATH=places)
    assert done.returncode == 0, done.stderr


def test_a_copy_is_of_what_the_tensor_held():
    tensor = torch.arange(6, device=DEVICE).view(2, 3)
    whole, turned = HostCopy(tensor), HostCopy(tensor.t())
    tensor.zero_()
    assert whole.read().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert turned.read().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert HostCopy(tensor[:0]).read().shape == (0, 3)
