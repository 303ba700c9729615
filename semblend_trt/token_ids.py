"""TokenIds: a prompt's token ids as one block of memory, so that a long prompt travels in a plan at no cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np
import numpy.typing as npt


class TokenIds(Sequence[int]):
    """An immutable sequence of int32 token ids. Equal to every sequence of the same ids; NumPy reads it as an array.

    Raises ValueError for anything but one dimension of integers in 0 .. 2**31 - 1.
    """

    __slots__ = ("_ids",)

    def __init__(self, ids: Iterable[int] | npt.NDArray[Any]) -> None:
        given = np.asarray(ids if isinstance(ids, (np.ndarray, Sequence)) else list(ids))
        if given.ndim != 1 or (given.size and given.dtype.kind not in "iu"):
            raise ValueError(
                f"token ids are {given.dtype} of shape {list(given.shape)}; one dimension of integers is needed"
            )
        if given.size and not 0 <= int(given.min()) <= int(given.max()) < 1 << 31:
            raise ValueError(f"token ids span {given.min()}..{given.max()}; they must lie in 0..{(1 << 31) - 1}")
        self._ids = np.array(given, dtype=np.int32)
        self._ids.setflags(write=False)

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> TokenIds: ...

    def __getitem__(self, index: int | slice) -> int | TokenIds:
        if isinstance(index, slice):
            part = TokenIds.__new__(TokenIds)
            part._ids = self._ids[index]
            return part
        return int(self._ids[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        if copy or (dtype is not None and dtype != np.int32):
            return self._ids.astype(dtype or np.int32)
        return self._ids

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, (str, bytes)):
            return NotImplemented
        return len(other) == len(self) and bool(np.array_equal(self._ids, np.asarray(other)))

    def __hash__(self) -> int:
        return hash(self._ids.tobytes())

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self._ids[:8].tolist()))
        return f"TokenIds([{shown}{', ...' if len(self) > 8 else ''}], {len(self)} in all)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_bytes, (self._ids.tobytes(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenIds:
        return self


def _from_bytes(data: bytes) -> TokenIds:
    ids = TokenIds.__new__(TokenIds)
    ids._ids = np.frombuffer(data, dtype=np.int32)
    return ids
