"""Each model class that is served: with everything that was promised computed, its tokens are stock SGLang's."""

import pytest

from tests.builders.vllm import near

LEAD, DOCUMENT, TAIL = ([*range(begin, end)] for begin, end in ((10, 50), (60, 200), (210, 250)))
DONOR, MOVED = [*TAIL[:20], *DOCUMENT, *LEAD], [*LEAD, *TAIL[:30], *DOCUMENT, *TAIL]
WHOLE = {"POLICY": "boundary", "RECOMPUTE_BOUNDARY_LAYER": "3"}


@pytest.mark.promise("engines", "In SGLang Llama, Qwen2 and Qwen3 answer as stock, and the fleet hears of donors")
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_answers_of_each_model_are_those_of_stock(serve, tiny_model_paths, family):
    options = {"model": str(tiny_model_paths[family])}
    with serve(None, disable_radix_cache=True, **options) as stock:
        wanted = stock.ask(MOVED, max_tokens=16)
    with serve(WHOLE, **options) as served:
        served.teach(DONOR, warm=[*range(250, 100, -1)])
        found = served.ask(MOVED, max_tokens=16)
    assert found.tokens == wanted.tokens
    assert near(found.logprobs, wanted.logprobs)
    assert found.receipt["recomputed_tokens"] == found.receipt["offered_tokens"] >= len(DOCUMENT) - 2
    assert found.cached >= len(LEAD) + found.receipt["offered_tokens"]
