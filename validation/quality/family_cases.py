"""The cases of a quality run: families by name, for the model's own prompt form and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation.families.catalog import FAMILIES, Kind, family, write_family
from validation.families.group import least_tokens
from validation.prompt_form import form_for

if TYPE_CHECKING:
    from pathlib import Path

    from validation.cases import Case
    from validation.engines import ServedModel

# A wrong fire is rare, and an unrelated prompt is cheap: so many more groups of them.
_UNRELATED_GROUPS = 2.5


@dataclass(frozen=True, slots=True)
class FamilyRequest:
    """`groups` groups of `questions` prompts of at most `tokens` tokens for each family.

    `names` empty stands for all families whose data is there; `form` None for the one that the tokenizer knows.
    """

    names: tuple[str, ...] = ()
    groups: int = 50
    questions: int = 4
    tokens: int = 1_536
    seed: int = 0
    eval_data: Path | None = None
    form: str | None = None

    def family_names(self) -> tuple[str, ...]:
        """The families by name. Raises ConfigurationError for an unknown one."""
        if self.names:
            return tuple(family(name).name for name in dict.fromkeys(self.names))
        return tuple(each.name for each in FAMILIES if self.eval_data is not None or not each.needs_eval_data)


def write_cases(model: ServedModel, asked: FamilyRequest) -> list[Case]:
    """All cases, family by family. Raises ConfigurationError for what cannot be written."""
    form, count = form_for(model.tokenizer, asked.form), partial(_count, model)
    if asked.tokens > model.facts.max_positions:
        raise ConfigurationError(
            f"--tokens is {asked.tokens}, but the model's context holds {model.facts.max_positions}; ask for less."
        )
    cases: list[Case] = []
    for name in asked.family_names():
        is_control = family(name).kind is Kind.NONE
        groups = math.ceil(_UNRELATED_GROUPS * asked.groups) if is_control else asked.groups
        cases += write_family(name, form, count, asked.seed, groups, asked.questions, asked.tokens, asked.eval_data)
    return cases


def kinds_of(cases: list[Case]) -> dict[str, str]:
    """The kind of each family that occurs."""
    return {name: family(name).kind.value for name in dict.fromkeys(case.workload for case in cases)}


def shortest_prompts(model: ServedModel, form: str | None) -> int:
    """Tokens of the shortest prompts of a family in the model's form, or in the one named."""
    return least_tokens(form_for(model.tokenizer, form), partial(_count, model))


def _count(model: ServedModel, text: str) -> int:
    return len(model.tokenizer.encode(text, add_special_tokens=False))
