"""The sparse forward equals Hugging Face's own wherever nothing approximate is used."""

from functools import cache

import pytest
import torch

from semblend_trt.plan import CheckEvidence, SpanCheck
from tests.engine_wrapper.forward_bench import BLOCK_SIZE, NUM_LAYERS, Bench, close, load, tokens_of
from tests.random_models import FAMILIES, MIXTURES


@pytest.fixture(scope="module")
def benches(tiny_model_paths):
    return cache(lambda family: Bench(load(tiny_model_paths[family])))


@pytest.fixture(params=FAMILIES)
def family_bench(request, benches):
    return benches(request.param).clear()


@pytest.fixture
def bench(benches):
    return benches("qwen2").clear()


@pytest.mark.parametrize("length", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 61])
def test_a_prompt_equals_the_plain_forward(family_bench, length):
    tokens = tokens_of(length)
    assert close(family_bench.cold(tokens)[0], family_bench.reference(tokens))


def test_chunks_and_decode_steps_equal_one_prompt(family_bench):
    first, second = tokens_of(50, 1), tokens_of(40, 2)
    family_bench.run(family_bench.slice(2, second, 0, 37))
    parts, decoded = [], []
    for step, (begin, end) in enumerate([(0, 13), (13, 32), (32, 33)]):
        chunk, step_logits = family_bench.run(
            family_bench.slice(1, first, begin, end), family_bench.slice(2, second, 37 + step, 38 + step)
        )
        parts.append(chunk)
        decoded.append(step_logits)
    parts += [family_bench.run(family_bench.slice(1, first, at, at + 1))[0] for at in range(33, 50)]
    assert close(torch.cat(parts), family_bench.reference(first))
    assert close(torch.cat(decoded), family_bench.reference(second)[37:])


@pytest.mark.parametrize("terms", [{"boundary": 0}, {"boundary": 2}, {"check": SpanCheck(1, 0.1)}], ids=str)
def test_exact_kv_is_neither_computed_nor_written(bench, make_plan, terms):
    """The engine's prefix of 8, an exact span up to 24, and behind it a span that a check finds to deviate in one."""
    tokens = tokens_of(60)
    logits, own = bench.cold(tokens)
    bench.place(1, own, (0, 24))
    exact, donor = bench.kv(1, 24), own.clone()
    if "check" in terms:
        donor[:, :, :, 33] *= 2
    bench.place(1, donor, (26, 48))
    plan = make_plan(tokens, [(8, 24), (26, 48)], num_computed=8, exact={0}, **terms)
    assert close(bench.run(bench.planned(plan))[0], logits[48:])
    assert torch.equal(bench.kv(1, 24), exact)
    assert bench.evidence == [
        CheckEvidence(1, 38, 22, 37, 1, pytest.approx(0, abs=1e-3), is_dropped=False) for _ in range("check" in terms)
    ]


def rows_by_layer(model, part):
    """Counts the rows that really enter each of the model's own layers from now on, or this part of them."""
    counts = [0] * NUM_LAYERS
    for index, layer in enumerate(model.model.layers):

        def count(_, args, index=index):
            counts[index] += args[0].shape[1]

        layer.get_submodule(part).register_forward_pre_hook(count)
    return counts


@pytest.mark.promise(
    "engines",
    "Mixtures of experts: rows that a plan leaves out are routed to none; in vLLM answers are those of a cold run "
    "where all layers are computed again, and where one layer is all",
)
@pytest.mark.known_defect(12)
@pytest.mark.parametrize(
    ("family", "part"), [("qwen2", ""), *((family, "mlp") for family in (*MIXTURES, "deepseek_v3"))]
)
@pytest.mark.parametrize("boundary", range(NUM_LAYERS + 1))
def test_dropped_rows_are_not_computed(tiny_model_paths, make_plan, boundary, family, part):
    """Nor are they routed to experts."""
    tokens, bench = tokens_of(50), Bench(load(tiny_model_paths[family]))
    bench.place(1, bench.cold(tokens)[1], (5, 40))
    counts = rows_by_layer(bench.model, part)
    bench.run(bench.planned(make_plan(tokens, [(5, 40)], boundary=boundary)))
    assert counts == [50] * boundary + [15] * (NUM_LAYERS - boundary)


@pytest.mark.promise(
    "policies", "`verified` runs the lowest layers on all tokens and computes tokens that deviate in all layers"
)
@pytest.mark.parametrize("kind", [0, 1], ids=["K", "V"])
@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_planted_tokens_are_computed_and_the_result_is_cold(bench, make_plan, layer, kind):
    """The donor's KV is the request's own but for a few tokens: wrong in the check's layer, NaN above."""
    tokens, planted = tokens_of(60), [9, 10, 23, 40]
    logits, own = bench.cold(tokens)
    donor = own.clone()
    donor[layer, kind, :, planted] *= 3
    donor[layer + 1 :, :, :, planted] = float("nan")
    bench.place(1, donor, (5, 45))
    plan = make_plan(tokens, [(5, 20), (20, 45)], check=SpanCheck(layer, 0.1))
    assert close(bench.run(bench.planned(plan))[0], logits[45:])
    assert close(bench.kv(1, 60), own[:, :, :, :60])
    (evidence,) = bench.evidence
    assert (evidence.checked_tokens, evidence.recomputed_tokens) == (40, len(planted))
    assert evidence.largest_kept < 1e-3
