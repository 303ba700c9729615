"""What a replay found: shares of the tokens, runs by their length, documents that recur, and expected times."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.discovery.fingerprint import GUARANTEED_RUN, fingerprint
from validation.estimate.serving import line_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from semblend_trt.discovery.fingerprint import TokenArray
    from semblend_trt.plan import PlanSpan
    from validation.estimate.latency import LatencyModel
    from validation.estimate.serving import Served

# The shortest runs of each class.
RUN_CLASSES = (32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_DOCUMENTS = 20_000
MAX_FIRST_LINES = 3
QUANTILES = {"p50_ms": 0.5, "p95_ms": 0.95}


@dataclass(slots=True)
class Document:
    """Text that was reused behind other text than it was first seen behind. `name` is a digest of its tokens, `tokens`
    the longest run of it, `uses` how often a run was reused, `reused_tokens` the tokens of all these runs, and
    `first_lines` those in which it was seen first."""

    name: str
    first_lines: list[int]
    tokens: int = 0
    uses: int = 0
    reused_tokens: int = 0


class Documents:
    """Documents by the anchor of theirs with the smallest hash, which runs of one text share. Of more than
    MAX_DOCUMENTS, the half of which the least was reused is forgotten."""

    def __init__(self) -> None:
        self._by_anchor: dict[int, Document] = {}

    def add(self, line: int, span: PlanSpan, tokens: TokenArray) -> None:
        """Counts the run of `span` in the prompt `tokens` (int32 [n]) of this line."""
        run = tokens[span.target_start : span.target_end]
        hashes = fingerprint(run, shortest=GUARANTEED_RUN).hashes
        if not len(hashes):
            return
        found = self._by_anchor.get(anchor := int(hashes.min()))
        if found is None:
            name = blake2b(run.tobytes(), digest_size=6).hexdigest()
            found = self._by_anchor[anchor] = Document(name, [line_of(span.donor_id)])
        found.tokens = max(found.tokens, span.length)
        found.uses, found.reused_tokens = found.uses + 1, found.reused_tokens + span.length
        if len(found.first_lines) < MAX_FIRST_LINES and line not in found.first_lines:
            found.first_lines.append(line)
        if len(self._by_anchor) > MAX_DOCUMENTS:
            kept = sorted(self._by_anchor.items(), key=lambda each: -each[1].reused_tokens)[: MAX_DOCUMENTS // 2]
            self._by_anchor = dict(kept)

    def most_reused(self, count: int) -> list[Document]:
        """The `count` documents of which most tokens were reused, the most first."""
        return sorted(self._by_anchor.values(), key=lambda each: (-each.reused_tokens, each.name))[:count]


@dataclass(slots=True)
class Figures:
    """Sums over the prompts that were served, and four numbers of each: its tokens, those that a prefix cache alone
    holds, those that are held with our donors, and the moved ones among these."""

    reasons: Counter[str] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)
    run_tokens: Counter[int] = field(default_factory=Counter)
    documents: Documents = field(default_factory=Documents)
    namespaces: set[str] = field(default_factory=set)
    _tokens: array[int] = field(default_factory=lambda: array("i"))
    _alone: array[int] = field(default_factory=lambda: array("i"))
    _held: array[int] = field(default_factory=lambda: array("i"))
    _moved: array[int] = field(default_factory=lambda: array("i"))

    def add(self, line: int, namespace: str, tokens: TokenArray, served: Served) -> None:
        """Takes in one prompt (int32 [n]) of this line."""
        moved = [span for span in served.spans if not span.exact]
        for span in moved:
            of_class = max(each for each in (0, *RUN_CLASSES) if each <= span.length)
            self.runs[of_class] += 1
            self.run_tokens[of_class] += span.length
            self.documents.add(line, span, tokens)
        if served.reason is not None:
            self.reasons[served.reason] += 1
        self.namespaces.add(namespace)
        self._tokens.append(served.tokens)
        self._alone.append(served.prefix_alone)
        self._held.append(served.prefix + sum(span.length for span in served.spans))
        self._moved.append(sum(span.length for span in moved))

    @property
    def prompts(self) -> int:
        return len(self._tokens)

    def shares(self) -> dict[str, float]:
        """Of all tokens: what a prefix cache alone holds, what donors add to it, and both together. Donors can take a
        little from the prefix cache, into which KV behind moved text does not go."""
        tokens, alone, held = sum(self._tokens), sum(self._alone), sum(self._held)
        return {"prefix_cache": alone / tokens, "added": (held - alone) / tokens, "together": held / tokens}

    def expected_ttft(self, model: LatencyModel) -> dict[str, Any]:
        """Milliseconds to the first token of each prompt alone on the machine of `model`: cold, with a prefix cache,
        with donors, and with donors of which every moved token is checked (where the model knows what that costs).

        `extrapolated_share` of the prompts lie, with donors, outside of what the model was fitted to.
        """
        tokens, alone, held, moved = (
            np.array(each, dtype=np.int64) for each in (self._tokens, self._alone, self._held, self._moved)
        )
        with_donors = model.predict(tokens - held, held)
        times = {
            "cold": model.predict(tokens, np.zeros_like(tokens)),
            "prefix_cache": model.predict(tokens - alone, alone),
            "with_donors": with_donors,
        }
        if model.check_ms is not None:
            times["with_checked_donors"] = with_donors + model.check_ms * moved
        return {
            "model": asdict(model),
            "extrapolated_share": float(model.outside(tokens - held, held).mean()),
            **{name: _summary(each) for name, each in times.items()},
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form of all but documents and times."""
        tokens = sum(self._tokens)
        ends = (*(each - 1 for each in RUN_CLASSES[1:]), None)
        return {
            "prompts": self.prompts,
            "tokens": tokens,
            "longest_prompt": max(self._tokens),
            "namespaces": len(self.namespaces),
            "shares": self.shares(),
            "moved_runs": [
                {
                    "from_tokens": start,
                    "to_tokens": end,
                    "runs": self.runs[start],
                    "tokens": self.run_tokens[start],
                    "share": self.run_tokens[start] / tokens,
                }
                for start, end in zip(RUN_CLASSES, ends, strict=True)
                if self.runs[start]
            ],
            "prompts_without_donors": dict(self.reasons.most_common()),
        }


def _summary(times: npt.NDArray[np.float64]) -> dict[str, float]:
    return {"mean_ms": float(times.mean()), **{name: float(np.quantile(times, q)) for name, q in QUANTILES.items()}}
