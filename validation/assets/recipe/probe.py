"""An auxiliary task: after a few layers, every token of a stock list must tell which place its list is about.

Without it a model this small binds rows to their header in its middle layers only, and a check of fresh against
reused keys and values in the first layers would see nothing. Large models bind early; this one is taught to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from validation import prompts

from .tokenizer import SPECIAL_TOKENS

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DOCUMENT_ID = SPECIAL_TOKENS.index(prompts.DOCUMENT_MARK)
# Offsets from the document mark: `Stock list of` fills 1 to 3, the place stands at 4 to 6 and a little beyond.
_PLACE_OFFSETS = (4, 5, 6)
_FIRST_ROW_OFFSET = 8
_STRIDE = 4


class PlaceProbe(nn.Module):
    """Linear heads that are thrown away after training."""

    def __init__(self, width: int, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._first_id: int = tokenizer.encode("Stock list of").ids[0]
        self.heads = nn.ModuleList(nn.Linear(width, tokenizer.get_vocab_size()) for _ in _PLACE_OFFSETS)

    def labels(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return place tokens, shape (offsets, rows, length), and which tokens stand in rows of a stock list."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device).expand_as(ids)
        marks = torch.where(ids < len(SPECIAL_TOKENS), positions, 0).cummax(dim=1).values
        opening = ids.gather(1, marks) == _DOCUMENT_ID
        stock = ids.gather(1, (marks + 1).clamp(max=length - 1)) == self._first_id
        places = [ids.gather(1, (marks + offset).clamp(max=length - 1)) for offset in _PLACE_OFFSETS]
        return torch.stack(places), opening & stock & (positions - marks >= _FIRST_ROW_OFFSET)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a fourth of the tokens; hidden: (rows, length, width), ids: (rows, length)."""
        places, inside = self.labels(ids)
        scale = inside[:, ::_STRIDE].flatten().float()
        total = scale.new_zeros(())
        for head, place in zip(self.heads, places, strict=True):
            logits = head(hidden[:, ::_STRIDE]).float().flatten(0, 1)
            each = functional.cross_entropy(logits, place[:, ::_STRIDE].flatten(), reduction="none")
            total = total + (each * scale).sum() / scale.sum().clamp(min=1.0)
        return total / len(self.heads)
