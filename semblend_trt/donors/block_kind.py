"""BlockKind: what a piece of a prompt is, and how much it is worth keeping."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class BlockKind(str, Enum):
    """Kinds of prompt text. OTHER is text that no rule knows, and every donor before it has been read."""

    SYSTEM_PROMPT = "system_prompt"
    TEMPLATE = "template"
    RETRIEVED_CONTEXT = "retrieved_context"
    TOOL_OUTPUT = "tool_output"
    CODE = "code"
    LEGAL_EVIDENCE = "legal_evidence"
    ASSISTANT_HISTORY = "assistant_history"
    USER_QUERY = "user_query"
    OTHER = "other"


# The SemanticKV system's default weights. It has none for legal evidence, which is retrieved text as well.
DEFAULT_WEIGHTS: Mapping[BlockKind, float] = MappingProxyType(
    {
        BlockKind.SYSTEM_PROMPT: 2.4,
        BlockKind.TEMPLATE: 2.0,
        BlockKind.CODE: 1.6,
        BlockKind.RETRIEVED_CONTEXT: 1.4,
        BlockKind.LEGAL_EVIDENCE: 1.4,
        BlockKind.TOOL_OUTPUT: 1.1,
        BlockKind.ASSISTANT_HISTORY: 1.0,
        BlockKind.OTHER: 0.8,
        BlockKind.USER_QUERY: 0.7,
    }
)

KindMix = Mapping[BlockKind, float]
UNREAD: KindMix = MappingProxyType({BlockKind.OTHER: 1.0})


def main_kind(mix: KindMix) -> BlockKind:
    """The kind with the largest share, the first of them by the order of `BlockKind`."""
    return max(BlockKind, key=lambda kind: mix.get(kind, 0.0))


def mean_weight(mix: KindMix) -> float:
    """The default weights' mean over the shares of `mix`, which add up to 1."""
    return sum(share * DEFAULT_WEIGHTS[kind] for kind, share in mix.items())
