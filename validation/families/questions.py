"""Choosing questions on documents."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from validation.documents import Document, Question


def ask(rng: random.Random, shown: Sequence[Document], count: int) -> list[Question]:
    """`count` different questions, from different documents as far as there are enough.

    Raises ConfigurationError when the documents have fewer questions.
    """
    pools = [rng.sample(document.questions, len(document.questions)) for document in shown]
    rng.shuffle(pools)
    if count > sum(map(len, pools)):
        raise ConfigurationError(
            f"The documents of one group answer {sum(map(len, pools))} questions, but {count} are needed; "
            "ask fewer questions a group or for longer prompts."
        )
    chosen: list[Question] = []
    while len(chosen) < count:
        for pool in pools:
            if pool and len(chosen) < count:
                chosen.append(pool.pop())
    return chosen
