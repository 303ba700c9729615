"""Every layout that a backend may write is found by what it writes, and one that is not known is refused."""

from types import SimpleNamespace

import pytest
import torch

from engine_wrapper.vllm.decoder import in_order, layered_pool, layout_of

BLOCKS, HEADS, SIZE, DIM = 5, 2, 4, 8
FP8 = torch.float8_e4m3fn


def channels(cache):
    return cache[..., :DIM], cache[..., DIM:]


def halves(cache):
    both = cache.view(len(cache), HEADS, 2 * SIZE, DIM)
    return both[:, :, :SIZE], both[:, :, SIZE:]


def transposed(cache):
    keys, values = halves(cache)
    return keys.as_strided(keys.shape, (keys.stride(0), keys.stride(1), 1, SIZE)), values


def scrambled(cache):
    keys, values = channels(cache)
    return keys.flip(-1), values


SHAPE = BLOCKS, HEADS, SIZE, 2 * DIM
LAYOUTS = [channels, halves, transposed]


def in_fp8(rows, scale):
    """Rows, [rows, heads, channels], by one scale or one for each head."""
    return (rows.float() / torch.tensor(scale).view(-1, 1)).to(FP8)


def backend(seen, scales=None):
    """An attention module that writes where `seen` says, in e4m3 and divided by `scales` where there are any."""

    def update(_, key, value, cache, slots):
        for view, rows, scale in zip(seen(cache), (key, value), scales or (None, None), strict=True):
            written = rows if scale is None else in_fp8(rows, scale).view(torch.uint8)
            for slot, row in zip(slots.tolist(), written, strict=True):
                # A flipped view is a copy, so its place is written by index.
                if seen is scrambled and view.shape[-1] == DIM and rows is key:
                    cache[slot // SIZE, :, slot % SIZE, :DIM] = row.flip(-1)
                else:
                    view[slot // SIZE, :, slot % SIZE] = row

    return SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))


def pool_of(caches, attention):
    layout = layout_of(caches[0], attention, (HEADS, SIZE, DIM))
    return None if layout is None else layered_pool(caches, layout)


def name_of(layer):
    return f"model.layers.{layer}.self_attn.attn"


@pytest.mark.parametrize("seen", LAYOUTS)
def test_a_layout_is_known_by_what_its_backend_writes(seen):
    caches = [torch.full(SHAPE, float("nan")) for _ in range(3)]
    pool = pool_of(caches, backend(seen))
    assert pool.shape == (BLOCKS, 3, 2, HEADS * SIZE * DIM)
    assert all(cache.isnan().all() for cache in caches)
    pool.keys[1][3, 1, 2], pool.values[2][4, 0, 3] = torch.arange(DIM), torch.arange(DIM) + 50.0
    assert torch.equal(seen(caches[1])[0][3, 1, 2], torch.arange(DIM).float())
    assert torch.equal(seen(caches[2])[1][4, 0, 3], torch.arange(DIM) + 50.0)


def test_memory_in_another_order_is_no_other_layout():
    """NHD: the tokens come before the heads in memory, and after them in the shape."""
    pool = pool_of([torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2)], backend(channels))
    assert pool.keys[0].stride() == (SIZE * HEADS * 2 * DIM, 2 * DIM, HEADS * 2 * DIM, 1)


@pytest.mark.parametrize(
    ("seen", "shape"),
    [(scrambled, SHAPE), (channels, (BLOCKS, HEADS, SIZE, 3 * DIM))],
    ids=["another order of channels", "another shape"],
)
def test_what_is_not_known_is_refused(seen, shape):
    assert pool_of([torch.zeros(shape)], backend(seen)) is None


@pytest.mark.parametrize("scales", [(0.013, 3.7), ((0.013, 0.5), (3.7, 0.1))], ids=["one", "of heads"])
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seen", LAYOUTS)
def test_bytes_of_e4m3_are_read_by_the_scales_that_wrote_them(seen, rows, scales):
    cache = torch.full(SHAPE, 0x7F, dtype=torch.uint8)
    attention = backend(seen, scales)
    layout = layout_of(cache, attention, (HEADS, SIZE, DIM), rows, scales)
    assert layered_pool([cache], layout).dtype == FP8
    keys, values = (torch.randn(11, HEADS, DIM, dtype=rows) for _ in range(2))
    stored = layout.stored(attention, cache, keys, values)
    for found, own, scale in zip(stored, (keys, values), scales, strict=True):
        assert torch.equal(found.float(), in_fp8(own, scale).float())
    assert bool((cache == 0x7F).all())  # it writes into memory of its own
    for others in ((0.013, 3.0), (0.5, 3.7), ((0.013, 0.5), (3.7, 3.7))):
        assert layout_of(cache, attention, (HEADS, SIZE, DIM), rows, others) is None


def test_layers_come_in_order_and_without_a_gap():
    names = [name_of(layer) for layer in (10, 2, 0, 1, *range(3, 10))]
    assert list(in_order(dict.fromkeys(names))) == [name_of(layer) for layer in range(11)]
    assert in_order(dict.fromkeys(names[:-1])) == {}
    assert in_order({"model.layers.0.attn": None, "model.layers.0.cross_attn": None}) == {}
    assert list(in_order({"1.attn": None, "0.attn": None}).items()) == [("0.attn", None), ("1.attn", None)]


LATENT, TURNING = 12, 4


def latent_backend(*, turning_first=False, updates=True):
    """The module of a latent attention, which writes both parts of a row into its slot."""

    def update(latent, turning, cache, slots, *scale):
        parts = (turning.squeeze(1), latent) if turning_first else (latent, turning.squeeze(1))
        cache.view(-1, LATENT + TURNING)[slots] = torch.cat(parts, dim=1)

    impl = SimpleNamespace(do_kv_cache_update=update) if updates else SimpleNamespace()
    sizes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": TURNING}
    return SimpleNamespace(impl=impl, kv_cache_dtype="auto", _k_scale=torch.ones(1), **sizes)


@pytest.mark.parametrize("heads", [(), (1,)], ids=["before vLLM 0.32", "with one head"])
@pytest.mark.parametrize("rows", [torch.float32, torch.bfloat16, torch.float16])
def test_latent_rows_in_e4m3_are_read_by_the_scale_of_k_that_wrote_them(heads, rows):
    def update(latent, turning, cache, slots, kind, scale):
        assert (kind, cache.shape[1:]) == ("fp8", (SIZE, LATENT + TURNING))
        row = torch.cat((latent, turning.squeeze(1)), dim=1)
        cache.view(-1, LATENT + TURNING)[slots] = in_fp8(row[:, None], scale.item())[:, 0].view(torch.uint8)

    attention = latent_backend()
    attention.impl, attention.kv_cache_dtype = SimpleNamespace(do_kv_cache_update=update), "fp8"
    attention._k_scale = torch.tensor(0.013)
    cache = torch.full((BLOCKS, *heads, SIZE, LATENT + TURNING), 0x7F, dtype=torch.uint8)
    layout = layout_of(cache, attention, (1, SIZE, LATENT + TURNING), rows, (0.013, 1.0))
    given = torch.randn(11, 1, LATENT + TURNING, dtype=rows)
    (found,) = layout.stored(attention, cache, given, None)
    assert torch.equal(found.float(), in_fp8(given, 0.013).float())
    assert bool((cache == 0x7F).all())  # it writes into memory of its own
    assert layout_of(cache, attention, (1, SIZE, LATENT + TURNING), rows, (0.02, 1.0)) is None


@pytest.mark.parametrize("heads", [(), (1,)], ids=["before vLLM 0.32", "with one head"])
def test_a_latent_row_is_known_by_what_its_backend_writes(heads):
    caches = [torch.full((BLOCKS, *heads, SIZE, 16), float("nan")) for _ in range(2)]
    layout = layout_of(caches[0], latent_backend(), (1, SIZE, 16))
    pool = layered_pool(caches, layout)
    assert (pool.shape, pool.values) == ((BLOCKS, 2, 1, SIZE * 16), ())
    assert all(cache.isnan().all() for cache in caches)
    pool.keys[1][3, 0, 2] = torch.arange(16)
    assert torch.equal(caches[1][3].view(SIZE, 16)[2], torch.arange(16).float())


@pytest.mark.parametrize(
    ("attention", "shapes"),
    [
        (latent_backend(turning_first=True), [(BLOCKS, SIZE, 16)] * 2),
        (latent_backend(updates=False), [(BLOCKS, SIZE, 16)] * 2),
        (latent_backend(), [(BLOCKS, SIZE, 16), (BLOCKS, SIZE, 20)]),
        (latent_backend(), [(BLOCKS, 2, SIZE, 16)] * 2),
    ],
    ids=["another order of channels", "no way to write", "another row in a layer", "two heads"],
)
def test_latent_rows_that_are_not_known_are_refused(attention, shapes):
    caches = [torch.zeros(shape) for shape in shapes]
    layout = layout_of(caches[0], attention, (1, SIZE, 16))
    assert layout is None or layered_pool(caches, layout) is None
    assert layout_of(caches[0], latent_backend(), (1, SIZE, 16), torch.float32, (1.0, 1.0)) is None
