"""Keeps blocks that hold approximate KV out of vLLM's exact prefix cache, and out of its KV events.

vLLM publishes a request's blocks while it schedules it, before any KV is loaded. So the limit is set at the lookup, and
holds until the request has ended: what is generated behind approximate KV is approximate too.

Facts: vLLM, `v1/core/block_pool.py`, `BlockPool.cache_full_blocks` and `cache_partial_block` (0.25.1 to 0.32).
"""

from __future__ import annotations

from typing import Any

_FULL, _PARTIAL = "cache_full_blocks", "cache_partial_block"


class BlockPoolGuard:
    """Stands before the pool's own methods. `limit` and `release` by the request's id in vLLM."""

    def __init__(self, pool: Any) -> None:
        """Raises AttributeError for a pool that publishes in another way."""
        self._pool = pool
        self._stock = {_FULL: getattr(pool, _FULL)}
        if hasattr(pool, _PARTIAL):
            self._stock[_PARTIAL] = getattr(pool, _PARTIAL)
        self._exact: dict[str, int] = {}
        setattr(pool, _FULL, self._full)
        if _PARTIAL in self._stock:
            setattr(pool, _PARTIAL, self._partial)

    def limit(self, request_id: str, exact_tokens: int) -> None:
        """From now on only blocks within the request's first `exact_tokens` tokens are published."""
        self._exact[request_id] = exact_tokens

    def release(self, request_id: str) -> None:
        """Forgets the request: all of its KV is exact, or it has ended."""
        self._exact.pop(request_id, None)

    def remove(self) -> None:
        """Leaves the pool as it was found."""
        for name in self._stock:
            vars(self._pool).pop(name, None)

    def _full(
        self,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        exact = self._exact.get(request.request_id)
        if exact is not None:
            num_full_blocks = min(num_full_blocks, exact // block_size)
            if num_full_blocks <= num_cached_blocks:
                return None
            mask = options.get("block_mask")
            if mask is not None:
                options["block_mask"] = mask[: num_full_blocks - num_cached_blocks]
        return self._stock[_FULL](
            request, blocks, num_cached_blocks, num_full_blocks, block_size, *arguments, **options
        )

    def _partial(self, request: Any, *arguments: Any, **options: Any) -> Any:
        if request.request_id in self._exact:
            return None
        return self._stock[_PARTIAL](request, *arguments, **options)
