"""kv_move at the size of Qwen2.5-7B, and at that of DeepSeek-V3's latent rows (MLA): share of the card's copy speed, by
tokens, tiling, dtype, source and layout.

`python -m benchmarks.kernels.kv_move --json benchmarks/results/<machine>`; the sweep says which tiling is best.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

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
    show_tilings,
    time_ms,
    wall_ms,
)
from kernels.kv_move import Move, kv_move, kv_move_by_torch
from kernels.layout import ContiguousKv
from kernels.moves import check_moves, planes_of, sizes_of
from kernels.rope import RopeRotation, by_layer
from validation.results import say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernels.layout import KvGeometry, PagedKv
    from kernels.rope import Rotation
    from kernels.span_table import Tiling
    from validation.results import Results

GOAL_TOKENS = 24576
COPY_GOAL, MILLISECONDS_GOAL = 0.90, 0.75
# Of moves in fp8, and of latent rows.
OTHER_COPY_GOAL = 0.85


def measure(results: Results) -> None:
    """Checks one plan a layout against torch, sweeps the tilings, and measures the default one."""
    _check(random_pool(320), random_pool(320))
    for layout in VLLM_LAYOUTS:
        _check(random_layers(layout, 320), random_layers(layout, 320))
    _check(random_latents(320), random_latents(320), LATENT_ROTATION)
    _sweep()
    least = min(_measure_size(results, tokens) for tokens in TOKENS)
    baseline = (
        f"least of {TOKENS[0]} to {TOKENS[-1]} tokens, shifted by {SHIFT}; copy of {COPY_BYTES >> 30} GiB at "
        f"{copy_gbps():.0f} GB/s"
    )
    results.add("kv_move_share_of_copy", least, "", baseline, COPY_GOAL, "higher")
    _measure_variants(results)
    for layout in VLLM_LAYOUTS:
        _measure_layout(results, layout)
    _measure_latents(results)


def tilings() -> list[Tiling]:
    """The default and its competitors."""
    from kernels.span_table import Tiling

    return [
        Tiling(tile_bytes=4096, warps=2, tokens_first=False),
        Tiling(tile_bytes=4096, warps=2),
        Tiling(tile_bytes=4096, heads=2),
        Tiling(tile_bytes=4096, warps=2, heads=4),
        Tiling(tile_bytes=2048, warps=1),
        Tiling(tile_bytes=2048, warps=1, tokens_first=False),
        Tiling(tile_bytes=4096, warps=1),
        Tiling(tile_bytes=8192, warps=2),
        Tiling(tile_bytes=8192),
        Tiling(tile_bytes=8192, heads=4),
        Tiling(warps=8),
        Tiling(warps=8, tokens_first=False),
        Tiling(tile_bytes=32768, warps=8),
    ]


def kernel_ms(
    moves: Sequence[Move],
    target: PagedKv | ContiguousKv,
    tiling: Tiling | None = None,
    rotation: Rotation = ROTATION,
) -> float:
    """Milliseconds of the kernel alone, its table ready on the card."""
    from kernels.kv_move import triton_move

    run = triton_move.prepared(moves, target, rotation, tiling)
    return time_ms(lambda: run(range(sizes_of(target)[0]), 0))


def bytes_moved(tokens: int, dtype: torch.dtype = torch.bfloat16, sizes: KvGeometry = QWEN_7B) -> int:
    """Bytes read and written."""
    return 2 * tokens * sizes.bytes_per_token(dtype)


def _check(actual: PagedKv, expected: PagedKv, rotation: RopeRotation = ROTATION) -> None:
    for ours, theirs in zip(planes_of(actual), planes_of(expected), strict=True):
        theirs.copy_(ours)
    donor = random_donor(200, sizes=actual.geometry)
    moves = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
    kv_move(moves, actual, rotation)
    kv_move_by_torch(moves, expected, rotation)
    pairs = zip(planes_of(actual), planes_of(expected), strict=True)
    say(f"relative error against torch: {max(check_close('kv_move', *pair, 1e-2) for pair in pairs):.1e}")


def _sweep() -> None:
    for tokens in (TOKENS[0], GOAL_TOKENS):
        donor, target = random_donor(tokens), random_pool(tokens + 32)
        _sweep_move(f"{tokens} tokens", Move(donor, 0, SHIFT, tokens), target)
    for layout in VLLM_LAYOUTS:
        donor, held = random_donor(GOAL_TOKENS), random_layers(layout, GOAL_TOKENS + 32)
        _sweep_move(f"{GOAL_TOKENS} tokens into {layout}", Move(donor, 0, SHIFT, GOAL_TOKENS), held)
        _sweep_move(f"{GOAL_TOKENS} tokens out of {layout}", Move(held, 0, 0, GOAL_TOKENS), donor)


def _sweep_move(what: str, move: Move, target: PagedKv | ContiguousKv) -> None:
    show_tilings(what, bytes_moved(move.length), tilings(), partial(kernel_ms, [move], target))


def _measure_size(results: Results, tokens: int) -> float:
    """Adds the rows of one size; returns the share of the copy speed."""
    donor, target = random_donor(tokens), random_pool(tokens + 32)
    shifted = [Move(donor, 0, SHIFT, tokens)]
    milliseconds = kernel_ms(shifted, target)
    name, same = f"kv_move_{tokens // 1024}k", bytes_moved(tokens) // 2
    limit = f"kernel alone; copy speed would take {bytes_moved(tokens) / copy_gbps() / 1e6:.3f} ms"
    results.add(f"{name}_ms", milliseconds, "ms", limit, MILLISECONDS_GOAL if tokens == GOAL_TOKENS else None)
    share = add_share(results, name, milliseconds, bytes_moved(tokens))
    of_same = bytes_moved(tokens) / milliseconds / 1e6 / copy_gbps(same)
    baseline = f"copy of the same {same} bytes {copy_gbps(same):.0f} GB/s"
    results.add(f"{name}_share_of_same_copy", of_same, "", baseline, better="higher")
    call = wall_ms(lambda: kv_move(shifted, target, ROTATION))
    results.add(f"{name}_call_ms", call, "ms", "host clock, checks and launch included")
    return share


def _measure_layout(results: Results, layout: str) -> None:
    """Placed into a pool as vLLM lays it out, saved from it, and moved between its blocks."""
    tokens = GOAL_TOKENS
    donor, held = random_donor(tokens), random_layers(layout, 2 * tokens + 32)
    for name, move, target in (
        ("place", Move(donor, 0, SHIFT, tokens), held),
        ("save", Move(held, 0, 0, tokens), donor),
        ("within", Move(held, 0, tokens + SHIFT, tokens), held),
    ):
        add_share(results, f"kv_move_{layout}_{name}", kernel_ms([move], target), bytes_moved(tokens))


def _measure_latents(results: Results) -> None:
    """Latent rows placed into a pool as vLLM lays it out, saved from it, and the tilings of a placement."""
    tokens = GOAL_TOKENS
    moved = bytes_moved(tokens, sizes=DEEPSEEK_V3)
    donor, held = random_donor(tokens, sizes=DEEPSEEK_V3), random_latents(tokens + 64)
    place = [Move(donor, 0, SHIFT, tokens)]
    time_of = partial(kernel_ms, rotation=LATENT_ROTATION)
    show_tilings(f"{tokens} latent rows", moved, tilings(), partial(time_of, place, held))
    add_share(results, "kv_move_mla", time_of(place, held), moved, OTHER_COPY_GOAL)
    add_share(results, "kv_move_mla_save", time_of([Move(held, 0, 0, tokens)], donor), moved)


def _measure_variants(results: Results) -> None:
    """Unshifted, half of the channels rotated (GLM-4.5), two rotations (Gemma 3), three donors, from a pool, fp8, from
    pinned memory, the checks."""
    tokens = GOAL_TOKENS
    donor, target = random_donor(tokens), random_pool(tokens + 32)
    add_share(results, "kv_move_unshifted", kernel_ms([Move(donor, 0, 0, tokens)], target), bytes_moved(tokens))
    half = RopeRotation(ROTATION.inverse_frequencies[::2], ROTATION.rotary_dim // 2)
    milliseconds = kernel_ms([Move(donor, 0, SHIFT, tokens)], target, rotation=half)
    add_share(results, "kv_move_partial", milliseconds, bytes_moved(tokens))
    slow = RopeRotation(tuple(each / 7 for each in ROTATION.inverse_frequencies), ROTATION.rotary_dim)
    layers = by_layer([slow if layer % 6 else ROTATION for layer in range(QWEN_7B.num_layers)])
    milliseconds = kernel_ms([Move(donor, 0, SHIFT, tokens)], target, rotation=layers)
    add_share(results, "kv_move_two_kinds_of_layers", milliseconds, bytes_moved(tokens))
    third = tokens // 3
    spans = [Move(random_donor(third + 9), index, index * (third + 5), third) for index in range(3)]
    add_share(results, "kv_move_three_donors", kernel_ms(spans, target), bytes_moved(tokens))
    add_share(results, "kv_move_save", kernel_ms([Move(target, 0, 0, tokens)], donor), bytes_moved(tokens))
    checks = wall_ms(lambda: check_moves(spans, target, ROTATION))
    results.add("kv_move_checks_ms", checks, "ms", "host checks of three spans")
    fp8 = torch.float8_e4m3fn
    fp8_move = Move(random_donor(tokens, fp8), 0, SHIFT, tokens)
    milliseconds = kernel_ms([fp8_move], random_pool(tokens + 32, fp8))
    add_share(results, "kv_move_fp8", milliseconds, bytes_moved(tokens, fp8), OTHER_COPY_GOAL)
    pinned = ContiguousKv(donor.tensor.cpu().pin_memory())
    milliseconds = time_ms(lambda: kv_move([Move(pinned, 0, SHIFT, tokens)], target, ROTATION), repeats=5)
    share = bytes_moved(tokens) / 2 / milliseconds / 1e6 / host_gbps(to_device=True)
    baseline = f"{milliseconds:.2f} ms; one copy from pinned memory {host_gbps(to_device=True):.1f} GB/s"
    results.add("kv_move_pinned_share_of_pcie", share, "", baseline, better="higher")


if __name__ == "__main__":
    run_on_card("kv_move", measure, __doc__)
