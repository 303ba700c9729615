"""What is copied to the host is what the tensor held when the copy was queued."""

import torch

from semblend_trt.streams import HostCopy

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_copy_is_of_what_the_tensor_held():
    tensor = torch.arange(6, device=DEVICE).view(2, 3)
    whole, turned = HostCopy(tensor), HostCopy(tensor.t())
    tensor.zero_()
    assert whole.read().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert turned.read().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert HostCopy(tensor[:0]).read().shape == (0, 3)
