"""KV in e4m3 inside a real vLLM: what it stores is what we move, compare and keep, byte for byte."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.cuda import is_available
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from engine_wrapper.layer_schedule import DeviationCheck
from kernels.rope import saturated
from tests.builders.vllm import DOCUMENT, DONOR, FP8, MOVED, NEW, WHOLE, cold_answers, on_card, scale_by, taught
from tests.engine_wrapper.watching import watched

SCALES = {layer: (0.013 * (layer + 1), 0.007 * (layer + 2)) for layer in range(8)}


def same(answer, expected):
    """Equal; on a card but for what e4m3 makes of sums in another order, which some numbers of rows have there."""
    if not is_available():
        return (answer.tokens, answer.logprobs) == (expected.tokens, expected.logprobs)
    far = max(abs(a - b) for a, b in zip(answer.logprobs[:4], expected.logprobs[:4], strict=True))
    return answer.tokens[:4] == expected.tokens[:4] and far < 0.1


@pytest.fixture(scope="module")
def cold():
    return cold_answers(DONOR, MOVED, NEW, **FP8)


@pytest.fixture
def scaled(monkeypatch):
    """Engines have SCALES, as if they had read them from a checkpoint."""
    scale_by(monkeypatch, Attention, SCALES)


@pytest.fixture
def compared(monkeypatch):
    """The deviations of all tokens that each check compares."""
    return watched(monkeypatch, DeviationCheck, "deviations", lambda values, *_: values.tolist())


def assert_compared_alike(compared):
    """By the self-check's plans, over the prompt's own KV."""
    deviations = [each for values in compared for each in values]
    assert len(deviations) > 500
    assert max(deviations) <= (0.05 if is_available() else 0.0)


@pytest.mark.promise(
    "engines",
    "In vLLM KV in e4m3 is stock's to the bit without a plan, unshifted, and with all layers computed again; what "
    "is compared is what is stored; other KV types and scales have namespaces and profiles of their own, and "
    "unknown ones are refused by name",
)
def test_answers_are_vllms_own_without_a_plan_and_with_all_layers_computed_again(engine, cold):
    served = taught(engine(*WHOLE, **FP8))
    for prompt in (NEW, MOVED):
        assert same(served.ask(prompt, max_tokens=8), cold(prompt))
        assert (served.offered >= len(DOCUMENT)) == (prompt is MOVED)


def held(served, blocks, positions):
    """K and V in the pool of a request, each uint8 [layers, kv_heads, positions, head_dim]."""
    kinds = served.worker._forward._parts.pool.kinds
    both = [
        torch.stack([each.view(torch.uint8)[blocks[-1]].transpose(0, 1).flatten(1, 2) for each in kind])
        for kind in kinds
    ]
    return tuple(each[:, :, positions.start : positions.stop].clone() for each in both)


def turned(codes, shift, frequencies):
    """Bytes of K, turned by complex numbers and rounded once."""
    values = codes.view(torch.float8_e4m3fn).double()
    angles = shift * torch.tensor(frequencies, dtype=torch.float64, device=codes.device)
    planes = torch.complex(*values.chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([planes.real, planes.imag], -1).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)


def with_scales(tiny, folder, strategy):
    """A checkpoint that asks for KV in fp8 and holds its scales, as compressed-tensors writes them."""
    shutil.copytree(tiny("qwen3", head_dim=64), folder, dirs_exist_ok=True)
    scales = torch.tensor([[[1.0]], [[2.0]]]) if strategy == "attn_head" else torch.ones(1)
    weights = load_file(folder / "model.safetensors")
    for layer in range(3):
        for kind, scale in zip("kv", SCALES[layer], strict=True):
            weights[f"model.layers.{layer}.self_attn.{kind}_scale"] = scale * scales
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    scheme = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "dynamic": False}
    told = {"quant_method": "compressed-tensors", "format": "naive-quantized", "config_groups": {}, "ignore": []}
    config = folder / "config.json"
    quantized = told | {"quantization_status": "compressed", "kv_cache_scheme": scheme}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": quantized}))
    return folder


@pytest.fixture
def as_a_card(monkeypatch):
    """vLLM's attention on a CPU rounds to the nearest, not towards 0, and has a scale a head, as FlashAttention 3."""
    update, forward = CPUAttentionBackendImpl.do_kv_cache_update, CPUAttentionBackendImpl.forward

    def factor(layer, kind, rows):
        scales = getattr(layer, f"_{kind}_scale").detach()
        return (scales / scales.max()).view(-1, 1).to(rows.dtype)

    def nearest(layer, kind, rows):
        scale = getattr(layer, f"_{kind}_scale").max()
        # A little more, so that nothing of it is lost towards 0.
        return saturated(rows / scale, torch.float8_e4m3fn).to(rows.dtype) * scale * (1 + 2**-6)

    def stored(impl, layer, key, value, *rest):
        rows = {kind: rows / factor(layer, kind, rows) for kind, rows in (("k", key), ("v", value))}
        if impl.kv_cache_dtype != "auto":
            rows = {kind: nearest(layer, kind, each) for kind, each in rows.items()}
        update(impl, layer, *rows.values(), *rest)

    def attend(impl, layer, query, *rest, output, **options):
        of_heads = (factor(layer, kind, query).expand(impl.num_kv_heads, 1) for kind in "kv")
        keys, values = (each.repeat_interleave(impl.num_queries_per_kv, 0) for each in of_heads)
        forward(impl, layer, query * keys, *rest, output=output, **options)
        return output.mul_(values)

    monkeypatch.setattr(CPUAttentionBackendImpl, "do_kv_cache_update", stored)
    monkeypatch.setattr(CPUAttentionBackendImpl, "forward", attend)


@pytest.mark.promise("engines", "In vLLM KV in e4m3 is...")
@pytest.mark.promise("engines", "In vLLM KV in e4m3 that...")
@pytest.mark.usefixtures("as_a_card")
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_a_checkpoint_brings_its_scales(engine, compared, tiny, tmp_path, strategy):
    """Without --kv-cache-dtype."""
    with on_card({"dtype": "bfloat16"}):  # FlashAttention 3 knows no fp8 beside float32
        served = engine("boundary", {"recompute_boundary_layer": 3}, model=with_scales(tiny, tmp_path, strategy))
    wanted = served.cold(MOVED)
    assert taught(served).scheduler.namespace.kv_dtype == "float8_e4m3fn"
    assert_compared_alike(compared)
    assert same(served.ask(MOVED, max_tokens=8), wanted)
    assert served.offered >= len(DOCUMENT)
    found = served.worker._forward._parts.head_scales
    if strategy == "tensor":
        assert found == ()
    else:
        torch.testing.assert_close(found[2].cpu(), torch.tensor(SCALES[2])[:, None] * torch.tensor([1.0, 2.0]))


@pytest.mark.promise("engines", "In vLLM a moved key in e4m3 is the donor's bytes turned and rounded once")
@pytest.mark.usefixtures("scaled")
def test_what_is_moved_is_rounded_once_beyond_the_caches_own_rounding(engine, blocks):
    served = engine("position_fix", **FP8)
    served.ask(DONOR, max_tokens=1)  # computed a second time, by the self-check
    keys, values = held(served, blocks, range(20, 20 + len(DOCUMENT)))
    served = taught(served)
    assert served.ask(MOVED, max_tokens=1).cached >= len(DOCUMENT)
    moved_keys, moved_values = held(served, blocks, range(70, 70 + len(DOCUMENT)))
    assert torch.equal(moved_values, values)
    frequencies = served.worker._worker.facts.rotation.inverse_frequencies
    once = turned(keys, 50, frequencies)
    twice = turned(turned(keys, 20, frequencies), 30, frequencies)
    same, same_twice, unturned = (float((each == moved_keys).float().mean()) for each in (once, twice, keys))
    assert same > 0.999  # float32 and float64 part where a value lies between two
    assert unturned < same_twice < 0.8


@pytest.mark.promise(
    "engines",
    "In vLLM KV in e4m3 that keeps its place is vLLM's own to the bit, and scales of a checkpoint are taken, also "
    "one a head",
)
@pytest.mark.usefixtures("scaled", "as_a_card")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_keeps_its_place_is_stored_as_vllm_stored_it_to_the_bit(engine, blocks, dtype):
    """With scales that are no powers of 2."""
    with on_card({"dtype": "bfloat16"}):
        served = engine("exact", dtype=dtype, **FP8)
        if served.runtime.refusal == "pool_layout":
            pytest.skip(f"skipped: vLLM stores {dtype} in e4m3 in a form of this processor's own")
        served.ask(DONOR, max_tokens=1)
        parts, places = served.worker._forward._parts, range(len(DONOR) - 1)
        stored = held(served, blocks, places)
        taught(served)
        for memory in parts.pool.keys:
            memory.copy_(torch.full_like(memory, torch.nan, dtype=torch.float32).to(memory.dtype))
        assert served.ask([*DONOR, 7], max_tokens=1).cached >= len(DONOR) - 1
        again = held(served, blocks, places)
    for now, before in zip(again, stored, strict=True):
        # As numbers: a backend may store another sign of 0.
        assert torch.equal(*(each.view(torch.float8_e4m3fn).float() for each in (now, before)))


not_on_card = pytest.mark.skipif(
    is_available(), reason="skipped: there no backend stores by heads, and vLLM 0.25.1 itself ended with e5m2"
)


@pytest.mark.promise("engines", "In vLLM KV in e4m3 is...")
@pytest.mark.parametrize(
    ("kind", "reason", "told"),
    [
        pytest.param("fp8_e5m2", "kv_cache_dtype", "fp8_e4m3", marks=not_on_card),
        pytest.param("heads", "kv_scales", "by which this attention backend stores none", marks=not_on_card),
        ("zero", "kv_scales", "k_scale of 0.0"),
    ],
)
def test_other_kinds_and_scales_are_refused_by_name_and_served_as_stock(
    engine, tiny, tmp_path, scaled, monkeypatch, caplog, kind, reason, told
):
    options = {"kv_cache_dtype": kind} if kind == "fp8_e5m2" else FP8
    if kind == "zero":
        monkeypatch.setitem(SCALES, 5, (0.0, 1.0))
    if kind == "heads":
        monkeypatch.undo()
        options = {"model": with_scales(tiny, tmp_path, "attn_head")}
    served = engine(*WHOLE, **options)
    assert served.refusal == reason
    assert told in caplog.text
    if kind != "zero":  # vLLM itself serves nothing by a scale of 0
        assert len(served.ask(DONOR, max_tokens=4).tokens) == 4
    assert not served.faults
