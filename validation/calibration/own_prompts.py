"""The user's own cases for a calibration: which are refused, and which choose and which confirm."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from validation.cases import Case

# Two groups to choose by and two to confirm with: fewer bound nothing.
MIN_CASES = 4


def scored_cases(cases: Sequence[Case], path: Path) -> list[Case]:
    """The cases, to be scored by the perplexity of their references.

    Raises ConfigurationError naming what lacks a reference or a donor, or when they are too few.
    """
    for what, lacking in (
        ("reference", [case.id for case in cases if case.reference is None]),
        ("donor", [case.id for case in cases if not case.donors]),
    ):
        if lacking:
            shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
            raise ConfigurationError(
                f"--prompts {path}: {len(lacking)} of {len(cases)} cases have no {what} ({shown}); a calibration "
                f"compares what donors do to references, so give each case a {what}."
            )
    if len(cases) < MIN_CASES:
        raise ConfigurationError(
            f"--prompts {path} holds {len(cases)} cases; a calibration needs at least {MIN_CASES}."
        )
    return [replace(case, known_answer=False) for case in cases]


def halves(cases: Sequence[Case]) -> tuple[list[Case], list[Case]]:
    """Those that choose and those that confirm: every second case each."""
    return list(cases[::2]), list(cases[1::2])
