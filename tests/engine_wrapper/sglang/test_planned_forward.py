"""Plans before SGLang's own forward: with everything computed, answers are those of cold runs."""

import shutil

import pytest
from safetensors.torch import load_file, save_file
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

from tests.builders.vllm import DOCUMENT, DONOR, MOVED, NEW, assert_cold, near
from tests.engine_wrapper.sglang.conftest import CHUNKS, OTHER, PAGES, PLAIN, WHOLE, some
from validation.models import shipped_model

LEADS = some(80)


@pytest.mark.promise(
    "engines",
    "In SGLang answers are those of cold runs with all layers computed again, and KV that moved never enters its "
    "prefix cache",
)
@pytest.mark.parametrize("options", [PLAIN, {}, PAGES, CHUNKS], ids=["plain", "overlap", "pages", "chunks"])
def test_answers_are_those_of_cold_runs(serve, cold, options, record_property):
    with serve(WHOLE, **options) as served:
        served.teach()
        moved, other, _ = assert_cold(served, cold, MOVED, OTHER, NEW)
        assert moved.cached >= 480
        pairs = zip(moved.logprobs, cold(MOVED).logprobs, strict=True)
        record_property("logprob_difference", max(abs(ours - theirs) for ours, theirs in pairs))
        assert moved.receipt["offered_tokens"] >= 480
        assert other.receipt["outcome"] == "backend_materialized_reuse"
        # What is exact alone is in SGLang's own prefix cache.
        assert assert_cold(served, cold, DONOR)[0].receipt["exact_prefix_tokens"] >= len(DONOR) - 16


@pytest.mark.promise("engines", "In SGLang answers are those of...")
def test_moved_kv_is_never_served_from_the_prefix_cache(serve, profile_at, record_property):
    """Fill the cache with approximate requests, evict, and ask again."""
    hits = 0
    with serve(profile_at({"layer": 1, "threshold": 1.0}), max_total_tokens=2048) as served:
        served.teach()
        for n in [0, 1, 2, 3] * 2:
            prompt = [*LEADS[: 40 + 9 * n], *DOCUMENT[:400], *NEW[:30]]
            answer = served.ask(prompt, max_tokens=4)
            assert answer.receipt["reused_tokens"] >= 300
            longer = served.ask([*prompt, *answer.tokens, *NEW[:20]], max_tokens=1)
            # What comes before the document is exact.
            hits += sum(max(0, each.receipt["exact_prefix_tokens"] - 40 - 9 * n) for each in (answer, longer))
    record_property("contaminated_hits", hits)
    assert hits == 0


@pytest.mark.promise("engines", "In SGLang salts keep requests apart,...")
def test_donors_of_other_weights_are_dropped(serve, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(shipped_model(), other)
    weights = load_file(other / "model.safetensors")
    save_file({name: tensor * 1.01 for name, tensor in weights.items()}, other / "model.safetensors", {"format": "pt"})
    with serve() as served:
        served.teach()
        update = UpdateWeightFromDiskReqInput(model_path=str(other), load_format="auto", flush_cache=False)
        served.local.scheduler.process_input_requests([update])
        assert served.ask(MOVED).receipt["offered_tokens"] == 0
        assert served.runtime.weights_changes == 1


@pytest.mark.promise("engines", "In SGLang Llama, Qwen2 and Qwen3 answer as stock, and the fleet hears of donors")
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_answers_of_each_model_are_those_of_stock(serve, tiny_model_paths, family):
    lead, document, tail = ([*range(begin, end)] for begin, end in ((10, 50), (60, 200), (210, 250)))
    donor, moved = [*tail[:20], *document, *lead], [*lead, *tail[:30], *document, *tail]
    options = {"model": str(tiny_model_paths[family])}
    with serve(None, disable_radix_cache=True, **options) as stock:
        wanted = stock.ask(moved, max_tokens=8)
    with serve({"POLICY": "boundary", "RECOMPUTE_BOUNDARY_LAYER": "3"}, **options) as served:
        served.teach(donor, warm=[*range(250, 100, -1)])
        found = served.ask(moved, max_tokens=8)
    assert found.tokens == wanted.tokens
    assert near(found.logprobs, wanted.logprobs)
    assert found.receipt["recomputed_tokens"] == found.receipt["offered_tokens"] >= len(document) - 2
    assert found.cached >= len(lead) + found.receipt["offered_tokens"]
