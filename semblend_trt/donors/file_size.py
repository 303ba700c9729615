"""FileSize: how many bytes a donor's file takes, known before it is written."""

from __future__ import annotations

from dataclasses import dataclass

PAGE = 4096
_TOKEN_ID_BYTES = 4
# A header holds names and numbers of fixed length, and of each layer a digest in hexadecimal.
_HEADER_FIXED, _HEADER_PER_LAYER = 1536, 65


@dataclass(frozen=True, slots=True)
class FileSize:
    """For KV of `bytes_per_token` bytes in `num_layers` layers."""

    num_layers: int
    bytes_per_token: int

    @property
    def header_bytes(self) -> int:
        """Bytes before the KV, whole pages, so that they begin where a block of the disk does."""
        return _pages(_HEADER_FIXED + _HEADER_PER_LAYER * self.num_layers)

    def of(self, tokens: int) -> int:
        """Bytes on disk of a donor of `tokens` tokens, whole pages."""
        return self.header_bytes + _pages(tokens * (self.bytes_per_token + _TOKEN_ID_BYTES))


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
