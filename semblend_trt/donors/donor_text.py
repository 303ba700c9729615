"""DonorText: what a donor is found by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True, slots=True, eq=False)
class DonorText:
    """`tokens`: int32 [n]; `digest` names the prompt that it was made from, so that the same one is not kept twice."""

    namespace_key: str
    tokens: npt.NDArray[np.int32]
    digest: bytes
