"""Every layout that a backend may write is found by what it writes, and one that is not known is refused."""

from types import SimpleNamespace

import pytest
import torch

from engine_wrapper.vllm.decoder import in_order, layered_pool, layout_of, write

BLOCKS, HEADS, SIZE, DIM = 5, 2, 4, 8
LATENT, TURNING = 12, 4
SHAPE, ROW = (BLOCKS, HEADS, SIZE, 2 * DIM), (1, SIZE, LATENT + TURNING)
FP8 = torch.float8_e4m3fn
ONE, OF_HEADS = (0.013, 3.7), ((0.013, 0.5), (3.7, 0.1))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def channels(cache):
    return cache[..., :DIM], cache[..., DIM:]


def halves(cache):
    both = cache.view(len(cache), HEADS, 2 * SIZE, DIM)
    return both[:, :, :SIZE], both[:, :, SIZE:]


def transposed(cache):
    keys, values = halves(cache)
    return keys.as_strided(keys.shape, (keys.stride(0), keys.stride(1), 1, SIZE)), values


def in_cache(rows, scale):
    """Rows, [rows, heads, channels], as they are or, by one scale or one for each head, in bytes of e4m3."""
    return rows if scale is None else (rows.float() / torch.tensor(scale).view(-1, 1)).to(FP8).view(torch.uint8)


def backend(seen, scales=None):
    """An attention module that writes where `seen` says, in e4m3 and divided by `scales` where there are any."""

    def update(_, key, value, cache, slots):
        for view, rows, scale in zip(seen(cache), (key, value), scales or (None, None), strict=True):
            view[slots // SIZE, :, slots % SIZE] = in_cache(rows, scale)

    return SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=update))


def latent_backend(*, turning_first=False, updates=True, is_fp8=False):
    """The module of a latent attention, which writes both parts of a row into its slot."""

    def update(latent, turning, cache, slots, _, scale):
        assert cache.shape[1:] == ROW[1:]
        parts = (turning.squeeze(1), latent) if turning_first else (latent, turning.squeeze(1))
        cache.view(-1, ROW[2])[slots] = in_cache(torch.cat(parts, 1)[:, None], scale.item() if is_fp8 else None)[:, 0]

    impl = SimpleNamespace(do_kv_cache_update=update) if updates else SimpleNamespace()
    sizes = {"kv_lora_rank": LATENT, "qk_rope_head_dim": TURNING}
    return SimpleNamespace(impl=impl, kv_cache_dtype="", _k_scale=torch.tensor(0.013), **sizes)


def empty(shape, rows, scales):
    """A cache of NaN, or of e4m3's."""
    return torch.full(shape, torch.nan, dtype=rows) if scales is None else torch.full(shape, 127, dtype=torch.uint8)


def assert_known(attention, caches, shape, kinds, rows, scales):
    """The pool reads what the backend writes into a cache; what is asked of rows leaves the caches as they are."""
    before = [each.clone() for each in caches]
    layout = layout_of(caches[0], attention, shape, rows, scales)
    pool, dtype = layered_pool(caches, layout), rows if scales is None else FP8
    assert (pool.dtype, pool.shape) == (dtype, (BLOCKS, 2, kinds, shape[0] * SIZE * shape[2]))
    given = [torch.randn(11, shape[0], shape[2]).to(rows) for _ in range(kinds)]
    stored = layout.stored(attention, caches[1], given[0], given[1] if kinds == 2 else None)
    for found, own, scale in zip(stored, given, scales or (None, None), strict=False):
        assert torch.equal(found.float(), in_cache(own, scale).view(dtype).float())
    assert all(torch.equal(*(e.view(torch.uint8) for e in both)) for both in zip(caches, before, strict=True))
    slots = torch.arange(11) + SIZE
    write(attention, caches[1], given[0], given[1] if kinds == 2 else None, slots)
    held = [each[1].float().transpose(1, 2).flatten(0, 1)[slots] for each in pool.kinds]
    assert all(torch.equal(own, each.float()) for own, each in zip(held, stored, strict=True))


@pytest.mark.parametrize("scales", [None, ONE, OF_HEADS], ids=["own dtype", "one scale", "scales of heads"])
@pytest.mark.parametrize("rows", DTYPES)
@pytest.mark.parametrize("seen", [channels, halves, transposed])
def test_a_layout_is_known_by_what_its_backend_writes(seen, rows, scales):
    caches = [empty(SHAPE, rows, scales) for _ in range(2)]
    assert_known(backend(seen, scales), caches, (HEADS, SIZE, DIM), 2, rows, scales)


@pytest.mark.parametrize("heads", [(), (1,)], ids=["before vLLM 0.32", "with one head"])
@pytest.mark.parametrize("scales", [None, (0.013, 1.0)], ids=["own dtype", "e4m3"])
@pytest.mark.parametrize("rows", DTYPES)
def test_a_latent_row_is_known_by_what_its_backend_writes(heads, rows, scales):
    caches = [empty((BLOCKS, *heads, *ROW[1:]), rows, scales) for _ in range(2)]
    assert_known(latent_backend(is_fp8=scales is not None), caches, ROW, 1, rows, scales)


def test_memory_in_another_order_is_no_other_layout():
    """NHD: the tokens come before the heads in memory, and after them in the shape."""
    cache = torch.zeros(BLOCKS, SIZE, HEADS, 2 * DIM).transpose(1, 2)
    pool = layered_pool([cache], layout_of(cache, backend(channels), (HEADS, SIZE, DIM)))
    assert pool.keys[0].stride() == (SIZE * HEADS * 2 * DIM, 2 * DIM, HEADS * 2 * DIM, 1)


@pytest.mark.parametrize(
    ("attention", "shapes", "scales"),
    [
        (backend(lambda cache: channels(cache)[::-1]), [SHAPE], None),
        (backend(channels), [(BLOCKS, HEADS, SIZE, 3 * DIM)], None),
        (backend(channels, ONE), [SHAPE], (0.013, 3.0)),
        (backend(channels, ONE), [SHAPE], (0.5, 3.7)),
        (backend(channels, OF_HEADS), [SHAPE], ((0.013, 0.5), (3.7, 3.7))),
        (latent_backend(turning_first=True), [(BLOCKS, SIZE, 16)] * 2, None),
        (latent_backend(updates=False), [(BLOCKS, SIZE, 16)] * 2, None),
        (latent_backend(), [(BLOCKS, SIZE, 16), (BLOCKS, SIZE, 20)], None),
        (latent_backend(), [(BLOCKS, 2, SIZE, 16)] * 2, None),
        (latent_backend(is_fp8=True), [(BLOCKS, SIZE, 16)] * 2, (0.02, 1.0)),
    ],
)
def test_what_is_not_known_is_refused(attention, shapes, scales):
    caches = [torch.zeros(each, dtype=torch.float32 if scales is None else torch.uint8) for each in shapes]
    shape = ROW if hasattr(attention, "kv_lora_rank") else (HEADS, SIZE, DIM)
    layout = layout_of(caches[0], attention, shape, torch.float32, scales)
    assert layout is None or layered_pool(caches, layout) is None


def test_layers_come_in_order_and_without_a_gap():
    names = [f"model.layers.{layer}.self_attn.attn" for layer in (10, 2, 0, 1, *range(3, 10))]
    assert list(in_order(dict.fromkeys(names))) == [names[2], names[3], names[1], *names[4:], names[0]]
    assert in_order(dict.fromkeys(names[:-1])) == {}
    assert in_order({"model.layers.0.attn": None, "model.layers.0.cross_attn": None}) == {}
    assert list(in_order({"1.attn": None, "0.attn": None}).items()) == [("0.attn", None), ("1.attn", None)]
