"""Which tokens of a prompt could be reused at all: found by comparing it with every donor, without the index."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from semblend_trt.discovery.compiled import inner

if TYPE_CHECKING:
    from collections.abc import Iterable

    from semblend_trt.discovery.fingerprint import TokenArray

RUN_TOKENS = 64

_BASE = np.uint64(0xD6E8FEB86659FD93)
_OUT = np.uint64(pow(0xD6E8FEB86659FD93, RUN_TOKENS, 1 << 64))
_FILTER_BITS = 27
_SPREAD, _TOP = np.uint64(0x9E3779B97F4A7C15), np.uint64(64 - _FILTER_BITS)

Hashes = npt.NDArray[np.uint64]
Filter = npt.NDArray[np.bool_]


@inner
def window_hashes(tokens: TokenArray) -> Hashes:
    """Hashes of all windows of RUN_TOKENS tokens, uint64 [n - RUN_TOKENS + 1]."""
    count = max(0, len(tokens) - RUN_TOKENS + 1)
    hashes = np.empty(count, dtype=np.uint64)
    value = np.uint64(0)
    for at in range(len(tokens)):
        value = value * _BASE + np.uint64(tokens[at])
        if at >= RUN_TOKENS:
            value -= np.uint64(tokens[at - RUN_TOKENS]) * _OUT
        if at >= RUN_TOKENS - 1:
            hashes[at - RUN_TOKENS + 1] = value
    return hashes


@inner
def fill(filter_: Filter, hashes: Hashes) -> None:
    for value in hashes:
        filter_[(value * _SPREAD) >> _TOP] = True


@inner
def passing(filter_: Filter, hashes: Hashes) -> Hashes:
    """The hashes that the filter lets through: all that were filled in, and a few others."""
    kept = np.empty(len(hashes), dtype=np.uint64)
    count = 0
    for value in hashes:
        kept[count] = value
        count += filter_[(value * _SPREAD) >> _TOP]
    return kept[:count]


def reusable_tokens(prompts: list[TokenArray], donors: Iterable[TokenArray]) -> list[npt.NDArray[np.bool_]]:
    """For every prompt, which of its tokens lie in a window of RUN_TOKENS tokens that stands in some donor."""
    hashes = [window_hashes(prompt) for prompt in prompts]
    filter_ = np.zeros(1 << _FILTER_BITS, dtype=np.bool_)
    for each in hashes:
        fill(filter_, each)
    found = np.unique(np.concatenate([passing(filter_, window_hashes(donor)) for donor in donors]))
    masks = []
    for prompt, each in zip(prompts, hashes, strict=True):
        edges = np.zeros(len(prompt) + 1, dtype=np.int64)
        starts = np.flatnonzero(np.isin(each, found))
        np.add.at(edges, starts, 1)
        np.add.at(edges, starts + RUN_TOKENS, -1)
        masks.append(np.cumsum(edges[:-1]) > 0)
    return masks
