"""Times to the first token that a benchmark recorded in result rows."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from validation.replay.observation import Observation
from validation.scoreboard import rows_of

if TYPE_CHECKING:
    from pathlib import Path

    from kernels.results import Row

_COLD = re.compile(r"cold_ttft_(\d+)(k?)_ms")
_SHIFTED = re.compile(r"shifted_ttft_\d+k?_ms")
_TOKENS = re.compile(r"(\d+) tokens reused, (\d+) computed")


def recorded_observations(path: Path) -> list[Observation]:
    """The rows `cold_ttft_SIZE_ms` and `shifted_ttft_SIZE_ms` of a file, in which SIZE counts tokens or k of them.

    Raises ConfigurationError when the file does not hold result rows.
    """
    return [found for each in rows_of(path) if (found := _observation(each)) is not None]


def _observation(row: Row) -> Observation | None:
    cold = _COLD.fullmatch(row.name)
    if cold is not None:
        return Observation(row.value, int(cold[1]) * (1024 if cold[2] else 1), 0)
    tokens = _TOKENS.search(row.baseline) if _SHIFTED.fullmatch(row.name) else None
    return None if tokens is None else Observation(row.value, computed=int(tokens[2]), reused=int(tokens[1]))
