"""DonorTexts: the token texts of all donors, which of them can be found, and which others continue.

A text is kept once: what would add little to another donor becomes no donor, and a donor that another one continues
goes when that one is held.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from semblend_trt.discovery.span_index import SpanIndex
from semblend_trt.donors.observer import DonorObserver

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from semblend_trt.config import Settings
    from semblend_trt.discovery.fingerprint import TokenArray
    from semblend_trt.donors.offload import SaveIntent

# Neighbours to look at on each side. One suffices where no text continues another one.
_REACH = 2
_FEWEST_COMPARED = 256
# A text is kept beside another one that begins alike if it adds a span, or one in this many of its tokens.
LITTLE_SHARE = 8


class Near(NamedTuple):
    """A text of `length` tokens, the first `common` of which begin the text that was asked about."""

    donor_id: str
    generation: int
    common: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class _Text:
    donor_id: str
    tokens: TokenArray

    def __lt__(self, other: _Text) -> bool:
        common = _equal(self.tokens, other.tokens)
        if common == min(len(self.tokens), len(other.tokens)):
            return len(self.tokens) < len(other.tokens)
        return bool(self.tokens[common] < other.tokens[common])


class DonorTexts(DonorObserver):
    """Donors' texts by namespace and generation, in the order of their tokens: those that begin alike are neighbours.

    Texts of donors that are being saved are among them; `spans` has those of held donors alone. A look for near texts
    takes some comparisons of arrays, whatever is held.
    """

    def __init__(self, settings: Settings) -> None:
        self.spans = SpanIndex()
        self._settings = settings
        self._orders: dict[str, dict[int, list[_Text]]] = {}
        self._places: dict[str, tuple[str, int, _Text]] = {}
        # Donors that others continue: they go once they can.
        self._continued: dict[str, str] = {}

    def put(self, namespace_key: str, generation: int, donor_id: str, tokens: TokenArray) -> None:
        """Holds a donor's text (int32 [n], never changed), in place of what it was before."""
        self._remove(donor_id)
        text = _Text(donor_id, tokens)
        self._places[donor_id] = namespace_key, generation, text
        insort(self._orders.setdefault(namespace_key, {}).setdefault(generation, []), text)

    def gone(self, donor_id: str) -> None:
        """The donor is not found any more, and its text may be kept again."""
        self.spans.remove(donor_id)
        self._continued.pop(donor_id, None)
        self._remove(donor_id)

    def near(self, namespace_key: str, tokens: TokenArray) -> Iterator[Near]:
        """Of each generation some texts, among them the one that begins most like `tokens`."""
        asked = _Text("", tokens)
        for generation, order in self._orders.get(namespace_key, {}).items():
            at = bisect_left(order, asked)
            for each in order[max(0, at - _REACH) : at + _REACH]:
                yield Near(each.donor_id, generation, _equal(each.tokens, tokens), len(each.tokens))

    def holds(self, namespace_key: str, tokens: TokenArray) -> bool:
        """Whether donors hold all of `tokens`, int32 [n], that would be kept of them, in any tier, as a cold run would
        compute it."""
        held = (near for near in self.near(namespace_key, tokens) if near.donor_id in self.spans)
        return any(not near.generation and self._is_little(len(tokens) - near.common, len(tokens)) for near in held)

    def keeper(self, intent: SaveIntent, near: Iterable[Near], most: int) -> str | None:
        """The donor for which a text of at most `most` tokens need not be kept; None without one.

        It is of the same or a lower generation, and holds all but few of the text's tokens, or its prompt with another
        answer. `near` are texts near this one.
        """
        for each in near:
            if each.donor_id == intent.donor_id or each.generation > intent.generation:
                continue
            is_longer = not self._is_little(each.length - each.common, each.length)
            if self._is_little(most - each.common, most) or (is_longer and each.common >= intent.prompt_tokens):
                return each.donor_id
        return None

    def continued_by(self, intent: SaveIntent, near: Iterable[Near]) -> list[str]:
        """Donors of the same or a higher generation of which the text that these are near holds all but few."""
        others = (each for each in near if each.donor_id != intent.donor_id and each.generation >= intent.generation)
        return [each.donor_id for each in others if self._is_little(each.length - each.common, each.length)]

    def continue_with(self, intent: SaveIntent, near: Iterable[Near]) -> None:
        """The intent's donor is held, and continues those that it holds all but few tokens of."""
        continued = self.continued_by(intent, near)
        self._continued.update(dict.fromkeys(continued, intent.donor_id))
        for older, newer in self._continued.items():
            self._continued[older] = intent.donor_id if newer in continued else newer

    @property
    def continued(self) -> dict[str, str]:
        """Donors, each with the held one that continues it."""
        return {older: newer for older, newer in self._continued.items() if newer in self.spans}

    def __iter__(self) -> Iterator[str]:
        """The donors that are held or being saved."""
        return iter(self._places)

    def _is_little(self, tokens: int, length: int) -> bool:
        """Whether `tokens` that no other donor holds are too few to keep a text of `length` tokens for them."""
        return tokens < min(self._settings.min_span_tokens, self._settings.min_donor_tokens, 1 + length // LITTLE_SHARE)

    def _remove(self, donor_id: str) -> None:
        if donor_id not in self._places:
            return
        namespace_key, generation, text = self._places.pop(donor_id)
        orders = self._orders[namespace_key]
        order = orders[generation]
        del order[order.index(text, bisect_left(order, text))]
        if not order:
            del orders[generation]
        if not orders:
            del self._orders[namespace_key]


def _equal(left: TokenArray, right: TokenArray) -> int:
    """Number of equal tokens at the beginning; few are compared first, since most texts differ early."""
    length, begin, end = min(len(left), len(right)), 0, _FEWEST_COMPARED
    while begin < length:
        differ = left[begin : min(end, length)] != right[begin : min(end, length)]
        first = int(differ.argmax())
        if differ[first]:
            return begin + first
        begin, end = end, end * 16
    return length
