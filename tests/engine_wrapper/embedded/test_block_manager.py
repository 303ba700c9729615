"""The reuse tree, and the manager of all blocks: every block is in one place, and its readers see their own prefix."""

from collections import Counter

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine_wrapper.embedded.block_manager import BlockManager, RadixTree, RootKey
from engine_wrapper.embedded.llm_args import KvCacheConfig
from semblend_trt.runtime import ActivePlans
from tests.builders.engine import published_nodes

KEY = RootKey()
BLOCK = 4


def manager(num_blocks=8, **config):
    return BlockManager(num_blocks, KvCacheConfig(tokens_per_block=BLOCK, **config), lambda source, target: None)


def put(tree, tokens, first_block=0, key=KEY):
    """Publishes the full blocks of `tokens` and lets go of them; returns the nodes."""
    path = []
    for index in range(len(tokens) // BLOCK):
        block = tuple(tokens[index * BLOCK : (index + 1) * BLOCK])
        parent = path[-1] if path else None
        path.append(tree.insert(key, parent, block, first_block + index))
    tree.release(path)
    return path


_blocks = st.lists(st.integers(0, 1), min_size=BLOCK, max_size=BLOCK)


@given(st.lists(_blocks, unique_by=tuple, max_size=8), st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK))
def test_of_all_children_the_first_with_the_longest_beginning_is_named(children, prompt):
    tree = RadixTree(BLOCK)
    nodes = [put(tree, child, first_block=at)[0] for at, child in enumerate(children)]
    match = tree.match(KEY, prompt)
    limit = min(len(prompt) - 1, BLOCK)
    lengths = [max(n for n in range(limit + 1) if prompt[:n] == child[:n]) for child in children]
    longest = max(lengths, default=0)
    expected = nodes[lengths.index(longest)] if longest else None
    assert (match.nodes, match.partial, match.partial_tokens) == ((), expected, longest)
    assert tree.match(KEY, prompt, partial=False).partial is None


class BlockManagerMachine(RuleBasedStateMachine):
    """Random requests over a small alphabet, whose slots hold the whole prefix that they stand for."""

    NUM_BLOCKS = 7

    def __init__(self):
        super().__init__()
        self.content = {block: [None] * BLOCK for block in range(self.NUM_BLOCKS)}
        config = KvCacheConfig(tokens_per_block=BLOCK)
        self.blocks = BlockManager(self.NUM_BLOCKS, config, self.copy)
        self.running = {}  # request id -> [key, tokens, written, total, held]
        self.next_id = 0

    def copy(self, source, target):
        self.content[target] = list(self.content[source])

    def write(self, request_id, begin, end):
        key, tokens = self.running[request_id][:2]
        ids = self.blocks.block_ids(request_id)
        published = {node.block_id for _, node in published_nodes(self.blocks)}
        others = {b for r in self.running if r != request_id for b in self.blocks.block_ids(r)}
        for position in range(begin, end):
            block = ids[position // BLOCK]
            assert block not in published, "a shared block is written"
            assert block not in others, "a block has two writers"
            self.content[block][position % BLOCK] = (key, tuple(tokens[: position + 1]))

    @rule(
        salt=st.sampled_from([None, "a"]),
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14),
        new=st.integers(1, 6),
    )
    def admit(self, salt, tokens, new):
        key = RootKey(cache_salt=salt)
        match = self.blocks.match(key, tokens)
        if not self.blocks.fits(match, len(tokens) + new):
            return
        self.next_id += 1
        matched = self.blocks.add_sequence(self.next_id, key, match, len(tokens) + new)
        assert matched < len(tokens)
        self.running[self.next_id] = [key, tokens, matched, len(tokens) + new, False]
        self.blocks.allocate(self.next_id, len(tokens))
        self.read(self.next_id)

    def active(self):
        return sorted(r for r, state in self.running.items() if not state[4])

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def compute(self, data):
        """A chunk of the prompt, or one more token; what is written is published."""
        request_id = data.draw(st.sampled_from(self.active()))
        state = self.running[request_id]
        _, tokens, written, total, _ = state
        if written == len(tokens):
            if len(tokens) == total:
                return
            tokens.append(data.draw(st.integers(0, 1)))
            self.blocks.allocate(request_id, len(tokens))
        end = data.draw(st.integers(written + 1, len(tokens)))
        self.write(request_id, written, end)
        state[2] = end
        if data.draw(st.booleans()):
            self.blocks.publish(request_id, tokens[:end])

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def hold(self, data):
        request_id = data.draw(st.sampled_from(self.active()))
        _, tokens, written, _, _ = self.running[request_id]
        self.blocks.publish(request_id, tokens[:written])
        self.blocks.stop_growing(request_id)
        self.running[request_id][4] = True

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        request_id = data.draw(st.sampled_from(sorted(self.running)))
        self.blocks.release(request_id)
        del self.running[request_id]

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def pin(self, data):
        request_id = data.draw(st.sampled_from(self.active()))
        _, tokens, written, _, _ = self.running.pop(request_id)
        self.blocks.publish(request_id, tokens[:written])
        self.blocks.pin(request_id)

    @precondition(lambda self: self.blocks._pins)
    @rule(data=st.data())
    def unpin(self, data):
        self.blocks.unpin(data.draw(st.sampled_from(sorted(self.blocks._pins))))

    def read(self, request_id):
        key, tokens, written = self.running[request_id][:3]
        ids = self.blocks.block_ids(request_id)
        for position in range(written):
            assert self.content[ids[position // BLOCK]][position % BLOCK] == (key, tuple(tokens[: position + 1]))

    @invariant()
    def every_reader_sees_its_own_prefix(self):
        for request_id in self.running:
            self.read(request_id)

    @invariant()
    def every_block_is_in_one_place(self):
        tree = {node.block_id for _, node in published_nodes(self.blocks)}
        private = Counter(b for r in self.running for b in self.blocks.block_ids(r) if b not in tree)
        assert all(count == 1 for count in private.values())
        free = list(self.blocks._free)
        assert sorted([*free, *tree, *private]) == list(range(self.NUM_BLOCKS))

    @invariant()
    def references_are_the_readers(self):
        readers = Counter(node for sequence in self.blocks._sequences.values() for node in sequence.path)
        readers.update(node for path in self.blocks._pins.values() for node in path)
        for _, node in published_nodes(self.blocks):
            assert node.references == readers[node]
            assert node.parent is not None
        unread = {node for _, node in published_nodes(self.blocks) if not node.references}
        assert unread == set(self.blocks._tree._unreferenced)

    @invariant()
    def promises_can_be_kept(self):
        promised = sum(max(0, s.total_blocks - len(s.block_ids)) for s in self.blocks._sequences.values())
        assert promised <= self.blocks.num_free_blocks

    def teardown(self):
        for request_id in list(self.running):
            self.blocks.release(request_id)
        for request_id in list(self.blocks._pins):
            self.blocks.unpin(request_id)
        assert self.blocks.num_free_blocks == self.NUM_BLOCKS


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=60, stateful_step_count=50)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(span_start=st.integers(0, 60), length=st.integers(62, 90))
def test_only_blocks_in_front_of_a_moved_span_are_reusable(make_plan, span_start, length):
    held = manager(24)
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
