"""From a request's body to the blocks of its trace line: paragraphs by kind, in runs of tokens, as keyed hashes."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.donors.block_kind import BlockKind, kinds_of, main_kind
from semblend_trt.fleet.router.prompts import completion_prompt
from semblend_trt.fleet.telemetry import MAX_BLOCKS, TraceBlock

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from semblend_trt.fleet.router.prompts import PromptReader

# A paragraph keeps the empty lines behind it, so that paragraphs add up to the text.
_PARAGRAPH = re.compile(r".+?(?:\n\s*\n|\Z)", re.DOTALL)
_BY_ROLE = {
    "system": BlockKind.SYSTEM_PROMPT,
    "developer": BlockKind.SYSTEM_PROMPT,
    "assistant": BlockKind.ASSISTANT_HISTORY,
    "tool": BlockKind.TOOL_OUTPUT,
    "function": BlockKind.TOOL_OUTPUT,
}


@dataclass(frozen=True, slots=True)
class Hasher:
    """Keyed hashes, 32 hex digits: equal for equal things of one tenant, and of no use without the key."""

    key: bytes

    @classmethod
    def of(cls, secret: bytes) -> Hasher:
        """The hashes of a router's secret, which tell nothing of the salts that are made of it."""
        return cls(hashlib.blake2b(key=secret[:64], person=b"semblend-trace1", digest_size=32).digest())

    def of_text(self, tenant: str | None, text: str) -> str:
        return self._hash(tenant, b"text", text.encode("utf-8", "surrogatepass"))

    def of_tokens(self, tenant: str | None, token_ids: list[int]) -> str:
        return self._hash(tenant, b"tokens", np.array(token_ids, dtype="<i8").tobytes())

    def _hash(self, tenant: str | None, what: bytes, data: bytes) -> str:
        digest = hashlib.blake2b(key=self.key, digest_size=16)
        whose = b"" if tenant is None else b"\1" + tenant.encode()
        digest.update(len(whose).to_bytes(4, "little") + whose + what + b"\0" + data)
        return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class BlockMaker:
    """Cuts prompts into blocks of at most `block_tokens` tokens, none across the end of a paragraph.

    Tokens are those of each paragraph on its own, without what a chat's template adds; a prompt of token ids is one
    paragraph of unknown kind.
    """

    prompts: PromptReader
    hasher: Hasher
    block_tokens: int
    keep_text: bool

    def blocks(self, body: Mapping[str, Any], tenant: str | None) -> list[TraceBlock]:
        """The first MAX_BLOCKS blocks of a body's prompt. Raises PromptError."""
        return list(islice(self._blocks(body, tenant), MAX_BLOCKS))

    def _blocks(self, body: Mapping[str, Any], tenant: str | None) -> Iterator[TraceBlock]:
        position = 0
        for kind, token_ids in self._paragraphs(body):
            for start in range(0, len(token_ids), self.block_tokens):
                run = token_ids[start : start + self.block_tokens]
                yield TraceBlock(
                    content_hash=self.hasher.of_tokens(tenant, run),
                    semantic_type=kind.value,
                    token_count=len(run),
                    text=self.prompts.text(run) if self.keep_text else None,
                    position=position,
                )
                position += len(run)

    def _paragraphs(self, body: Mapping[str, Any]) -> Iterator[tuple[BlockKind, list[int]]]:
        if "messages" not in body:
            prompt = completion_prompt(body)
            if not isinstance(prompt, str):
                yield BlockKind.OTHER, prompt
                return
        for piece in self.prompts.pieces(body):
            for paragraph in _PARAGRAPH.findall(piece.text):
                yield _kind(piece.role, paragraph), self.prompts.token_ids(paragraph)


def _kind(role: str | None, paragraph: str) -> BlockKind:
    if role in _BY_ROLE:
        return _BY_ROLE[role]
    kind = main_kind(kinds_of(paragraph))
    return BlockKind.USER_QUERY if kind is BlockKind.OTHER and role == "user" else kind
