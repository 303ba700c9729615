"""Seeded token ids of bytes, and one document behind two instructions."""

from __future__ import annotations

import random


def text(seed: int, length: int) -> list[int]:
    """Random token ids, the same ones for the same arguments."""
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(length)]


INSTRUCTION, OTHER_INSTRUCTION, QUESTION = text(1, 40), text(2, 73), text(3, 20)
DOCUMENT = text(10, 200)
DONOR = INSTRUCTION + DOCUMENT + text(4, 9)
SHIFTED = OTHER_INSTRUCTION + DOCUMENT + QUESTION
