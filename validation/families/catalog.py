"""The families by name, and the function that writes their cases."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError
from validation.families import controls, datasets, harmless, traps
from validation.families.group import Group

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from validation.cases import Case
    from validation.prompt_form import PromptForm


class Kind(str, Enum):
    """What a correct system does: reuse freely; see that meaning hangs on other text; nothing; the exact prefix."""

    HARMLESS = "harmless"
    TRAP = "trap"
    NONE = "none"
    EXACT = "exact"


@dataclass(frozen=True, slots=True)
class Family:
    """`write` makes the cases of one group. `note` says what to know before reading a figure of the family.

    `is_text`: long references without one right answer, compared by perplexity. `needs_eval_data`: the family reads
    files of a folder of evaluation sets.
    """

    name: str
    kind: Kind
    write: Callable[[Group], list[Case]]
    note: str = ""
    is_text: bool = False
    needs_eval_data: bool = False


FAMILIES = (
    Family("reordered", Kind.HARMLESS, harmless.reordered),
    Family("system_prompt", Kind.HARMLESS, harmless.system_prompt),
    Family("cut_turns", Kind.HARMLESS, harmless.cut_turns),
    Family("prose", Kind.HARMLESS, harmless.prose, is_text=True),
    Family("header_trap", Kind.TRAP, traps.header),
    Family("far_header_trap", Kind.TRAP, traps.far_header),
    Family("mid_sentence_trap", Kind.TRAP, traps.mid_sentence),
    Family("alias_trap", Kind.TRAP, traps.alias),
    Family("pronoun_trap", Kind.TRAP, traps.pronoun),
    Family("unit_trap", Kind.TRAP, traps.unit),
    Family("date_trap", Kind.TRAP, traps.date),
    Family("near_duplicates", Kind.TRAP, traps.near_duplicates),
    Family("planted", Kind.TRAP, traps.planted),
    Family("unrelated", Kind.NONE, controls.unrelated),
    Family("repeat", Kind.EXACT, controls.repeat),
    Family("squad", Kind.HARMLESS, datasets.squad, needs_eval_data=True),
    Family("qmsum", Kind.HARMLESS, datasets.qmsum, is_text=True, needs_eval_data=True),
    Family("squality", Kind.HARMLESS, datasets.squality, is_text=True, needs_eval_data=True),
)


def family(name: str) -> Family:
    """Raises ConfigurationError for an unknown name."""
    for each in FAMILIES:
        if each.name == name:
            return each
    raise ConfigurationError(f"The family {name!r} is unknown; use {', '.join(each.name for each in FAMILIES)}.")


def write_family(
    name: str,
    form: PromptForm,
    count_tokens: Callable[[str], int],
    seed: int,
    groups: int,
    questions: int,
    tokens: int,
    eval_data: Path | None = None,
) -> list[Case]:
    """`groups` x `questions` cases of at most `tokens` tokens each; the cases of a group share their donors.

    Equal arguments write equal cases, and a group does not change when more are asked for. `eval_data`: the folder of
    evaluation sets. Raises ConfigurationError for an unknown family, a count below 1, too few tokens, or evaluation
    data that is missing, cannot be read or holds too little.
    """
    for what, value in (("groups", groups), ("questions", questions)):
        if value < 1:
            raise ConfigurationError(f"A family needs at least one of {what}, not {value}.")
    wanted = family(name)
    if wanted.needs_eval_data and eval_data is None:
        raise ConfigurationError(f"The family {name} reads evaluation sets; name their folder with --eval-data.")
    cases: list[Case] = []
    for index in range(groups):
        group = f"{name}-{tokens}-{index}"
        rng = random.Random(f"{seed}/{group}/{form.name}")
        cases.extend(wanted.write(Group(name, group, form, count_tokens, rng, questions, tokens, eval_data)))
    return cases
