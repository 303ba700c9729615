"""Bytes as JSON's list of integers, compiled: random digits make a writer that branches on them guess wrong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry

_Bytes = npt.NDArray[np.uint8]

# What a byte takes at most: three digits and a comma.
_ROOM = 4
# Each byte's digits and comma in the low half of a number, uint64 [256], and in the high half how many they are.
_WRITTEN = np.array(
    [int.from_bytes(text.ljust(_ROOM), "little") | len(text) << 32 for text in (b"%d," % each for each in range(256))],
    dtype=np.uint64,
)
_OPENED, _CLOSED = b"[]"


@entry
def _write(data: _Bytes, text: _Bytes) -> int:
    """Writes the list to `text`, uint8 [_ROOM * len(data) + 1], of one byte or more; returns its length."""
    text[0] = _OPENED
    end = 1
    for each in data:
        written = _WRITTEN[each]
        for at in range(_ROOM):
            text[end + at] = np.uint8(written >> np.uint64(8 * at))
        end += np.int64(written >> np.uint64(32))
    text[end - 1] = _CLOSED
    return end


def as_json_list(data: bytes) -> memoryview:
    """What JSON makes of `list(data)`, without blanks."""
    if not data:
        return memoryview(b"[]")
    text = np.empty(_ROOM * len(data) + 1, dtype=np.uint8)
    return text.data[: _write(np.frombuffer(data, np.uint8), text)]
