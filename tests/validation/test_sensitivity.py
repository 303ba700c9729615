"""The shipped model's metrics show when placed KV is wrong: keys are not rotated."""

import dataclasses
import random

from kernels.kv_move import kv_move_by_torch
from validation import documents, prompts
from validation.arms import COLD, COLD_AGAIN, EXACT_PREFIX, POSITION_FIX, ArmChoices, arms_of
from validation.cases import Case, Expectation
from validation.measurement import Measurement, ServingSettings
from validation.models import shipped_model
from validation.report import summary

PLACES = 6
SHOWN = (COLD, COLD_AGAIN, POSITION_FIX)
ARMS = arms_of((COLD, COLD_AGAIN, EXACT_PREFIX, POSITION_FIX), ArmChoices(num_layers=8, boundary=2))
kv_move = kv_move_by_torch  # what every move on a CPU ends in


def without_rotation(moves, target, rotation):
    """Keys keep the rotation of the donor's positions."""
    still = dataclasses.replace(rotation, inverse_frequencies=(0.0,) * len(rotation.inverse_frequencies))
    kv_move(moves, target, still)


def replaced_lists(seed):
    """A question on each place, of which the prompt shows two lists, each from another donor; the later one counts."""
    rng = random.Random(seed)
    earlier = [documents.stock_list(rng, rows=14) for _ in range(PLACES)]
    later = [documents.restock(rng, document) for document in earlier]
    donors = tuple(
        prompts.render(opening, [document.text for document in lists], lists[0].questions[0].text)
        for opening, lists in (("Answer briefly.", earlier), ("Use the documents.", later))
    )
    shown = [document.text for document in [*earlier, *later]]
    asked = [rng.choice(document.questions) for document in later]
    text, known = prompts.SYSTEM_PROMPTS[3], (True, Expectation.REUSE, f"{seed}")
    return [
        Case(id, "replaced_lists", "1k", donors, prompts.render(text, shown, question.text), question.answer, *known)
        for id, question in zip((f"{seed}", *(f"{seed}-{index}" for index in range(1, PLACES))), asked, strict=True)
    ]


def test_wrong_kv_is_far_worse_than_position_fix(shipped, monkeypatch):
    """Half of all answers lost, ten times the divergence, and a right answer that is a fifth more surprising."""
    cases, settings = replaced_lists(seed=1), ServingSettings(str(shipped_model()), max_tokens=8)

    def measure(move):
        monkeypatch.setattr("kernels.kv_move.kv_move_by_torch", move)
        samples = Measurement(shipped, cases, settings, ARMS).run().samples
        return {arm: summary(arm, "all", "all", [each for each in samples if each.arm == arm]) for arm in SHOWN}

    intact = measure(kv_move)
    assert intact[COLD]["exact_match"] >= 0.9
    assert intact[COLD_AGAIN]["first_token_kl"] < 1e-6
    assert intact[COLD_AGAIN]["token_agreement"] == 1.0
    right, wrong = intact[POSITION_FIX], measure(without_rotation)[POSITION_FIX]
    assert right["reused_tokens"] == wrong["reused_tokens"] > 0
    assert right["exact_match"] - wrong["exact_match"] >= 0.5
    assert right["token_agreement"] - wrong["token_agreement"] >= 0.3
    assert wrong["first_token_kl"] >= 10 * max(right["first_token_kl"], 0.01)
    assert wrong["perplexity_ratio"] >= 1.2 * right["perplexity_ratio"]
