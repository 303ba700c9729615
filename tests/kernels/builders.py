"""KV and rows that the kernels' tests share: seeded values, and NaN wherever nothing may be read."""

import itertools
import math
import os
from dataclasses import replace

import torch

from kernels import naive
from kernels.deviation import FreshRows
from kernels.layout import ContiguousKv, KvGeometry, LayeredPool, PagedKv, indexable, layer_view, pool_view
from kernels.rope import LayerRotations, RopeRotation
from kernels.sparse_prefill import SequenceRows

BLOCK = 4
FP8 = torch.float8_e4m3fn
# Relative errors in the 2-norm.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}
FP8_TOLERANCE = 0.1  # three bits of mantissa, and the interpreter truncates
_PATCHED = set()  # functions that kernels call, whose language Triton's interpreter would patch at each call


def interpret(monkeypatch):
    """Sends Triton kernels to the interpreter, and lets loops run to bounds that a kernel computed."""
    from triton.runtime import interpreter

    # The interpreter holds scalars in arrays of one element. Triton 3.6 reads them by `int`, which NumPy 2.4 refuses.
    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def call(self, *arguments, **options):
        # The kernel that calls has its language patched until it ends; Triton's own functions keep theirs.
        if self.fn not in _PATCHED:
            _PATCHED.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*arguments, **options)

    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def seeded(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotation_of(rotary_dim=8, interleaved=False, first_channel=0):
    frequencies = tuple(1e4 ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2))
    return RopeRotation(frequencies, rotary_dim, interleaved, first_channel)


def rotations_of(layers, rotary_dim=8, interleaved=False, first_channel=0):
    """Two kinds of layers that turn differently, and a third that does not turn at all."""
    fast = rotation_of(rotary_dim, interleaved, first_channel)
    slow = replace(fast, inverse_frequencies=tuple(each / 7 for each in fast.inverse_frequencies))
    none = replace(fast, inverse_frequencies=(0.0,) * (rotary_dim // 2))
    return LayerRotations((fast, none, slow), tuple((0, 2, 2, 1)[layer % 4] for layer in range(layers)))


def geometry_of(kv_heads=2, head_dim=8, block_size=BLOCK, kv_factor=2, layers=2):
    return KvGeometry(layers, kv_heads, head_dim, block_size, kv_factor)


def donor_of(geometry, tokens, seed, dtype=torch.float32):
    return ContiguousKv(seeded(*geometry.shape(tokens), seed=seed, dtype=dtype))


def target_of(geometry, dtype=torch.float32, blocks=(6, 1, 8, 3, 5)):
    """A pool of 9 blocks that holds nothing."""
    pool = torch.full((9, geometry.num_layers, geometry.kv_factor, geometry.row_elements), math.nan).to(dtype)
    return PagedKv(pool, torch.tensor(blocks), geometry)


# The axes of a cache of K and V in memory, the channels innermost, as vLLM's attention backends have them.
CACHES = {
    "blocks_kinds_nhd": ("blocks", "kinds", "tokens", "heads"),
    "blocks_kinds_hnd": ("blocks", "kinds", "heads", "tokens"),
    "kinds_blocks_nhd": ("kinds", "blocks", "tokens", "heads"),
    "blocks_heads_channels": ("blocks", "heads", "tokens", "kinds"),
}
# In the last one channels and tokens of K have changed places, which Triton does not serve.
LAYOUTS = [*CACHES, "transposed_keys"]
# Of latent rows: layers apart, in longer rows and blocks, and those of a block one after another.
LATENT_LAYOUTS = ["apart", "padded", "layers_inside"]
POOL_BLOCKS, TABLE = 9, torch.tensor([6, 1, 8, 3, 5, 0, 2, 7, 4])


# Channels, tokens of a block, heads, KV heads, dtype.
WIDTHS = [
    (128, 32, 7, 1, torch.bfloat16),
    (128, 64, 4, 4, torch.float16),
    (64, 16, 8, 1, torch.bfloat16),
    (64, 16, 8, 1, torch.float16),
    (64, 64, 4, 2, torch.float32),
    (256, 32, 2, 1, torch.bfloat16),
    (96, 32, 2, 1, torch.float32),
    (80, 5, 4, 2, torch.float16),
    (8, BLOCK, 4, 2, torch.bfloat16),
]


def nan(*shape, dtype=torch.float32, device="cpu", skipped=0):
    """NaN that begins `skipped` elements into its memory."""
    return torch.full((skipped + math.prod(shape),), math.nan, device=device).to(dtype)[skipped:].view(shape)


def pool_of(layout, sizes, device="cpu", dtype=torch.float32, skipped=0):
    """The blocks of TABLE in a pool of NaN: in one tensor, or layer by layer in one of the layouts above."""
    layers, rows = sizes.num_layers, (sizes.block_size, sizes.head_dim)
    if layout == "in_one_tensor":
        pool = nan(POOL_BLOCKS, layers, sizes.kv_factor, sizes.row_elements, dtype=dtype, device=device)
    elif layout in LATENT_LAYOUTS:
        wide = (rows[0] + 1, rows[1] + 16) if layout == "padded" else rows
        first = (POOL_BLOCKS, layers) if layout == "layers_inside" else (layers, POOL_BLOCKS)
        memory = nan(*first, *wide, dtype=dtype, device=device)
        each = memory.unbind(1 if layout == "layers_inside" else 0)
        pool = LayeredPool(tuple(layer[:, None, : rows[0], : rows[1]] for layer in each))
    else:
        pool = _layers_of(layout, sizes, device, dtype, skipped)
    return PagedKv(pool, TABLE, sizes)


def _layers_of(layout, sizes, device, dtype, skipped):
    axes = CACHES.get(layout, ("blocks", "heads", "kinds", "tokens"))
    lengths = {"blocks": POOL_BLOCKS, "kinds": 2, "heads": sizes.kv_heads, "tokens": sizes.block_size}
    shape = [*(lengths[axis] for axis in axes), sizes.head_dim]
    order = [*(axes.index(axis) for axis in ("kinds", "blocks", "heads", "tokens")), 4]
    caches = [nan(*shape, dtype=dtype, device=device, skipped=skipped).permute(order) for _ in range(sizes.num_layers)]
    keys, values = zip(*caches, strict=True)
    if layout not in CACHES:
        keys = tuple(torch.as_strided(k, k.shape, (*k.stride()[:2], 1, sizes.block_size)) for k in keys)
    return LayeredPool(keys, values)


def filled(layout, device, donor, block_size=BLOCK):
    """The donor's tokens in a pool whose other rows are NaN."""
    layers, kinds, heads, tokens, dim = donor.tensor.shape
    pool = pool_of(layout, geometry_of(heads, dim, block_size, kinds, layers), device, donor.tensor.dtype)
    for layer, kind, token in itertools.product(range(layers), range(kinds), range(tokens)):
        naive.row_of(pool, kind, layer, token).copy_(donor.tensor[layer, kind, :, token])
    return pool


def paged(donor, block_size=BLOCK):
    """The donor's tokens in a pool on the CPU."""
    return filled("in_one_tensor", "cpu", donor, block_size)


def fresh_rows(kv, layer):
    """Rows as views of wider ones, as a fused projection makes them: K's strides are not V's."""
    k, *values = (plane.transpose(0, 1) for plane in kv.tensor[layer])
    wide = (torch.cat([nan(len(v), 2, v.shape[2], dtype=v.dtype, device=v.device), v], dim=1) for v in values)
    return FreshRows(k, *(each[:, 2:] for each in wide))


def content(kv):
    """All that the pool holds, float32 [layers * kinds, blocks, kv_heads, block_size, head_dim], on the host."""
    layers, kinds = range(kv.geometry.num_layers), range(kv.geometry.kv_factor)
    return torch.stack([layer_view(kv.pool, kv.geometry, at, kind).float() for at in layers for kind in kinds]).cpu()


def on(kv, device):
    if isinstance(kv, FreshRows):
        return FreshRows(*(each.to(device) for each in kv.planes))
    if isinstance(kv, PagedKv):
        return PagedKv(kv.pool.to(device), kv.block_ids, kv.geometry)
    return ContiguousKv(kv.tensor.to(device))


def error_of(actual, expected):
    """The relative error in the 2-norm, where both are numbers."""
    actual, expected = actual.cpu().double().nan_to_num(), expected.cpu().double().nan_to_num()
    return float((actual - expected).norm() / expected.norm())


def assert_same(actual, expected, dtype=None):
    """NaN stands in the same places, and the rest is as near as `dtype` allows, by default that of `actual`."""
    assert torch.equal(actual.cpu().float().isnan(), expected.cpu().float().isnan())
    assert error_of(actual, expected) <= TOLERANCE.get(dtype or actual.dtype, FP8_TOLERANCE)


def assert_stored(actual, expected):
    """The bytes of two tensors in fp8 are the same; where Triton's interpreter rounds, they are as near as it can."""
    if actual.is_cuda or os.environ.get("TRITON_INTERPRET") != "1":
        assert torch.equal(actual.cpu().view(torch.uint8), expected.cpu().view(torch.uint8))
    assert_same(actual, expected)


def rows_at(first_row, positions, block_ids):
    return SequenceRows(first_row, torch.tensor(positions), torch.tensor(block_ids))


class Batch:
    """Rows at `positions` of several sequences, over a pool of 2 layers with KV up to each sequence's last row, of
    `kv_dtype` or of `dtype`; with a `window` the KV of tokens that no row sees is NaN."""

    def __init__(self, positions, *, heads=4, block_size=16, dtype=torch.float32, window=None, kv_dtype=None, **sizes):
        sizes = {"kv_heads": 2, "head_dim": 16} | sizes
        self.geometry = KvGeometry(num_layers=2, block_size=block_size, **sizes)
        generator = torch.Generator().manual_seed(3)
        needed = [self.geometry.blocks_for(own[-1] + 1) for own in positions]
        blocks = torch.randperm(sum(needed) + 3, generator=generator)[3:].split(needed)
        self.pool = torch.full((sum(needed) + 3, 2, 2, self.geometry.row_elements), math.nan, dtype=dtype)
        view = pool_view(self.pool, self.geometry)
        self.sequences = []
        rows = 0
        for own, ids in zip(positions, blocks, strict=True):
            reached = torch.arange(own[-1] + 1)
            kv = torch.randn(len(reached), 2, 2, *sizes.values(), generator=generator).to(dtype)
            if window is not None:
                seen = {token for position in own for token in range(max(0, position - window + 1), position + 1)}
                kv[sorted(set(reached.tolist()) - seen)] = math.nan
            view[ids[reached // block_size], :, :, :, reached % block_size] = kv
            self.sequences.append(SequenceRows(rows, torch.tensor(own), ids))
            rows += len(own)
        self.pool = self.pool.to(kv_dtype or dtype)
        self.q = torch.randn(rows, heads, sizes["head_dim"], generator=generator).to(dtype)

    def on(self, device):
        sequences = [sequence.to(device) for sequence in self.sequences]
        return self.q.to(device), self.pool.to(device, copy=True), sequences


def token_rows(kv, positions):
    """A copy of single positions in all layers, [layers, kv_factor, tokens, kv_heads, head_dim]."""
    sizes = kv.geometry.num_layers, kv.geometry.kv_factor, len(positions)
    places = itertools.product(*map(range, sizes[:2]), positions.tolist())
    rows = [indexable(naive.row_of(kv, kind, layer, at)) for layer, kind, at in places]
    return torch.stack(rows).view(kv.pool.dtype).unflatten(0, sizes)
