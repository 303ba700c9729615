"""kv_move at the size of Qwen2.5-7B, and at that of DeepSeek-V3's latent rows (MLA): share of the card's copy speed, by
tokens, dtype, source and layout. Then deviation of one layer, likewise.

`python -m benchmarks.kernels.kv_move --json benchmarks/results/<machine>`
"""

import torch

from benchmarks.kernels import ceilings as card
from benchmarks.kernels.ceilings import QWEN_7B, ROTATION, SHIFT, random_donor, random_layers, random_pool
from kernels.deviation import FreshRows, deviation, relative, squares_by_torch
from kernels.kv_move import Move, kv_move, kv_move_by_torch
from kernels.layout import ContiguousKv, Fresh, KvGeometry, PagedKv
from kernels.rope import Rotation
from validation.results import Results, say

GOAL_TOKENS = 24576
COPY_GOAL, MILLISECONDS_GOAL = 0.90, 0.75
# Of moves in fp8, and of latent rows.
OTHER_COPY_GOAL = 0.85


def measure(results: Results) -> None:
    """Check one plan a layout against torch, and measure."""
    _check(random_pool(320), random_pool(320))
    for layout in card.VLLM_LAYOUTS:
        _check(random_layers(layout, 320), random_layers(layout, 320))
    _check(card.random_latents(320), card.random_latents(320), card.LATENT_ROTATION)
    least = min(_measure_size(results, tokens) for tokens in card.TOKENS)
    baseline = f"least of {card.TOKENS[0]} to {card.TOKENS[-1]} tokens, shifted by {SHIFT}; "
    baseline += f"copy of {card.COPY_BYTES >> 30} GiB at {card.copy_gbps():.0f} GB/s"
    results.add("kv_move_share_of_copy", least, "", baseline, COPY_GOAL, "higher")
    _measure_sources(results)
    tokens = GOAL_TOKENS
    # Placed into a pool as vLLM lays it out, saved from it, and moved between its blocks.
    for layout in card.VLLM_LAYOUTS:
        donor, held = random_donor(tokens), random_layers(layout, 2 * tokens + 32)
        _add_kernel(results, f"{layout}_place", Move(donor, 0, SHIFT, tokens), held)
        _add_kernel(results, f"{layout}_save", Move(held, 0, 0, tokens), donor)
        _add_kernel(results, f"{layout}_within", Move(held, 0, tokens + SHIFT, tokens), held)
    donor, held = random_donor(tokens, sizes=card.DEEPSEEK_V3), card.random_latents(tokens + 32)
    moved, rotation = bytes_moved(tokens, sizes=card.DEEPSEEK_V3), card.LATENT_ROTATION
    _add_kernel(results, "mla", Move(donor, 0, SHIFT, tokens), held, moved, OTHER_COPY_GOAL, rotation)
    _add_kernel(results, "mla_save", Move(held, 0, 0, tokens), donor, moved, rotation=rotation)


def kernel_ms(move: Move, target: PagedKv | ContiguousKv, rotation: Rotation = ROTATION) -> float:
    """Return the milliseconds of the kernel alone, its table ready on the card."""
    from kernels.kv_move import triton_move

    run = triton_move.prepared([move], target, rotation)
    return card.time_ms(lambda: run(range(target.sizes[0]), 0))


def bytes_moved(tokens: int, dtype: torch.dtype = torch.bfloat16, sizes: KvGeometry = QWEN_7B) -> int:
    """Return the bytes read and written."""
    return 2 * tokens * sizes.bytes_per_token(dtype)


def _add_kernel(
    results: Results,
    name: str,
    move: Move,
    target: PagedKv | ContiguousKv,
    moved: int | None = None,
    goal: float | None = None,
    rotation: Rotation = ROTATION,
) -> None:
    """Add the kernel's share of the copy speed; `moved` bytes are those of QWEN_7B in bf16 unless given."""
    moved = bytes_moved(move.length) if moved is None else moved
    card.add_share(results, f"kv_move_{name}", kernel_ms(move, target, rotation), moved, goal)


def _check(actual: PagedKv, expected: PagedKv, rotation: Rotation = ROTATION) -> None:
    for ours, theirs in zip(actual.planes, expected.planes, strict=True):
        theirs.copy_(ours)
    donor = random_donor(200, sizes=actual.geometry)
    moves = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
    kv_move(moves, actual, rotation)
    kv_move_by_torch(moves, expected, rotation)
    pairs = zip(actual.planes, expected.planes, strict=True)
    say(f"relative error against torch: {max(card.check_close('kv_move', *pair, 1e-2) for pair in pairs):.1e}")


def _measure_size(results: Results, tokens: int) -> float:
    """Add the rows of one size; return the share of the copy speed."""
    milliseconds = kernel_ms(Move(random_donor(tokens), 0, SHIFT, tokens), random_pool(tokens + 32))
    name = f"kv_move_{tokens // 1024}k"
    limit = f"kernel alone; copy speed would take {bytes_moved(tokens) / card.copy_gbps() / 1e6:.3f} ms"
    results.add(f"{name}_ms", milliseconds, "ms", limit, MILLISECONDS_GOAL if tokens == GOAL_TOKENS else None)
    return card.add_share(results, name, milliseconds, bytes_moved(tokens))


def _measure_sources(results: Results) -> None:
    """From a donor in place, from a pool, in fp8, and from pinned memory."""
    tokens, fp8 = GOAL_TOKENS, torch.float8_e4m3fn
    donor, target = random_donor(tokens), random_pool(tokens + 32)
    _add_kernel(results, "unshifted", Move(donor, 0, 0, tokens), target)
    _add_kernel(results, "save", Move(target, 0, 0, tokens), donor)
    shifted = Move(random_donor(tokens, fp8), 0, SHIFT, tokens)
    _add_kernel(results, "fp8", shifted, random_pool(tokens + 32, fp8), bytes_moved(tokens, fp8), OTHER_COPY_GOAL)
    pinned = ContiguousKv(donor.tensor.cpu().pin_memory())
    milliseconds = card.time_ms(lambda: kv_move([Move(pinned, 0, SHIFT, tokens)], target, ROTATION), repeats=5)
    speed = card.host_gbps(to_device=True)
    baseline = f"{milliseconds:.2f} ms; one copy from pinned memory {speed:.1f} GB/s"
    share = bytes_moved(tokens) / 2 / milliseconds / 1e6 / speed
    results.add("kv_move_pinned_share_of_pcie", share, "", baseline, better="higher")


# The layer whose deviations are measured.
LAYER = 2


def measure_deviation(results: Results) -> None:
    """Check some calls against torch, and measure the kernel by tokens and by vLLM's layouts."""
    errors, layers = [], (random_layers(each, 300) for each in card.VLLM_LAYOUTS)
    for donor in list[PagedKv | ContiguousKv]([random_donor(300), *layers]):
        spans = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
        for fresh in (random_pool(320), _rows(320)):
            expected = relative(squares_by_torch(spans, fresh, LAYER, ROTATION))
            errors.append(card.check_close("deviation", deviation(spans, fresh, LAYER, ROTATION), expected, 1e-4))
    say(f"relative error against torch: {max(errors):.1e}")
    for tokens in card.TOKENS:
        span = Move(random_donor(tokens), 0, SHIFT, tokens)
        _add_deviation(results, f"deviation_{tokens // 1024}k", span, random_pool(tokens + 32))
    tokens = card.TOKENS[-1]
    for layout in card.VLLM_LAYOUTS:  # a check's comparison: rows of a forward with what was placed into vLLM's pool
        placed = Move(random_layers(layout, tokens), 0, 0, tokens, turn=0)
        _add_deviation(results, f"deviation_{layout}", placed, _rows(tokens))


def _rows(tokens: int) -> FreshRows:
    k, v = random_donor(tokens).tensor[LAYER].transpose(1, 2)
    return FreshRows(k, v)


def _add_deviation(results: Results, name: str, span: Move, fresh: Fresh) -> None:
    """Add the speed of the kernel alone, its table ready on the card."""
    from kernels.deviation import triton_deviation

    output = torch.empty(2, span.length, device="cuda")
    milliseconds = card.time_ms(triton_deviation.prepared(output, [span], fresh, LAYER, ROTATION))
    num_bytes = 2 * span.length * QWEN_7B.bytes_per_token(torch.bfloat16) // QWEN_7B.num_layers
    card.add_share(results, name, milliseconds, num_bytes)


if __name__ == "__main__":
    card.run_on_card(__doc__, kv_move=measure, deviation=measure_deviation)
