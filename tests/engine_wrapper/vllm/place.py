"""What engines of the tests are told of the card that they run on, in one place: pytest imports a conftest.py twice."""

from contextlib import contextmanager

import pytest
import torch
from torch.cuda import is_available

# Engines on a card come one behind the other, and give memory back late.
PLACE = {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1} if is_available() else {}

# Where the smallest change of an answer is to be seen.
exact = pytest.mark.skipif(is_available(), reason="a card rounds by as much as one token of a window changes")

# vLLM 0.25.1 gives layers with a window the shortest blocks that its kernel takes, and joins no others with them.
WINDOWED = {"block_size": 16}
# vLLM computes latent attention in 16 bit alone there, and of the backends that do so we take this one.
LATENT = {"dtype": "float16", "attention_backend": "FLASH_ATTN_MLA"}
LATENT_IN_FP8 = LATENT | {"attention_backend": "TRITON_MLA"}


def _on_cpu(options):
    """For latent attention from vLLM 0.32 on, where the processor has AMX: its backend there takes no float32."""
    is_latent = "MLA" in options.get("attention_backend", "")
    if not is_latent or not torch.cpu._is_amx_tile_supported():
        return {}
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return {"attention_backend": "CPU_MLA"} if hasattr(AttentionBackendEnum, "AMX_MLA") else {}


@contextmanager
def on_card(options):
    """Engines on a card get these options as well."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (options if is_available() else _on_cpu(options)).items():
            patch.setitem(PLACE, name, value)
        yield
