"""The card's limits, which the kernels' rows are measured against: device copy, bf16 matrix product, and copies from
pinned host memory. And what the kernels' benchmarks have in common."""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import torch

from benchmarks.program import parser_of
from kernels.layout import ContiguousKv, KvGeometry, LayeredPool, PagedKv
from kernels.rope import RopeRotation
from validation.results import Results

COPY_BYTES = 2 << 30
HOST_BYTES = 1 << 30
MATMUL_SIZE = 8192
_BUSY_CYCLES = 2_000_000

# Qwen2.5-7B: 28 layers, 4 KV heads, head_dim 128, rope_theta 1e6; 32 tokens a block.
QWEN_7B = KvGeometry(num_layers=28, kv_heads=4, head_dim=128, block_size=32)
ROTATION = RopeRotation(tuple(1e6 ** (-2 * plane / 128) for plane in range(64)), 128)
# DeepSeek-V3 and Kimi K2: 61 layers of one latent row a token, 512 channels free of position and 64 that turn.
DEEPSEEK_V3 = KvGeometry(num_layers=61, kv_heads=1, head_dim=576, block_size=64, kv_factor=1)
LATENT_ROTATION = RopeRotation(tuple(1e4 ** (-2 * plane / 64) for plane in range(32)), 64, True, 512)
# The axes of a layer's cache in vLLM, outermost first in memory. K and V are the halves of `kinds`; a latent is one.
IN_VLLM = replace(QWEN_7B, block_size=16)
LATENT_LAYOUT = ("kinds", "blocks", "heads", "tokens", "channels")
VLLM_LAYOUTS = {
    "blocks_kinds_nhd": ("blocks", "kinds", "tokens", "heads", "channels"),
    "blocks_kinds_hnd": ("blocks", "kinds", "heads", "tokens", "channels"),
    "kinds_blocks_nhd": ("kinds", "blocks", "tokens", "heads", "channels"),
    "blocks_heads_channels": ("blocks", "heads", "tokens", "kinds", "channels"),
}
TOKENS = (4096, 8192, 16384, 24576, 32768)
SHIFT = 7


def run_on_card(description: str | None, **parts: Callable[[Results], None]) -> None:
    """Parse the command line; measure each part, print its rows and write them to a file of its name. Ends the program
    with one sentence without a card."""
    options = parser_of(description).parse_args()
    if not torch.cuda.is_available():
        sys.exit("This benchmark needs a CUDA device, and torch sees none.")
    torch.manual_seed(7)
    for name, measure in parts.items():
        results = Results()
        with torch.inference_mode():
            measure(results)
        results.write(options.json, name)


def add_share(results: Results, name: str, milliseconds: float, num_bytes: float, goal: float | None = None) -> float:
    """Add how fast bytes were read and written as a share of the card's copy; return that share."""
    speed = num_bytes / milliseconds / 1e6
    baseline = f"{milliseconds:.4f} ms, {speed:.0f} GB/s; copy {copy_gbps():.0f} GB/s, read + written"
    results.add(f"{name}_share_of_copy", speed / copy_gbps(), "", baseline, goal, "higher")
    return speed / copy_gbps()


def check_close(what: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    """Return the relative error in the 2-norm. Ends the program if the result is wrong: figures would mean nothing."""
    error = float((actual.double() - expected.double()).norm() / expected.double().norm())
    if not error <= tolerance:
        sys.exit(f"{what} is wrong: relative error {error:.2e}, above {tolerance:g}")
    return error


def time_ms(function: Callable[[], object], *, repeats: int = 20, warm_up: int = 3) -> float:
    """Return the median milliseconds of `function` on the card, between CUDA events on the current stream. Before each
    run the L2 cache is overwritten and the card kept busy, so that the host's preparation does not count."""
    for _ in range(warm_up):
        function()
    # Four times the L2 cache, so that nothing of an earlier run is left in it.
    flush = torch.empty(4 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda")
    timings = []
    for _ in range(repeats):
        flush.zero_()
        torch.cuda._sleep(_BUSY_CYCLES)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        timings.append((start, end))
    torch.cuda.synchronize()
    return float(statistics.median(start.elapsed_time(end) for start, end in timings))


@cache
def copy_gbps() -> float:
    """Return GB/s of a device-to-device copy of random bytes, counting bytes read and written."""
    source = torch.randint(0, 256, (COPY_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / time_ms(lambda: target.copy_(source)) / 1e6


@cache
def matmul_tflops() -> float:
    """Return TFLOP/s of a bf16 product of two square random matrices."""
    first, second = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, dtype=torch.bfloat16, device="cuda")
    output = torch.empty_like(first)
    return 2 * MATMUL_SIZE**3 / time_ms(lambda: torch.mm(first, second, out=output)) / 1e9


@cache
def host_gbps() -> float:
    """Return GB/s of one copy from pinned host memory to the card."""
    source = torch.full((HOST_BYTES,), 7, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(HOST_BYTES, dtype=torch.uint8, device="cuda")
    return HOST_BYTES / time_ms(lambda: target.copy_(source, non_blocking=True), repeats=5) / 1e6


def random_donor(tokens: int, dtype: torch.dtype = torch.bfloat16, sizes: KvGeometry = QWEN_7B) -> ContiguousKv:
    """Return a donor of `tokens` random tokens on the card."""
    return ContiguousKv(torch.randn(sizes.shape(tokens), dtype=torch.bfloat16, device="cuda").to(dtype))


def random_pool(tokens: int, dtype: torch.dtype = torch.bfloat16) -> PagedKv:
    """Return a pool of random values that holds `tokens` tokens in shuffled blocks."""
    blocks = _shuffled_blocks(QWEN_7B, tokens)
    shape = (len(blocks), QWEN_7B.num_layers, QWEN_7B.kv_factor, QWEN_7B.row_elements)
    return PagedKv(torch.randn(shape, dtype=torch.bfloat16, device="cuda").to(dtype), blocks, QWEN_7B)


def random_layers(tokens: int, axes: Sequence[str], sizes: KvGeometry = IN_VLLM) -> PagedKv:
    """Do as `random_pool`, with a tensor a layer whose axes in memory are those of a layout of vLLM."""
    blocks = _shuffled_blocks(sizes, tokens)
    lengths = {"kinds": sizes.kv_factor, "blocks": len(blocks), "heads": sizes.kv_heads}
    lengths |= {"tokens": sizes.block_size, "channels": sizes.head_dim}
    shape, order = [lengths[axis] for axis in axes], [axes.index(axis) for axis in lengths]
    caches = [torch.randn(shape, dtype=torch.bfloat16, device="cuda").permute(order) for _ in range(sizes.num_layers)]
    return PagedKv(LayeredPool(*zip(*caches, strict=True)), blocks, sizes)


def _shuffled_blocks(sizes: KvGeometry, tokens: int) -> torch.Tensor:
    return torch.randperm(sizes.blocks_for(tokens), generator=torch.Generator().manual_seed(0))
