"""Texts in the order of their tokens, in which those that begin alike lie side by side."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from semblend_trt.discovery.fingerprint import TokenArray

# Neighbours to look at on each side. One suffices where no text continues another one.
_REACH = 2
_FEWEST_COMPARED = 256


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


class TextOrder:
    """Donors' texts, by namespace and generation. To ask takes some comparisons of arrays, whatever is held."""

    def __init__(self) -> None:
        self._orders: dict[str, dict[int, list[_Text]]] = {}
        self._places: dict[str, tuple[str, int, _Text]] = {}

    def put(self, namespace_key: str, generation: int, donor_id: str, tokens: TokenArray) -> None:
        """Holds a donor's text (int32 [n], never changed), in place of what it was before."""
        self.remove(donor_id)
        text = _Text(donor_id, tokens)
        self._places[donor_id] = namespace_key, generation, text
        insort(self._orders.setdefault(namespace_key, {}).setdefault(generation, []), text)

    def remove(self, donor_id: str) -> None:
        """Nothing happens for a donor without a text."""
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

    def near(self, namespace_key: str, tokens: TokenArray) -> Iterator[Near]:
        """Of each generation some texts, among them the one that begins most like `tokens`."""
        asked = _Text("", tokens)
        for generation, order in self._orders.get(namespace_key, {}).items():
            at = bisect_left(order, asked)
            for each in order[max(0, at - _REACH) : at + _REACH]:
                yield Near(each.donor_id, generation, _equal(each.tokens, tokens), len(each.tokens))

    def __contains__(self, donor_id: object) -> bool:
        return donor_id in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)


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
