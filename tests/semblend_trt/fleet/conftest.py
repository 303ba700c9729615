"""Namespaces and donors that the fleet's tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from semblend_trt.namespace import CacheNamespace

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt


@pytest.fixture(scope="session")
def base_namespace() -> CacheNamespace:
    """An engine's namespace, bound to no request."""
    return CacheNamespace(
        model="tiny",
        model_revision="r1",
        tokenizer="tiny",
        tokenizer_revision="t1",
        kv_layout="paged",
        block_size=32,
        kv_dtype="bfloat16",
        cache_dtype="bfloat16",
        quantization=None,
        adapter=None,
        rope_config={"rope_theta": 1e6},
        tensor_parallel={"tp_size": 1, "pp_size": 1, "cp_size": 1},
        backend_cache_layout="trtllm_pytorch_primary_pool_v1",
    )


@pytest.fixture(scope="session")
def namespace(base_namespace: CacheNamespace) -> CacheNamespace:
    """The namespace of requests without a salt."""
    return base_namespace.for_request(None, None)


@pytest.fixture(scope="session")
def text() -> Callable[[int, int], npt.NDArray[np.int32]]:
    """text(seed, length): token ids, int32 [length]."""

    def make(seed: int, length: int) -> npt.NDArray[np.int32]:
        return np.random.default_rng(seed).integers(0, 150_000, length, dtype=np.int32)

    return make
