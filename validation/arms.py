"""The arms of a comparison: engines over the same weights that differ only in what they may reuse.

Names with a number take any: `boundary_4` computes the 4 lowest layers for every token. `epic_16` computes the first
16 tokens of every span (EPIC, arXiv 2410.15332), `cacheblend_15` the 15 % of the tokens that deviate most (CacheBlend,
arXiv 2405.16444)."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from semblend_trt.errors import ConfigurationError
from semblend_trt.policy import CACHEBLEND_LAYER

COLD = "cold"
COLD_AGAIN = "cold_again"
COLD_OTHERWISE = "cold_otherwise"
COLD_OTHER_DTYPE = "cold_other_dtype"
WRAPPER_WITHOUT_PLAN = "wrapper_without_plan"
EXACT_PREFIX = "exact_prefix"
POSITION_FIX = "position_fix"
BOUNDARY = "boundary"
VERIFIED = "verified"

# The bound that a user sets is the one that is measured.
BOUND = ("SEMBLEND_MAX_KL", "SEMBLEND_RISK")
# Cold's other runs, which differ from it by rounding.
FLOOR_ARMS = (COLD_AGAIN, COLD_OTHERWISE)
ALL_NAMES = (
    *(COLD, COLD_AGAIN, COLD_OTHERWISE, WRAPPER_WITHOUT_PLAN, EXACT_PREFIX, POSITION_FIX, "epic_8", "epic_16"),
    *("epic_32", "cacheblend_5", "cacheblend_10", "cacheblend_15", "cacheblend_30", BOUNDARY, VERIFIED),
)


@dataclass(frozen=True, slots=True)
class Arm:
    """`variables` are the connector's settings; None runs without one.

    An `isolated` arm gives each group of cases, with its donors, its own cache salt. Without donors it computes the
    group's first request in full, and further questions find the exact KV. `full_layers`: lowest layers that an
    approximate plan computes for every token. `chunk_tokens`: most tokens of one prompt in a forward. `is_other_dtype`:
    float32 for 16 bit, else bfloat16."""

    name: str
    variables: dict[str, str] | None = None
    serves_donors: bool = True
    isolated: bool = False
    full_layers: int = 0
    chunk_tokens: int | None = None
    is_other_dtype: bool = False


@dataclass(frozen=True, slots=True)
class ArmChoices:
    """What the arms need to know; `profile_layers`: lowest layers that the profile computes for every token."""

    num_layers: int
    boundary: int
    profile: Path | None = None
    profile_layers: int = 0


COLD_ARM = Arm(COLD, serves_donors=False, isolated=True)
# Other forwards for the same answers show what rounding alone changes.
ROUNDING_ARMS = (
    replace(COLD_ARM, name=COLD_AGAIN),
    replace(COLD_ARM, name=COLD_OTHERWISE, chunk_tokens=384),
    replace(COLD_ARM, name=COLD_OTHER_DTYPE, is_other_dtype=True),
)
_WITHOUT_PLAN = replace(COLD_ARM, name=WRAPPER_WITHOUT_PLAN, variables={"SEMBLEND_POLICY": "exact"})
_REFERENCES = {arm.name: arm for arm in (COLD_ARM, *ROUNDING_ARMS, _WITHOUT_PLAN, Arm(EXACT_PREFIX))}


def is_reusing(name: str) -> bool:
    """Return whether the named arm may place donors' KV."""
    return name not in _REFERENCES


def names_of_run(asked: str | None, policy: str, choices: ArmChoices, full: bool) -> tuple[str, ...]:
    """Return the arms of a timed run, always with those that gates and comparisons read. Raises ConfigurationError."""
    if not is_reusing(policy):
        raise ConfigurationError(f"--policy is {policy}, an arm that reuses no donor; name one that does.")
    default = (POSITION_FIX, *((BOUNDARY,) if full else ()), *(() if choices.profile is None else (VERIFIED,)))
    names = default if asked is None else names_of(asked)
    return tuple(dict.fromkeys((COLD, COLD_AGAIN, EXACT_PREFIX, *names, *names_of(policy, "--policy"))))


def names_of(text: str, option: str = "--arms") -> tuple[str, ...]:
    """Split names at commas or blanks and add cold and cold_again; `all` means every arm. Raises ConfigurationError."""
    asked = dict.fromkeys(name for name in re.split(r"[,\s]+", text) if name)
    if "all" in asked:
        return ALL_NAMES
    for name in asked:
        if name not in ALL_NAMES and not re.fullmatch(r"(boundary|epic|cacheblend)_[1-9][0-9]{0,3}", name):
            raise ConfigurationError(
                f"{option} names {name!r}; use {', '.join(ALL_NAMES)}, boundary_N, epic_N, cacheblend_N or all."
            )
    return tuple(dict.fromkeys((COLD, COLD_AGAIN, *asked)))


def arms_of(names: Iterable[str], choices: ArmChoices) -> tuple[Arm, ...]:
    """Return the named arms in their order; raises as `arm_of`."""
    return tuple(arm_of(name, choices) for name in names)


def arm_of(name: str, choices: ArmChoices) -> Arm:
    """Return the named arm. Raises ConfigurationError for one that the model cannot have."""
    if name in _REFERENCES:
        return _REFERENCES[name]
    if name == VERIFIED and choices.profile is None:
        raise ConfigurationError(
            f"The arm {VERIFIED} needs a reuse profile of this model; make one with `calibrate`, or name it with "
            "--profile."
        )
    policy, _, number = name.partition("_")
    variables, full_layers = {"SEMBLEND_POLICY": name if name == POSITION_FIX else policy}, 0
    value = int(number) if number.isdecimal() else choices.boundary
    if name == VERIFIED:
        variables["SEMBLEND_PROFILE"], full_layers = str(choices.profile), choices.profile_layers
        variables |= {each: os.environ[each] for each in BOUND if each in os.environ}
    elif policy == "epic":
        variables["SEMBLEND_EPIC_TOKENS"] = str(value)
    elif policy == "cacheblend":
        if value > 100:
            raise ConfigurationError(f"The arm {name} asks for {value} % of the tokens; at most 100 are there.")
        variables["SEMBLEND_CACHEBLEND_SHARE"] = f"{value / 100:g}"
        full_layers = min(CACHEBLEND_LAYER, choices.num_layers)
    elif policy == BOUNDARY:
        if value > choices.num_layers:
            raise ConfigurationError(f"The arm {name} asks for {value} layers; the model has {choices.num_layers}.")
        variables["SEMBLEND_RECOMPUTE_BOUNDARY_LAYER"], full_layers = str(value), value
    return Arm(name, variables, full_layers=full_layers)
