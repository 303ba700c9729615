import pytest

from engine_wrapper.embedded.block_manager import RadixTree, RootKey, common_length
from semblend_trt.errors import SemBlendError

KEY = RootKey()
BLOCK = 4


def put(tree, tokens, first_block=0, key=KEY):
    """Publishes the full blocks of `tokens` and lets go of them; returns the nodes."""
    path = []
    for index in range(len(tokens) // BLOCK):
        block = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
        parent = path[-1] if path else None
        path.append(tree.insert(key, parent, block, first_block + index))
    tree.release(path)
    return path


def test_whole_blocks_match_and_the_last_token_never_does():
    tree = RadixTree(BLOCK)
    nodes = put(tree, range(8))
    assert tree.match(KEY, list(range(9))).nodes == tuple(nodes)
    match = tree.match(KEY, list(range(8)))
    assert match.nodes == (nodes[0],)
    assert (match.partial, match.partial_tokens) == (nodes[1], 3)


def test_a_partial_match_names_the_child_with_the_longest_beginning():
    tree = RadixTree(BLOCK)
    put(tree, [0, 1, 9, 9], first_block=0)
    (longest,) = put(tree, [0, 1, 2, 9], first_block=1)
    match = tree.match(KEY, [0, 1, 2, 3, 4])
    assert (match.nodes, match.partial, match.partial_tokens) == ((), longest, 3)
    assert tree.match(KEY, [0, 1, 2, 3, 4], partial=False).partial is None
    assert tree.match(KEY, [7, 1, 2, 3, 4]).partial is None


@pytest.mark.parametrize("other", [RootKey(cache_salt="a"), RootKey(lora_task_id=1), RootKey(1, "a")])
def test_another_salt_or_adapter_sees_nothing(other):
    tree = RadixTree(BLOCK)
    put(tree, range(8))
    match = tree.match(other, list(range(9)))
    assert (match.nodes, match.partial) == ((), None)


def test_eviction_takes_the_least_recently_used_leaf_first():
    tree = RadixTree(BLOCK)
    old = put(tree, range(8), first_block=0)
    put(tree, [50, 51, 52, 53], first_block=10)
    tree.acquire(old)
    tree.release(old)
    assert [tree.evict() for _ in range(4)] == [10, 1, 0, None]
    assert len(tree) == tree.num_evictable == 0


def test_a_referenced_path_is_not_evicted():
    tree = RadixTree(BLOCK)
    nodes = put(tree, range(12))
    tree.acquire(nodes[:2])
    assert tree.num_evictable == 1
    assert [tree.evict(), tree.evict()] == [2, None]
    tree.release(nodes[:2])
    assert [tree.evict(), tree.evict()] == [1, 0]


def test_touch_saves_a_leaf_and_its_parents_until_last():
    tree = RadixTree(BLOCK)
    first = put(tree, range(8), first_block=0)
    put(tree, [50, 51, 52, 53], first_block=10)
    tree.touch(first[1])
    assert [tree.evict() for _ in range(3)] == [10, 1, 0]


def test_a_root_without_blocks_is_forgotten():
    tree = RadixTree(BLOCK)
    for salt in range(100):
        put(tree, range(4), key=RootKey(cache_salt=str(salt)))
        tree.evict()
    assert tree._roots == {} == tree._keys


def test_only_full_new_and_anchored_blocks_are_taken():
    tree = RadixTree(BLOCK)
    (node,) = put(tree, range(4))
    with pytest.raises(SemBlendError, match="full blocks of 4"):
        tree.insert(KEY, None, (1, 2), 7)
    with pytest.raises(SemBlendError, match="repeats a prefix"):
        tree.insert(KEY, None, (0, 1, 2, 3), 7)
    with pytest.raises(SemBlendError, match="nobody references"):
        tree.insert(KEY, node, (4, 5, 6, 7), 7)


def test_only_an_unreferenced_leaf_leaves_the_tree():
    tree = RadixTree(BLOCK)
    nodes = put(tree, range(8))
    with pytest.raises(SemBlendError, match="1 children"):
        tree.remove(nodes[0])
    tree.acquire(nodes)
    with pytest.raises(SemBlendError, match="1 readers"):
        tree.remove(nodes[1])


def test_walk_lists_every_node_with_its_key():
    tree = RadixTree(BLOCK)
    salted = RootKey(cache_salt="a")
    put(tree, range(8), first_block=0)
    put(tree, range(4), first_block=5, key=salted)
    assert {(key, node.block_id) for key, node in tree.walk()} == {(KEY, 0), (KEY, 1), (salted, 5)}


def test_common_length():
    assert common_length((1, 2, 3), (1, 2, 4)) == 2
    assert common_length((1, 2), (1, 2, 4)) == 2
    assert common_length((), (1,)) == 0
