"""Times other tiles and other pieces of KV than those that sparse_prefill chooses, to see whether it chooses well."""

from __future__ import annotations

import argparse
import math
import time
from typing import TYPE_CHECKING

import torch

from kernels.benchmarks.ceilings import time_ms
from kernels.benchmarks.sparse_prefill import Case, make_case, random_rows, sdpa_ms
from kernels.layout import KvGeometry
from kernels.results import require_cuda
from kernels.sparse_prefill.tiles import TileConfig
from kernels.sparse_prefill.triton_attention import choose_config

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

TILES = (
    TileConfig(128, 64, 8, 3),
    TileConfig(128, 64, 8, 4),
    TileConfig(128, 64, 8, 2, 2, 128),
    TileConfig(128, 32, 8, 4, 2, 128),
    TileConfig(128, 128, 8, 2),
    TileConfig(128, 128, 8, 3),
    TileConfig(128, 64, 4, 3),
    TileConfig(64, 64, 4, 2, 2),
    TileConfig(64, 64, 4, 3, 2),
    TileConfig(64, 32, 4, 4, 2),
    TileConfig(64, 32, 4, 3, 3, 160),
    TileConfig(64, 128, 4, 2),
)
DECODE_TILES = (
    TileConfig(16, 32, 4, 4, 4),
    TileConfig(16, 64, 4, 2, 4),
    TileConfig(16, 64, 4, 3, 2),
    TileConfig(16, 64, 4, 3, 3),
    TileConfig(16, 64, 4, 4, 2),
    TileConfig(16, 64, 2, 3, 3),
    TileConfig(16, 128, 4, 2, 2),
    TileConfig(16, 128, 8, 2, 2),
)
# Query heads, KV heads and head dimension of other models, with the tiles that fit them.
OTHER_HEADS = {
    (32, 8, 64): (
        TileConfig(128, 64, 8, 3),
        TileConfig(128, 64, 8, 3, 2, 128),
        TileConfig(128, 128, 8, 3),
        TileConfig(128, 64, 4, 3),
        TileConfig(64, 64, 4, 3, 3),
    ),
    (32, 8, 80): (TileConfig(128, 64, 8, 3), TileConfig(128, 128, 8, 2), TileConfig(64, 64, 4, 3, 2)),
    (16, 4, 256): (
        TileConfig(128, 64, 8, 2),
        TileConfig(128, 32, 8, 2),
        TileConfig(128, 32, 8, 3),
        TileConfig(64, 64, 4, 2),
        TileConfig(64, 32, 4, 3),
    ),
}
PIECES = (256, 512, 1024, 2048, 4096, 8192, 32768)


def main() -> None:
    """Prints milliseconds of every tile and piece; an asterisk marks what is chosen by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.parse_args()
    require_cuda()
    torch.manual_seed(7)
    dense = {"dense 16k": make_case([torch.arange(16384)]), "dense 8k": make_case([torch.arange(8192)])}
    few = {f"{percent} % of 24k": make_case([random_rows(24576, percent)]) for percent in (1, 10)}
    few["128 at 24k"] = make_case([torch.arange(24576 - 128, 24576)])
    decode = {
        "decode 24k": make_case([torch.tensor([24575])]),
        "decode 4k": make_case([torch.tensor([4095])]),
        "decode 8x4k": make_case([torch.tensor([4095])] * 8),
    }
    _print_tiles("head dimension 128", dense | few, TILES)
    _print_tiles("decode", decode, DECODE_TILES)
    _print_pieces(few | decode)
    for (heads, kv_heads, head_dim), tiles in OTHER_HEADS.items():
        geometry = KvGeometry(num_layers=2, kv_heads=kv_heads, head_dim=head_dim, block_size=32)
        case = make_case([torch.arange(16384)], geometry, heads)
        flash = sdpa_ms(case)
        title = f"head dimension {head_dim}, torch SDPA flash {flash:.3f} ms ({case.flops / flash / 1e9:.0f} TFLOP/s)"
        _print_tiles(title, {"dense 16k": case}, tiles)


def _print_tiles(title: str, cases: Mapping[str, Case], tiles: Sequence[TileConfig]) -> None:
    print(f"\n{title}: ms (and TFLOP/s of the first) by block_m x block_n, warps, stages, resident, registers")
    print(" " * 30 + "".join(f"{name:>14}" for name in cases) + f"{'TFLOP/s':>10}{'compiled s':>12}")
    first = next(iter(cases.values()))
    for tile in tiles:
        began = time.perf_counter()
        try:
            for case in cases.values():
                case.check(case.run(tile))
        except RuntimeError as refusal:
            print(f"{_name(tile, first):<30}does not run: {str(refusal).splitlines()[0][:90]}", flush=True)
            continue
        compiled = time.perf_counter() - began
        timings = [_time(case, tile, None) for case in cases.values()]
        tflops = first.flops / timings[0] / 1e9
        columns = "".join(f"{timing:>14.4f}" for timing in timings)
        print(f"{_name(tile, first):<30}{columns}{tflops:>10.0f}{compiled:>12.1f}", flush=True)


def _print_pieces(cases: Mapping[str, Case]) -> None:
    print("\npieces of KV, default tile: ms by the tokens that a program covers")
    print(f"{'':<16}" + "".join(f"{piece or 'chosen':>10}" for piece in (None, *PIECES)))
    for name, case in cases.items():
        timings = (_time(case, None, piece) for piece in (None, *PIECES))
        print(f"{name:<16}" + "".join(f"{timing:>10.4f}" for timing in timings), flush=True)


def _time(case: Case, tile: TileConfig | None, piece: int | None) -> float:
    """Milliseconds, or NaN when that piece needs more memory than the card has."""
    try:
        return time_ms(lambda: case.run(tile, piece), repeats=10)
    except torch.cuda.OutOfMemoryError:
        return math.nan


def _name(tile: TileConfig, case: Case) -> str:
    packed = max(sequence.count for sequence in case.sequences) * case.q.shape[1] // case.geometry.kv_heads
    chosen = "*" if tile == choose_config(packed, case.geometry.head_dim, case.q.dtype) else " "
    registers = tile.max_registers or "all"
    return f"{chosen} {tile.block_m}x{tile.block_n} {tile.num_warps}w {tile.num_stages}s {tile.resident}r {registers}"


if __name__ == "__main__":
    main()
