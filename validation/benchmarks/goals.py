"""What the figures are held against: an engine that a user would pick instead, measured on an H200."""

from __future__ import annotations

# vLLM 0.25.1, bf16, the same shape, eager, prefix caching on, wall time of generate() with one new token; ms by prompt
# tokens. The goals stand for the sizes at which they were set.
VLLM_COLD_MS = {24_576: 708.1, 32_768: 1_031.3}
SHIFTED_GOAL_MS = {24_576: 20.0, 32_768: 22.0}

COLD_OVER_VLLM = 1.10
SHIFTED_GROWTH = 1.8
MISS_OVERHEAD_PERCENT = 0.5
HOST_TIER_OVER_LIMIT = 1.2
BOUNDARY_OVER_COLD = 0.15
# Our connector inside vLLM, each against stock vLLM of the same version in the same run.
VLLM_OVER_EXACT_HIT = 1.0
VLLM_SHIFTED_OVER_COLD = 0.03
VLLM_VERIFIED_OVER_COLD = 0.13
VLLM_MISS_OVERHEAD_PERCENT = 1.0
VLLM_DECODE_SLOWDOWN = 1.0
VLLM_RAG_GAIN = {"position_fix": 4.0, "verified": 3.0}
VLLM_RAG_P95_RATIO = 0.25

GOAL_SIZE = 24_576
MISS_SIZE = 8_192
GROWTH_SIZES = (4_096, 32_768)
BOUNDARY_LAYER = 3


def cold_goal(size: int) -> float | None:
    """Milliseconds, None where none is set."""
    vllm = VLLM_COLD_MS.get(size)
    return None if vllm is None else COLD_OVER_VLLM * vllm


def label(size: int) -> str:
    """24576 as 24k."""
    return f"{size // 1024}k" if size % 1024 == 0 else str(size)
