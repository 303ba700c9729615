"""kv_move at the size of Qwen2.5-7B, and at that of DeepSeek-V3's latent rows (MLA): share of the card's copy speed, by
tokens, dtype, source and layout. Then deviation of one layer, likewise.

`python -m benchmarks.kernels.kv_move --json benchmarks/results/<machine>`
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

import torch

from benchmarks.kernels import ceilings as card
from benchmarks.kernels.ceilings import QWEN_7B, ROTATION, SHIFT, random_donor, random_layers, random_pool
from kernels.deviation import FreshRows, deviation, relative, squares_by_torch
from kernels.kv_move import Move, kv_move, kv_move_by_torch
from kernels.layout import ContiguousKv, Kv, PagedKv
from kernels.rope import Rotation
from validation.results import Results, say

GOAL_TOKENS = 24576
COPY_GOAL, MILLISECONDS_GOAL = 0.90, 0.75
# Of moves in fp8, and of latent rows.
OTHER_COPY_GOAL = 0.85


class Measured(NamedTuple):
    """A move whose share of the card's copy speed is a row."""

    name: str
    move: Move
    target: Kv
    goal: float | None = None
    rotation: Rotation = ROTATION

    @property
    def num_bytes(self) -> int:
        """Return the bytes read and written."""
        return 2 * self.move.length * prod(self.target.sizes) * self.target.memory.dtype.itemsize

    def milliseconds(self) -> float:
        """Return those of the kernel alone, its table ready on the card."""
        from kernels.kv_move import triton_move

        run = triton_move.prepared([self.move], self.target, self.rotation)
        return card.time_ms(lambda: run(range(self.target.sizes[0]), 0))


def measure(results: Results) -> None:
    """Check one plan a layout against torch, and measure."""
    _check(random_pool(320), random_pool(320))
    for axes in card.VLLM_LAYOUTS.values():
        _check(random_layers(320, axes), random_layers(320, axes))
    latents = card.LATENT_LAYOUT, card.DEEPSEEK_V3
    _check(random_layers(320, *latents), random_layers(320, *latents), card.LATENT_ROTATION)
    shares = []
    for tokens in card.TOKENS:
        move = Move(random_donor(tokens), 0, SHIFT, tokens)
        case = Measured(f"{tokens // 1024}k", move, random_pool(tokens + 32))
        milliseconds, goal = case.milliseconds(), MILLISECONDS_GOAL if tokens == GOAL_TOKENS else None
        limit = f"kernel alone; copy speed would take {case.num_bytes / card.copy_gbps() / 1e6:.3f} ms"
        results.add(f"kv_move_{case.name}_ms", milliseconds, "ms", limit, goal)
        shares.append(card.add_share(results, f"kv_move_{case.name}", milliseconds, case.num_bytes))
    baseline = f"least of {card.TOKENS[0]} to {card.TOKENS[-1]} tokens, shifted by {SHIFT}; "
    baseline += f"copy of {card.COPY_BYTES >> 30} GiB at {card.copy_gbps():.0f} GB/s"
    results.add("kv_move_share_of_copy", min(shares), "", baseline, COPY_GOAL, "higher")
    for case in moves_of(GOAL_TOKENS):
        card.add_share(results, f"kv_move_{case.name}", case.milliseconds(), case.num_bytes, case.goal)
    _measure_pinned(results, GOAL_TOKENS)


def moves_of(tokens: int) -> Iterator[Measured]:
    """Yield moves that leave donors in place, save from a pool, are in fp8, in vLLM's layouts, or of latent rows."""
    donor, pool, fp8 = random_donor(tokens), random_pool(tokens + 32), torch.float8_e4m3fn
    yield Measured("unshifted", Move(donor, 0, 0, tokens), pool)
    yield Measured("save", Move(pool, 0, 0, tokens), donor)
    shifted = Move(random_donor(tokens, fp8), 0, SHIFT, tokens)
    yield Measured("fp8", shifted, random_pool(tokens + 32, fp8), OTHER_COPY_GOAL)
    # Placed into a pool as vLLM lays it out, saved from it, and moved between its blocks.
    for layout, axes in card.VLLM_LAYOUTS.items():
        held = random_layers(2 * tokens + 32, axes)
        yield Measured(f"{layout}_place", Move(donor, 0, SHIFT, tokens), held)
        yield Measured(f"{layout}_save", Move(held, 0, 0, tokens), donor)
        yield Measured(f"{layout}_within", Move(held, 0, tokens + SHIFT, tokens), held)
    donor = random_donor(tokens, sizes=card.DEEPSEEK_V3)
    held = random_layers(tokens + 32, card.LATENT_LAYOUT, card.DEEPSEEK_V3)
    yield Measured("mla", Move(donor, 0, SHIFT, tokens), held, OTHER_COPY_GOAL, card.LATENT_ROTATION)
    yield Measured("mla_save", Move(held, 0, 0, tokens), donor, rotation=card.LATENT_ROTATION)


def _measure_pinned(results: Results, tokens: int) -> None:
    """Add the row of a donor in pinned host memory."""
    pinned, target = ContiguousKv(random_donor(tokens).tensor.cpu().pin_memory()), random_pool(tokens + 32)
    case = Measured("pinned", Move(pinned, 0, SHIFT, tokens), target)
    milliseconds = card.time_ms(lambda: kv_move([case.move], target, ROTATION), repeats=5)
    speed = card.host_gbps(to_device=True)
    baseline = f"{milliseconds:.2f} ms; one copy from pinned memory {speed:.1f} GB/s"
    share = case.num_bytes / 2 / milliseconds / 1e6 / speed
    results.add("kv_move_pinned_share_of_pcie", share, "", baseline, better="higher")


def _check(actual: PagedKv, expected: PagedKv, rotation: Rotation = ROTATION) -> None:
    for ours, theirs in zip(actual.planes, expected.planes, strict=True):
        theirs.copy_(ours)
    donor = random_donor(200, sizes=actual.geometry)
    moves = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
    kv_move(moves, actual, rotation)
    kv_move_by_torch(moves, expected, rotation)
    pairs = zip(actual.planes, expected.planes, strict=True)
    say(f"relative error against torch: {max(card.check_close('kv_move', *pair, 1e-2) for pair in pairs):.1e}")


# The layer whose deviations are measured.
LAYER = 2


def measure_deviation(results: Results) -> None:
    """Check some calls against torch, and measure the kernel by tokens and by vLLM's layouts."""
    errors, layers = [], (random_layers(300, axes) for axes in card.VLLM_LAYOUTS.values())
    for donor in list[PagedKv | ContiguousKv]([random_donor(300), *layers]):
        spans = [Move(donor, 3, 40, 150), Move(donor, 160, 200, 33), Move(donor, 0, 0, 32)]
        fresh = _rows(320)
        expected = relative(squares_by_torch(spans, fresh, LAYER, ROTATION))
        errors.append(card.check_close("deviation", deviation(spans, fresh, LAYER, ROTATION), expected, 1e-4))
    say(f"relative error against torch: {max(errors):.1e}")
    for tokens in card.TOKENS:
        span = Move(random_donor(tokens), 0, SHIFT, tokens)
        _add_deviation(results, f"deviation_{tokens // 1024}k", span, _rows(tokens + 32))
    tokens = card.TOKENS[-1]
    for layout, axes in card.VLLM_LAYOUTS.items():  # as a check: rows of a forward with what was placed in a pool
        placed = Move(random_layers(tokens, axes), 0, 0, tokens, turn=0)
        _add_deviation(results, f"deviation_{layout}", placed, _rows(tokens))


def _rows(tokens: int) -> FreshRows:
    k, v = random_donor(tokens).tensor[LAYER].transpose(1, 2)
    return FreshRows(k, v)


def _add_deviation(results: Results, name: str, span: Move, fresh: FreshRows) -> None:
    """Add the speed of the kernel alone, its table ready on the card."""
    from kernels.deviation import triton_deviation

    output = torch.empty(2, span.length, device="cuda")
    milliseconds = card.time_ms(triton_deviation.prepared(output, [span], fresh, LAYER, ROTATION))
    num_bytes = 2 * span.length * QWEN_7B.bytes_per_token(torch.bfloat16) // QWEN_7B.num_layers
    card.add_share(results, name, milliseconds, num_bytes)


if __name__ == "__main__":
    card.run_on_card(__doc__, kv_move=measure, deviation=measure_deviation)
