"""A namespace and texts that tests share."""

import numpy as np

from semblend_trt.fleet.sketch import fingerprints_of
from semblend_trt.namespace import UNKNOWN_PREFIX, CacheNamespace

BASE_NAMESPACE = CacheNamespace(
    model="tiny",
    model_revision="r1",
    tokenizer="tiny",
    tokenizer_revision="t1",
    kv_layout="HND",
    block_size=32,
    kv_dtype="bfloat16",
    cache_dtype="bfloat16",
    quantization=None,
    adapter=None,
    rope_config={"rope_type": "default", "rope_theta": 1e6},
    tensor_parallel={"tp_size": 1, "pp_size": 1, "cp_size": 1},
    backend_cache_layout="trtllm_pytorch_primary_pool_v1",
)
# That of requests without a salt; BASE_NAMESPACE is bound to no request.
NAMESPACE = BASE_NAMESPACE.for_request(None, None)


def text(seed, length, vocabulary=30_000):
    """Token ids below `vocabulary`, int32 [length]."""
    return np.random.default_rng(seed).integers(0, vocabulary, length, dtype=np.int32)


def prompt_fingerprints(tokens, key):
    return fingerprints_of(tokens, [key])[0]


def unknown_fields(namespace):
    """Names of the fields that could not be determined."""
    return [name for name, value in namespace.to_dict().items() if UNKNOWN_PREFIX in str(value)]
