"""Bytes as JSON's list of integers, compiled: random digits make a writer that branches on them guess wrong."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import entry

_Bytes = npt.NDArray[np.uint8]

# What a byte takes at most: three digits and a comma.
_ROOM = 4
# Each byte's digits and comma, uint8 [256, _ROOM], and how many characters these are.
_NUMBERS = [b"%d," % each for each in range(256)]
_WRITTEN = np.frombuffer(b"".join(number.ljust(_ROOM) for number in _NUMBERS), dtype=np.uint8).reshape(-1, _ROOM)
_LENGTHS = np.array([len(number) for number in _NUMBERS])


@entry
def _write(data: _Bytes, text: _Bytes) -> int:
    """Writes the numbers behind the first character of `text`, uint8 [_ROOM * len(data) + 1]; returns their end."""
    end = 1
    for each in data:
        for at in range(_ROOM):
            text[end + at] = _WRITTEN[each, at]
        end += _LENGTHS[each]
    return end


def as_json_list(data: bytes) -> bytes:
    """What JSON makes of `list(data)`, without blanks."""
    if not data:
        return b"[]"
    text = np.empty(_ROOM * len(data) + 1, dtype=np.uint8)
    end = _write(np.frombuffer(data, dtype=np.uint8), text)
    text[0], text[end - 1] = ord("["), ord("]")
    return text[:end].tobytes()
