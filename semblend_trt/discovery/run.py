"""What a lookup finds, and what it may cost."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Run:
    """`length` tokens of `donor_id` from `donor_start` that equal the prompt's from `target_start`."""

    donor_id: str
    donor_start: int
    target_start: int
    length: int

    @property
    def target_end(self) -> int:
        return self.target_start + self.length

    def within(self, begin: int, end: int) -> Run | None:
        """The part of the run inside prompt positions [begin, end), None when there is none."""
        first, last = max(begin, self.target_start), min(end, self.target_end)
        if first >= last:
            return None
        if last - first == self.length:
            return self
        return Run(self.donor_id, self.donor_start + first - self.target_start, first, last - first)


@dataclass(frozen=True, slots=True)
class ScanBounds:
    """What one lookup may cost at most; the newest places of every anchor are tried before more of any.

    `max_repeats`: anchors of one hash kept of one sequence. `max_bucket`: newest donor places tried of one anchor.
    `max_pairs`: places tried in all. `max_extensions`: places compared token by token. `max_compared`: tokens compared,
    after which no further place is. Below them all, every run of the wanted length that is not one repeated token is
    found; above them, what is found is still right.

    So a prompt of n tokens with a anchors costs no more, however many donors hold its text, than two rounds of
    a x (max_bucket + 7) cells read, max_extensions comparisons, and max_compared + n + 2 tokens compared.
    """

    max_repeats: int = 8
    max_bucket: int = 32
    max_pairs: int = 1 << 17
    max_extensions: int = 1024
    max_compared: int = 1 << 22


@dataclass(frozen=True, slots=True)
class ScanWork:
    """What one lookup did cost: the prompt's anchors, cells of the table read for them, places compared token by token,
    and tokens compared."""

    anchors: int = 0
    cells: int = 0
    extensions: int = 0
    compared: int = 0
