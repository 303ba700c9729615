"""Plants: prompts that give a victim's text another meaning, and those of them that do so under a check's threshold.

The planter is a white box: it has the model and its reuse profile, and reads of every plant what the check would. Of
those that pass it takes the ones that change most: what is nearer to the victim's own KV changes no answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from engine_wrapper.span_choice import choose
from validation.calibration.deviations import DeviationCollector
from validation.embedded_engine import EmbeddedEngines
from validation.families.catalog import write_family
from validation.models import full_layers_of
from validation.prompt_form import form_for
from validation.tokenised import Tokeniser

if TYPE_CHECKING:
    from engine_wrapper.embedded.model_runner import ModelRunner
    from semblend_trt.reuse_profile import ReuseProfile
    from validation.calibration.deviations import PromptDeviations
    from validation.cases import Case

# Families in which the donor's text in front of what is shared decides what the shared text says.
CONSTRUCTIONS = (
    "planted",
    "header_trap",
    "far_header_trap",
    "mid_sentence_trap",
    "alias_trap",
    "pronoun_trap",
    "unit_trap",
    "date_trap",
)
# The strongest construction is searched so many times as hard, and has so many times the victims.
STRONGEST, MORE_TRIES, MORE_VICTIMS = "planted", 16, 6
# A plant of which more than this share is computed is noticed.
_NOTICED = 0.1
# As short as prompts can be: one pair of lists, so that all that is reused is planted.
_TOKENS = 420
_ANSWER_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Search:
    """How hard the planter searches: so many `tries` of each construction, of which the best become `victims`."""

    tries: int
    victims: int
    seed: int = 0
    # Shorter than the default: a list of nine rows is then reused whole.
    min_span: ClassVar[int] = 48


class Plants:
    """Plants against one model and its profile."""

    def __init__(self, runner: ModelRunner, profile: ReuseProfile, search: Search) -> None:
        self._runner, self._profile, self._search = runner, profile, search
        self._tokeniser = Tokeniser(EmbeddedEngines(runner), _ANSWER_TOKENS)
        self._deviations = DeviationCollector(runner.model, runner.facts, search.min_span)

    def strongest(self) -> list[Case]:
        """Of each construction the victims of the plants that pass the check with the largest deviation."""
        return [case for name in CONSTRUCTIONS for case in self._strongest_of(name)]

    def _strongest_of(self, construction: str) -> list[Case]:
        form, search = form_for(self._runner.tokenizer), self._search
        tries, victims = search.tries, search.victims
        if construction == STRONGEST:
            tries, victims = tries * MORE_TRIES, victims * MORE_VICTIMS
        cases = write_family(construction, form, self._count, search.seed, tries, 1, _TOKENS)
        return sorted(cases, key=self._weakness)[:victims]

    def _count(self, text: str) -> int:
        return len(self._runner.tokenizer(text, add_special_tokens=False).input_ids)

    def _weakness(self, case: Case) -> tuple[bool, float]:
        """Whether the check notices the plant; then its mean deviation, for those that pass the larger the better."""
        found = self._deviations.collect([case], self._tokeniser.tokenise)
        behind = [each.behind(self._profile.head_tokens) for each in found]
        if not behind or not behind[0].lengths:
            return True, float("inf")
        [prompt] = behind
        values = prompt.values[min(full_layers_of(self._profile), len(prompt.values) - 1)]
        is_noticed, mean = self._computed_share(prompt) > _NOTICED, float(values.mean())
        return is_noticed, mean if is_noticed else -mean

    def _computed_share(self, prompt: PromptDeviations) -> float:
        terms = self._profile.terms
        if terms is None or terms.check is None:
            return 0.0
        values = prompt.values[terms.check.layer]
        choice = choose(terms.check, values, prompt.lengths, prompt.exact_tokens, prompt.promised)
        return 1.0 - choice.kept_tokens / int(values.size)
