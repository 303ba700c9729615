"""Cases in the model's own tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.errors import ConfigurationError
from validation import jsonl, prompts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from validation.cases import Case
    from validation.engines import ServedModel

# Scoring a long reference costs one decode step a token and adds little after a few dozen.
MAX_FORCED_TOKENS = 48


@dataclass(frozen=True, slots=True)
class TokenisedCase:
    """Token ids of a case. `forced`: the reference's, at most MAX_FORCED_TOKENS; None where there is no reference."""

    donors: tuple[list[int], ...]
    prompt: list[int]
    forced: tuple[int, ...] | None

    def shared_prefix(self, donor: int) -> int:
        """Tokens that the prompt shares from position 0 on with its donor of that index."""
        pairs = zip(self.donors[donor], self.prompt, strict=False)
        limit = min(len(self.donors[donor]), len(self.prompt))
        return next((position for position, (ours, theirs) in enumerate(pairs) if ours != theirs), limit)


class Tokeniser:
    """The model's tokenizer. Built-in prompts lose our marks for a tokenizer that was not trained on them.

    `stop_token_ids` hold the mark that ends an answer, where the tokenizer knows it.
    """

    def __init__(self, model: ServedModel, max_tokens: int) -> None:
        """`max_tokens`: the longest answer, for which room is kept in the model's context."""
        self._tokenizer: Any = model.tokenizer
        self._context = model.facts.max_positions
        self._max_tokens = max_tokens
        self._answer_room = max(max_tokens, MAX_FORCED_TOKENS)
        end = self._tokenizer.get_vocab().get(prompts.END_MARK)
        self.stop_token_ids: tuple[int, ...] = () if end is None else (end,)

    def tokenise(self, case: Case) -> TokenisedCase:
        """Raises ConfigurationError for a prompt or donor that is empty or does not fit the model's context."""
        plain = case.workload != jsonl.WORKLOAD and not self.stop_token_ids
        donors = tuple(self._encode(donor, plain) for donor in case.donors)
        tokens = TokenisedCase(donors, self._encode(case.prompt, plain), self._forced(case.reference))
        self._check(case, "prompt", tokens.prompt, self._answer_room)
        for number, donor in enumerate(donors, start=1):
            self._check(case, f"donor {number}", donor, 1)
        return tokens

    def sampling(self, forced: Sequence[int] | None) -> SamplingParams:
        """How an answer is taken: greedily up to the longest one, or `forced` token by token; with its logits."""
        if forced is None:
            return SamplingParams(
                max_tokens=self._max_tokens, stop_token_ids=self.stop_token_ids, return_generation_logits=True
            )
        return SamplingParams(
            max_tokens=len(forced), forced_token_ids=tuple(forced), ignore_eos=True, return_generation_logits=True
        )

    def text(self, tokens: Sequence[int]) -> str:
        """An answer's text without the mark that ends it and without space around it."""
        kept = tokens[:-1] if tokens and tokens[-1] in self.stop_token_ids else tokens
        return str(self._tokenizer.decode(kept, skip_special_tokens=True)).strip()

    def _encode(self, text: str, plain: bool) -> list[int]:
        return [int(token) for token in self._tokenizer.encode(prompts.in_plain_text(text) if plain else text)]

    def _forced(self, reference: str | None) -> tuple[int, ...] | None:
        if reference is None:
            return None
        return tuple(self._tokenizer.encode(reference, add_special_tokens=False)[:MAX_FORCED_TOKENS]) or None

    def _check(self, case: Case, name: str, tokens: list[int], room: int) -> None:
        if not tokens:
            raise ConfigurationError(f"Case {case.id}: the {name} has no tokens; write some text.")
        if len(tokens) + room > self._context:
            raise ConfigurationError(
                f"Case {case.id}: the {name} has {len(tokens)} tokens and {room} are to be generated, but the model's "
                f"context holds {self._context}; shorten it or choose another model."
            )
