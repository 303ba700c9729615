"""The families by name, and the functions that write their cases."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from pathlib import Path

from semblend_trt.errors import ConfigurationError
from validation.cases import Case, Expectation
from validation.engines import Engines
from validation.families import built_in, datasets
from validation.families.group import Group, least_tokens
from validation.prompts import PromptForm, form_for


class Kind(str, Enum):
    """What a correct system does: reuse; check, as other text changes the meaning; nothing; keep the exact prefix."""

    HARMLESS = "harmless"
    TRAP = "trap"
    NONE = "none"
    EXACT = "exact"

    @property
    def expects(self) -> Expectation:
        return {Kind.NONE: Expectation.NONE, Kind.EXACT: Expectation.EXACT_PREFIX}.get(self, Expectation.REUSE)


@dataclass(frozen=True, slots=True)
class Family:
    """`write` makes one group's cases. `is_text`: long references without one right answer, compared by perplexity.
    `needs_eval_data`: the family reads a folder of evaluation sets.
    `marks`: whether it is for forms with our marks or for those without; None: for any."""

    name: str
    kind: Kind
    write: Callable[[Group], list[Case]]
    is_text: bool = False
    needs_eval_data: bool = False
    marks: bool | None = None


_marked, _english = partial(Family, marks=True), partial(Family, marks=False)
_published = partial(Family, kind=Kind.HARMLESS, needs_eval_data=True)
FAMILIES = (
    _marked("reordered", Kind.HARMLESS, built_in.reordered),
    _marked("system_prompt", Kind.HARMLESS, built_in.system_prompt),
    _marked("cut_turns", Kind.HARMLESS, built_in.cut_turns),
    Family("prose", Kind.HARMLESS, built_in.prose, is_text=True),
    _marked("header_trap", Kind.TRAP, built_in.header),
    _marked("far_header_trap", Kind.TRAP, built_in.far_header),
    _marked("mid_sentence_trap", Kind.TRAP, built_in.mid_sentence),
    _marked("alias_trap", Kind.TRAP, built_in.alias),
    _marked("pronoun_trap", Kind.TRAP, built_in.pronoun),
    _marked("unit_trap", Kind.TRAP, built_in.unit),
    _marked("date_trap", Kind.TRAP, built_in.date),
    _marked("near_duplicates", Kind.TRAP, built_in.near_duplicates),
    _marked("planted", Kind.TRAP, built_in.planted),
    _marked("link", Kind.TRAP, built_in.link),
    _marked("edited_field", Kind.TRAP, built_in.edited_field),
    _english("volatile", Kind.HARMLESS, built_in.volatile),
    _english("instruction", Kind.HARMLESS, built_in.instruction),
    _english("headings", Kind.TRAP, built_in.headings),
    _english("replaced", Kind.HARMLESS, built_in.replaced),
    _english("inner_edit", Kind.HARMLESS, built_in.inner_edit),
    _english("dropped_turn", Kind.HARMLESS, built_in.dropped_turn),
    _english("other_turn", Kind.HARMLESS, built_in.other_turn),
    _english("order", Kind.HARMLESS, built_in.order),
    _english("two_hop", Kind.TRAP, built_in.two_hop),
    _english("needle", Kind.HARMLESS, built_in.needle),
    Family("unrelated", Kind.NONE, built_in.unrelated),
    Family("repeat", Kind.EXACT, built_in.repeat),
    _published("squad", write=partial(datasets.passages, datasets.squad_texts, known=True)),
    _published("qmsum", write=partial(datasets.passages, datasets.qmsum_texts), is_text=True),
    _published("squality", write=partial(datasets.passages, datasets.squality_texts), is_text=True),
    *(
        _published(name, write=partial(datasets.passages, partial(datasets.summarised_texts, name, noun)), is_text=True)
        for name, noun in (("dialogsum", "Dialogue"), ("xsum", "Article"))
    ),
)


def family(name: str) -> Family:
    """Return the family of this name. Raises ConfigurationError for an unknown one."""
    for each in FAMILIES:
        if each.name == name:
            return each
    raise ConfigurationError(f"The family {name!r} is unknown; use {', '.join(each.name for each in FAMILIES)}.")


@dataclass(frozen=True, slots=True)
class FamilyRequest:
    """`groups` groups of `questions` prompts of up to `tokens` tokens for each family, from group `first` on. Empty
    `names`: all families for the form whose data is there. `form` None: the tokenizer's."""

    names: tuple[str, ...] = ()
    groups: int = 50
    questions: int = 4
    tokens: int = 1_536
    seed: int = 0
    eval_data: Path | None = None
    form: str | None = None
    first: int = 0

    def family_names(self, *, has_marks: bool = True) -> tuple[str, ...]:
        """Return the families by name, for a form with or without our marks. Raises as `family`."""
        if self.names:
            return tuple(family(name).name for name in dict.fromkeys(self.names))
        fitting = (each for each in FAMILIES if each.marks in (None, has_marks))
        return tuple(each.name for each in fitting if self.eval_data is not None or not each.needs_eval_data)


def write_family(name: str, form: PromptForm, count: Callable[[str], int], asked: FamilyRequest) -> list[Case]:
    """Return the cases of one family, of at most `asked.tokens` tokens each; those of a group share their donors. Equal
    arguments write equal cases, and a group is the same whatever `asked.first` is. Raises ConfigurationError for an
    unknown family, too few tokens, or evaluation data that is missing, unreadable or too little."""
    wanted, cases = family(name), list[Case]()
    if wanted.needs_eval_data and asked.eval_data is None:
        raise ConfigurationError(f"The family {name} reads evaluation sets; name their folder with --eval-data.")
    for index in range(asked.first, asked.first + asked.groups):
        group = f"{name}-{asked.tokens}-{index}"
        rng, data = random.Random(f"{asked.seed}/{group}/{form.name}"), asked.eval_data or Path()
        limits = asked.questions, asked.tokens, data, wanted.kind.expects
        cases += wanted.write(Group(name, group, form, count, rng, *limits))
    return cases


def write_cases(model: Engines, asked: FamilyRequest) -> list[Case]:
    """Return all cases, family by family. Raises ConfigurationError for what cannot be written."""
    # Every group measures the same openings.
    form, count = form_for(model.tokenizer, asked.form), cache(partial(_count_tokens, model))
    context = model.facts.max_positions
    if asked.tokens > context:
        raise ConfigurationError(f"--tokens is {asked.tokens}, but the model's context holds {context}; ask for less.")
    cases: list[Case] = []
    for name in asked.family_names(has_marks=form.has_marks):
        # Reuse between unrelated prompts is rare, and they are cheap: so they have more groups.
        groups = math.ceil(2.5 * asked.groups) if family(name).kind is Kind.NONE else asked.groups
        cases += write_family(name, form, count, replace(asked, groups=groups))
    return cases


# What a timed run without own cases serves: families, groups (full run, first look), questions, tokens. A first look
# has enough of every kind for all gates, within a minute on two cores.
TIMED = (
    (("reordered",), 4, 4, 6, 2_048),
    (("reordered",), 2, 1, 6, 4_096),
    (("system_prompt", "cut_turns"), 2, 1, 6, 2_048),
    (("system_prompt", "cut_turns"), 1, 0, 6, 4_096),
    (("prose",), 2, 1, 1, 2_048),
    (("header_trap",), 3, 2, 6, 2_048),
    (("unrelated",), 3, 1, 1, 1_024),
    (("unrelated",), 2, 0, 1, 2_048),
    (("repeat",), 2, 1, 1, 2_048),
)

# What takes their places in forms without our marks.
_PLAIN = {"reordered": "order", "system_prompt": "instruction", "cut_turns": "dropped_turn", "header_trap": "headings"}


def write_timed(model: Engines, seed: int, context: int, full: bool) -> list[Case]:
    """Return TIMED's cases that fit into `context` tokens. Raises ConfigurationError if there are none."""
    fitting = [row for row in TIMED if row[-1] <= context]
    if not fitting:
        raise ConfigurationError(
            f"The built-in prompts have {min(row[-1] for row in TIMED)} tokens, but the model's context "
            f"leaves {context} for a prompt; bring shorter cases with --prompts."
        )
    other_names = {} if form_for(model.tokenizer).has_marks else _PLAIN
    cases: list[Case] = []
    for names, all_groups, few_groups, questions, tokens in fitting:
        if groups := all_groups if full else few_groups:
            asked = tuple(other_names.get(name, name) for name in names)
            cases += write_cases(model, FamilyRequest(asked, groups, questions, tokens, seed))
    return cases


def shortest_prompts(model: Engines, form: str | None) -> int:
    """Return the tokens of the shortest prompts of a family in the model's form, or in the one named."""
    return least_tokens(form_for(model.tokenizer, form), partial(_count_tokens, model))


def _count_tokens(model: Engines, text: str) -> int:
    return len(model.tokenizer.encode(text, add_special_tokens=False))
