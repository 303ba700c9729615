"""What the reuse tree matches, and what of a moved span it holds; random lives hold the rest."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_wrapper.embedded.block_manager import BlockManager, RadixTree, RootKey
from engine_wrapper.embedded.llm_args import KvCacheConfig
from semblend_trt.runtime import ActivePlans

KEY = RootKey()
BLOCK = 4


_blocks = st.lists(st.integers(0, 1), min_size=BLOCK, max_size=BLOCK)


@given(st.lists(_blocks, unique_by=tuple, max_size=8), st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK))
def test_of_all_children_the_first_with_the_longest_beginning_is_named(children, prompt):
    tree = RadixTree(BLOCK)
    nodes = [tree.insert(KEY, None, tuple(child), at) for at, child in enumerate(children)]
    match = tree.match(KEY, prompt)
    limit = min(len(prompt) - 1, BLOCK)
    lengths = [max(n for n in range(limit + 1) if prompt[:n] == child[:n]) for child in children]
    longest = max(lengths, default=0)
    expected = nodes[lengths.index(longest)] if longest else None
    assert (match.nodes, match.partial, match.partial_tokens) == ((), expected, longest)
    assert tree.match(KEY, prompt, partial=False).partial is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(span_start=st.integers(0, 60), length=st.integers(62, 90))
def test_only_blocks_in_front_of_a_moved_span_are_reusable(make_plan, span_start, length):
    held = BlockManager(24, KvCacheConfig(tokens_per_block=BLOCK), lambda source, target: None)
    held.publication, tokens = ActivePlans(), list(range(length))
    held.publication.put(
        make_plan(range(length), [(span_start, length - 1)], request_id=1, shift=3, num_layers=4, block_size=BLOCK)
    )
    held.add_sequence(1, KEY, held.match(KEY, tokens), length)
    held.allocate(1, length)
    held.publish(1, tokens)
    held.release(1)
    matched = held.match(KEY, tokens)
    assert len(matched.nodes) * BLOCK + matched.partial_tokens == span_start // BLOCK * BLOCK
