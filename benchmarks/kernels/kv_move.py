"""kv_move at the size of Qwen2.5-7B, and at that of DeepSeek-V3's latent rows (MLA): share of the card's copy speed, by
tokens, dtype, source and layout. Then deviation of one layer, likewise.

`python -m benchmarks.kernels.kv_move --json benchmarks/results/<machine>`
"""

from itertools import chain
from math import prod

import torch

from benchmarks.kernels import ceilings as card
from benchmarks.kernels.ceilings import QWEN_7B, ROTATION, SHIFT, check_close, random_donor, random_layers, random_pool
from kernels.deviation import FreshRows, deviation, relative, squares_by_torch, triton_deviation
from kernels.kv_move import Move, kv_move, kv_move_by_torch, triton_move
from kernels.layout import ContiguousKv, Kv, LayeredPool, PagedKv
from kernels.rope import Rotation
from validation.results import Results, say

GOAL_TOKENS = 24576
COPY_GOAL, MILLISECONDS_GOAL = 0.90, 0.75
# Of moves in fp8, and of latent rows.
OTHER_COPY_GOAL = 0.85
LATENT = card.LATENT_LAYOUT, card.DEEPSEEK_V3
# The layer whose deviations are measured.
LAYER = 2


def measure(results: Results) -> None:
    """Check moves in each layout against torch, and measure them by tokens."""
    _check(random_pool(320), random_pool(320))
    for axes in card.VLLM_LAYOUTS.values():
        _check(random_layers(320, axes), random_layers(320, axes))
    _check(random_layers(320, *LATENT), random_layers(320, *LATENT), card.LATENT_ROTATION)
    shares = []
    for tokens in card.TOKENS:
        name, pool = f"{tokens // 1024}k", random_pool(tokens + 32)
        milliseconds, share = _add(results, name, Move(random_donor(tokens), 0, SHIFT, tokens), pool)
        limit = f"kernel alone; copy speed would take {milliseconds * share:.3f} ms"
        goal = MILLISECONDS_GOAL if tokens == GOAL_TOKENS else None
        results.add(f"kv_move_{name}_ms", milliseconds, "ms", limit, goal)
        shares.append(share)
    baseline = f"least of {card.TOKENS[0]} to {card.TOKENS[-1]} tokens, shifted by {SHIFT}; "
    baseline += f"copy of {card.COPY_BYTES >> 30} GiB at {card.copy_gbps():.0f} GB/s"
    results.add("kv_move_share_of_copy", min(shares), "", baseline, COPY_GOAL, "higher")
    _measure_kinds(results, GOAL_TOKENS)


def _measure_kinds(results: Results, tokens: int) -> None:
    """Measure moves that leave donors in place, save from a pool, are in fp8, in vLLM's layouts, latent, or pinned."""
    fp8 = torch.float8_e4m3fn
    donor, pool = random_donor(tokens), random_pool(tokens + 32)
    _add(results, "unshifted", Move(donor, 0, 0, tokens), pool)
    _add(results, "save", Move(pool, 0, 0, tokens), donor)
    in_fp8 = Move(random_donor(tokens, fp8), 0, SHIFT, tokens)
    _add(results, "fp8", in_fp8, random_pool(tokens + 32, fp8), OTHER_COPY_GOAL)
    # Placed into a pool as vLLM lays it out, saved from it, and moved between its blocks.
    for layout, axes in card.VLLM_LAYOUTS.items():
        held = random_layers(2 * tokens + 32, axes)
        _add(results, f"{layout}_place", Move(donor, 0, SHIFT, tokens), held)
        _add(results, f"{layout}_save", Move(held, 0, 0, tokens), donor)
        _add(results, f"{layout}_within", Move(held, 0, tokens + SHIFT, tokens), held)
    rows, held = random_donor(tokens, sizes=card.DEEPSEEK_V3), random_layers(tokens + 32, *LATENT)
    _add(results, "mla", Move(rows, 0, SHIFT, tokens), held, OTHER_COPY_GOAL, card.LATENT_ROTATION)
    _add(results, "mla_save", Move(held, 0, 0, tokens), rows, rotation=card.LATENT_ROTATION)
    pinned = Move(ContiguousKv(donor.tensor.cpu().pin_memory()), 0, SHIFT, tokens)
    milliseconds = card.time_ms(lambda: kv_move([pinned], pool, ROTATION), repeats=5)
    speed, num_bytes = card.host_gbps(), tokens * QWEN_7B.bytes_per_token(torch.bfloat16)
    baseline = f"{milliseconds:.2f} ms; one copy from pinned memory {speed:.1f} GB/s"
    share = num_bytes / milliseconds / 1e6 / speed
    results.add("kv_move_pinned_share_of_pcie", share, "", baseline, better="higher")


def _add(
    results: Results, name: str, move: Move, target: Kv, goal: float | None = None, rotation: Rotation = ROTATION
) -> tuple[float, float]:
    """Add the speed of the kernel alone, its table ready on the card; return milliseconds and share of the copy."""
    run = triton_move.prepared([move], target, rotation)
    milliseconds = card.time_ms(lambda: run(range(target.sizes[0]), 0))
    num_bytes = 2 * move.length * prod(target.sizes) * target.memory.dtype.itemsize
    return milliseconds, card.add_share(results, f"kv_move_{name}", milliseconds, num_bytes, goal)


def _moves(donor: Kv) -> list[Move]:
    """Return moves of 200 tokens to be checked."""
    return [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]


def _check(actual: PagedKv, expected: PagedKv, rotation: Rotation = ROTATION) -> None:
    own, wanted = (each.planes if isinstance(each, LayeredPool) else (each,) for each in (actual.pool, expected.pool))
    pairs = list(zip(own, wanted, strict=True))
    for ours, theirs in pairs:
        theirs.copy_(ours)
    moves = _moves(random_donor(200, sizes=actual.geometry))
    kv_move(moves, actual, rotation)
    kv_move_by_torch(moves, expected, rotation)
    say(f"relative error against torch: {max(check_close('kv_move', *pair, 1e-2) for pair in pairs):.1e}")


def measure_deviation(results: Results) -> None:
    """Check some calls against torch, and measure the kernel by tokens and by vLLM's layouts."""
    errors = []
    for donor in chain[Kv]([random_donor(300)], (random_layers(300, axes) for axes in card.VLLM_LAYOUTS.values())):
        spans, fresh = _moves(donor), _fresh(320)
        expected = relative(squares_by_torch(spans, fresh, LAYER, ROTATION))
        errors.append(check_close("deviation", deviation(spans, fresh, LAYER, ROTATION), expected, 1e-4))
    say(f"relative error against torch: {max(errors):.1e}")
    for tokens in card.TOKENS:
        _add_deviation(results, f"{tokens // 1024}k", Move(random_donor(tokens), 0, SHIFT, tokens))
    tokens = card.TOKENS[-1]
    for layout, axes in card.VLLM_LAYOUTS.items():  # as a check: rows of a forward with what was placed in a pool
        _add_deviation(results, layout, Move(random_layers(tokens, axes), 0, 0, tokens, turn=0))


def _fresh(tokens: int) -> FreshRows:
    k, v = random_donor(tokens).tensor[LAYER].transpose(1, 2)
    return FreshRows(k, v)


def _add_deviation(results: Results, name: str, span: Move) -> None:
    """Add the speed of the kernel alone, its table ready on the card."""
    output, fresh = torch.empty(2, span.length, device="cuda"), _fresh(span.target_start + span.length)
    milliseconds = card.time_ms(triton_deviation.prepared(output, [span], fresh, LAYER, ROTATION))
    num_bytes = 2 * span.length * QWEN_7B.bytes_per_token(torch.bfloat16) // QWEN_7B.num_layers
    card.add_share(results, f"deviation_{name}", milliseconds, num_bytes)


if __name__ == "__main__":
    card.run_on_card(__doc__, kv_move=measure, deviation=measure_deviation)
