"""Prompts of random token ids: fresh ones, and one document behind changing instructions."""

from __future__ import annotations

import numpy as np

# New tokens of a shifted prompt: an instruction before the document and a question behind it.
INSTRUCTION, QUESTION = 32, 96
# The donor's instruction has another length, so that the document moves.
DONOR_INSTRUCTION = 40
NEW_TOKENS = INSTRUCTION + QUESTION


class Prompts:
    """Draws token ids below `vocabulary`; no two draws share a beginning that a prefix cache could use."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)

    def fresh(self, tokens: int) -> list[int]:
        drawn: list[int] = self._random.integers(0, self._vocabulary, tokens).tolist()
        return drawn

    def document(self, size: int) -> list[int]:
        """The part that a donor and the shifted prompts of `size` tokens share."""
        return self.fresh(size - NEW_TOKENS)

    def donor(self, document: list[int]) -> list[int]:
        return self.fresh(DONOR_INSTRUCTION) + document + self.fresh(NEW_TOKENS - DONOR_INSTRUCTION)

    def shifted(self, document: list[int]) -> list[int]:
        return self.fresh(INSTRUCTION) + document + self.fresh(QUESTION)
