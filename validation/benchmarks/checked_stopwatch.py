"""Where the time to the first token of a checked plan goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine_wrapper.course import Checkpoint
from validation.benchmarks.stopwatch import Stopwatch, between, mark

if TYPE_CHECKING:
    import torch

PARTS = ("lookup", "move", "check", "read_back", "above", "rest")


class CheckedStopwatch(Stopwatch):
    """Times the parts of a forward as well, each from the stream reaching it to the stream having done it.

    `check`: the layers for all tokens and the comparison; `read_back`: from the deviations on the card to the first
    launch of what they decided, while the card idles; `above`: the layers for the tokens that stay.
    """

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self._decide = decide = Checkpoint.decide

        def timed(checkpoint: Checkpoint, deviations: torch.Tensor) -> Any:
            begin = mark(self._cuda)
            decided = decide(checkpoint, deviations)
            self._marks.setdefault("read_back", [begin, mark(self._cuda)])
            return decided

        setattr(Checkpoint, "decide", timed)  # noqa: B010 - mypy refuses the assignment

    def read(self, ttft_ms: float) -> dict[str, float]:
        """Milliseconds of each of PARTS. Raises KeyError when no plan was checked."""
        forward, read_back = self._marks["forward"][0], self._marks["read_back"][0]
        parts = super().read(ttft_ms)
        check = between(forward, read_back)
        above = parts.pop("forward") - check - parts["read_back"]
        return parts | {"check": check, "above": above, "rest": parts["rest"] + parts["read_back"]}

    def remove(self) -> None:
        super().remove()
        setattr(Checkpoint, "decide", self._decide)  # noqa: B010
