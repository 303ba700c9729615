"""kv_move at the size of Qwen2.5-7B, and at that of DeepSeek-V3's latent rows (MLA): share of the card's copy speed, by
tokens, dtype, source and layout.

`python -m benchmarks.kernels.kv_move --json benchmarks/results/<machine>`
"""

from __future__ import annotations

import torch

from benchmarks.kernels.ceilings import (
    COPY_BYTES,
    DEEPSEEK_V3,
    LATENT_ROTATION,
    QWEN_7B,
    ROTATION,
    SHIFT,
    TOKENS,
    VLLM_LAYOUTS,
    add_share,
    check_close,
    copy_gbps,
    host_gbps,
    random_donor,
    random_latents,
    random_layers,
    random_pool,
    run_on_card,
    time_ms,
)
from kernels.kv_move import Move, kv_move, kv_move_by_torch
from kernels.layout import ContiguousKv, KvGeometry, PagedKv
from kernels.rope import Rotation
from validation.results import Results, say

GOAL_TOKENS = 24576
COPY_GOAL, MILLISECONDS_GOAL = 0.90, 0.75
# Of moves in fp8, and of latent rows.
OTHER_COPY_GOAL = 0.85


def measure(results: Results) -> None:
    """Check one plan a layout against torch, and measure."""
    _check(random_pool(320), random_pool(320))
    for layout in VLLM_LAYOUTS:
        _check(random_layers(layout, 320), random_layers(layout, 320))
    _check(random_latents(320), random_latents(320), LATENT_ROTATION)
    least = min(_measure_size(results, tokens) for tokens in TOKENS)
    baseline = (
        f"least of {TOKENS[0]} to {TOKENS[-1]} tokens, shifted by {SHIFT}; copy of {COPY_BYTES >> 30} GiB at "
        f"{copy_gbps():.0f} GB/s"
    )
    results.add("kv_move_share_of_copy", least, "", baseline, COPY_GOAL, "higher")
    _measure_sources(results)
    for layout in VLLM_LAYOUTS:
        _measure_layout(results, layout)
    _measure_latents(results)


def kernel_ms(move: Move, target: PagedKv | ContiguousKv, rotation: Rotation = ROTATION) -> float:
    """Return the milliseconds of the kernel alone, its table ready on the card."""
    from kernels.kv_move import triton_move

    run = triton_move.prepared([move], target, rotation)
    return time_ms(lambda: run(range(target.sizes[0]), 0))


def bytes_moved(tokens: int, dtype: torch.dtype = torch.bfloat16, sizes: KvGeometry = QWEN_7B) -> int:
    """Return the bytes read and written."""
    return 2 * tokens * sizes.bytes_per_token(dtype)


def _check(actual: PagedKv, expected: PagedKv, rotation: Rotation = ROTATION) -> None:
    for ours, theirs in zip(actual.planes, expected.planes, strict=True):
        theirs.copy_(ours)
    donor = random_donor(200, sizes=actual.geometry)
    moves = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
    kv_move(moves, actual, rotation)
    kv_move_by_torch(moves, expected, rotation)
    pairs = zip(actual.planes, expected.planes, strict=True)
    say(f"relative error against torch: {max(check_close('kv_move', *pair, 1e-2) for pair in pairs):.1e}")


def _measure_size(results: Results, tokens: int) -> float:
    """Add the rows of one size; return the share of the copy speed."""
    milliseconds = kernel_ms(Move(random_donor(tokens), 0, SHIFT, tokens), random_pool(tokens + 32))
    name = f"kv_move_{tokens // 1024}k"
    limit = f"kernel alone; copy speed would take {bytes_moved(tokens) / copy_gbps() / 1e6:.3f} ms"
    results.add(f"{name}_ms", milliseconds, "ms", limit, MILLISECONDS_GOAL if tokens == GOAL_TOKENS else None)
    return add_share(results, name, milliseconds, bytes_moved(tokens))


def _measure_sources(results: Results) -> None:
    """From a donor in place, from a pool, in fp8, and from pinned memory."""
    tokens = GOAL_TOKENS
    donor, target = random_donor(tokens), random_pool(tokens + 32)
    add_share(results, "kv_move_unshifted", kernel_ms(Move(donor, 0, 0, tokens), target), bytes_moved(tokens))
    add_share(results, "kv_move_save", kernel_ms(Move(target, 0, 0, tokens), donor), bytes_moved(tokens))
    fp8 = torch.float8_e4m3fn
    milliseconds = kernel_ms(Move(random_donor(tokens, fp8), 0, SHIFT, tokens), random_pool(tokens + 32, fp8))
    add_share(results, "kv_move_fp8", milliseconds, bytes_moved(tokens, fp8), OTHER_COPY_GOAL)
    pinned = ContiguousKv(donor.tensor.cpu().pin_memory())
    milliseconds = time_ms(lambda: kv_move([Move(pinned, 0, SHIFT, tokens)], target, ROTATION), repeats=5)
    share = bytes_moved(tokens) / 2 / milliseconds / 1e6 / host_gbps(to_device=True)
    baseline = f"{milliseconds:.2f} ms; one copy from pinned memory {host_gbps(to_device=True):.1f} GB/s"
    results.add("kv_move_pinned_share_of_pcie", share, "", baseline, better="higher")


def _measure_layout(results: Results, layout: str) -> None:
    """Placed into a pool as vLLM lays it out, saved from it, and moved between its blocks."""
    tokens = GOAL_TOKENS
    donor, held = random_donor(tokens), random_layers(layout, 2 * tokens + 32)
    for name, move, target in (
        ("place", Move(donor, 0, SHIFT, tokens), held),
        ("save", Move(held, 0, 0, tokens), donor),
        ("within", Move(held, 0, tokens + SHIFT, tokens), held),
    ):
        add_share(results, f"kv_move_{layout}_{name}", kernel_ms(move, target), bytes_moved(tokens))


def _measure_latents(results: Results) -> None:
    """Latent rows placed into a pool as vLLM lays it out, and saved from it."""
    tokens = GOAL_TOKENS
    donor, held = random_donor(tokens, sizes=DEEPSEEK_V3), random_latents(tokens + 32)
    moved = bytes_moved(tokens, sizes=DEEPSEEK_V3)
    place, save = Move(donor, 0, SHIFT, tokens), Move(held, 0, 0, tokens)
    add_share(results, "kv_move_mla", kernel_ms(place, held, LATENT_ROTATION), moved, OTHER_COPY_GOAL)
    add_share(results, "kv_move_mla_save", kernel_ms(save, donor, LATENT_ROTATION), moved)


if __name__ == "__main__":
    run_on_card("kv_move", measure, __doc__)
