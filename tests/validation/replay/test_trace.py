"""What is kept of a trace and what is refused; what a cache holds, what counts as reused, and the optimum above all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.errors import ConfigurationError
from validation.replay.simulation import EXACT_PREFIX, OPTIMUM, POLICIES, BlockCache, ReuseRule, simulate
from validation.replay.trace import MOONCAKE, NONE, TraceBlock, TraceLine, trace_file, trace_of


def line(index, contents, tokens, tenant=None, **fields):
    """A line: its number, which is also its second, the blocks' contents and their tokens."""
    blocks = [TraceBlock(content_hash=c, token_count=n) for c, n in zip(contents, tokens, strict=True)]
    return TraceLine.model_validate({"timestamp_ms": 1_000.0 * index, "tenant_id": tenant, "blocks": blocks} | fields)


def uses(trace):
    """The blocks of each request by content, and by all before them."""
    return tuple([list(request) for _, request in each.requests] for each in (trace, trace.prefixes()))


def test_blocks_are_told_apart_by_content_or_by_all_before():
    trace = trace_of([line(0, "ab", [1, 2]), line(1, "cb", [3, 2]), line(2, "ab", [1, 2])])
    assert uses(trace) == ([[0, 1], [2, 1], [0, 1]], [[0, 1], [2, 3], [0, 1]])
    assert list(trace.prefixes().parents) == [-1, 0, -1, 2]
    assert trace.prompt_tokens == 11


@pytest.mark.parametrize(
    "other",
    [{"tenant": "b"}, {"tenant": None}, {"tenant": "a", "model_name": "another"}, {"tenant": "a", "tokens": [6]}],
)
def test_other_tenants_models_and_lengths_share_nothing(other):
    first = {"contents": ["x"], "tokens": [5], "tenant": "a"}
    trace = trace_of([line(0, **first), line(1, **(first | other)), line(2, **first)])
    assert uses(trace) == ([[0], [1], [0]], [[0], [1], [0]])


def test_a_block_without_content_is_not_shared_and_ends_the_prefix_and_text_stands_for_a_missing_hash():
    trace = trace_of([line(0, ["a", None, "b"], [1, 2, 3])] * 2)
    assert uses(trace) == ([[0, -1, 1]] * 2, [[0, -1, -1]] * 2)
    said = [TraceBlock(text=text, token_count=2) for text in ("same", "same", "other")]
    assert uses(trace_of([line(0, [], [], blocks=said)]))[0] == [[0, 0, 1]]


def test_requests_are_replayed_in_the_order_of_their_times():
    trace = trace_of([line(2, "a", [1]), line(1, "b", [2]), line(1, "c", [3])])
    assert [(tokens, *request) for tokens, request in trace.requests] == [(2, 1), (3, 2), (1, 0)]


LINES = """
{"timestamp": 90000, "input_length": 1902, "output_length": 654, "hash_ids": [0, 975, 976, 977]}
{"timestamp": 108000, "input_length": 1661, "output_length": 93, "hash_ids": [0, 5021, 7897, 7898]}
{"timestamp": 168000, "input_length": 1902, "output_length": 661, "hash_ids": [0, 975, 976, 977]}
"""


def read(tmp_path, content, requests=None):
    path = tmp_path / "trace"
    path.write_bytes(content.encode())
    return trace_file(path, requests)


@pytest.mark.promise(
    "commands",
    "`python -m validation replay` reads the SemanticKV system's traces and Mooncake's as they are published, and "
    "counts what it cannot read",
)
def test_mooncakes_lines_are_blocks_of_512_tokens(tmp_path):
    trace = read(tmp_path, LINES)
    assert (trace.form, trace.skipped.counts) == (MOONCAKE, {})
    found = trace.prefixes()
    assert [tokens for tokens, _ in found.requests] == [1902, 1661, 1902]
    assert uses(trace)[1] == [[0, 1, 2, 3], [0, 4, 5, 6], [0, 1, 2, 3]]
    assert list(found.tokens) == [512, 512, 512, 366, 512, 512, 125]
    assert len(read(tmp_path, LINES, 2).requests) == 2


@pytest.mark.promise("commands", "`python -m validation replay` reads the...")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"timestamp": 9, "input_le', "not JSON"),
        ("last words", "not JSON"),
        ("[1]", "without any of blocks, hash_ids"),
        ('{"timestamp": 9}', "without any of blocks, hash_ids"),
        ('{"timestamp": 9, "input_length": 5, "hash_ids": ["a"]}', "hash_ids: Input should be a valid integer"),
        ('{"timestamp": NaN, "input_length": 5, "hash_ids": [1]}', "timestamp: Input should be a finite number"),
        ('{"timestamp": 9, "input_length": 5000, "hash_ids": [1]}', "with ids of blocks of 512 tokens that do not fit"),
        ('{"request_id": "a", "timestamp_ms": 1, "blocks": []}', "of another format, semantic_kv"),
    ],
)
def test_what_cannot_be_read_is_passed_over_and_counted(tmp_path, line, reason):
    trace = read(tmp_path, LINES.strip() + "\n" + line)
    assert len(trace.requests) == 3
    (told,) = trace.skipped.counts
    assert told.startswith(reason)
    assert trace.skipped.first == {told: 4}


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("\n\n", ""),
        ('{"timestamp_ms": 1, "blocks": [{"token_count": 0}]}\n', "Passed over: 1 without tokens"),
        ("a\nb\n", "Passed over: 2 not JSON"),
    ],
)
def test_nothing_to_replay_is_refused_with_the_reasons(content, told, tmp_path):
    with pytest.raises(ConfigurationError, match=rf"trace: the trace holds no request with tokens.* {told}"):
        read(tmp_path, content)


def test_too_much_is_refused(monkeypatch):
    monkeypatch.setattr("validation.replay.trace.MAX_BLOCK_USES", 2)
    assert len(trace_of([line(0, "a", [1])] * 2).requests) == 2
    with pytest.raises(ConfigurationError, match="replay the first ones with --requests"):
        trace_of([line(0, "a", [1])] * 3)


TOKENS = {"header": 100, "other": 100, "document": 500, "small": 20, **dict.fromkeys("uvwxyz", 30)}
SPAN = ReuseRule("span", min_tokens=64, recompute_tokens=16)
SIZES = {"a": 1, "b": 2, "c": 3, "d": 5, "e": 8, "f": 9, "g": 40}
# The last token of a prompt is never reused; a block that stands in each prompt once and is never held pays for that.
EQUAL = {**dict.fromkeys("abcdefg", 10), "own": 1_000_000}


def trace_from(requests, tokens):
    """A trace of requests, each a sequence of contents, given the tokens of each content."""
    return trace_of(line(i, names, [tokens[name] for name in names]) for i, names in enumerate(requests))


def requests_of(most, longest):
    return st.lists(st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=longest), min_size=1, max_size=most)


@pytest.mark.parametrize(
    ("requests", "by_prefix", "by_span"),
    [
        pytest.param(
            [["header", "document"], ["other", "document"], ["header", "document", "small"]],
            [0, 0, 600],
            [0, 500 - 16, 600 - 16],
            id="behind another header only spans count",
        ),
        pytest.param(
            [["small"], ["small"], ["header"], ["header"]],
            [0, 19, 0, 99],
            [0, 0, 0, 84],
            id="short spans do not count, and the last token is always computed",
        ),
        pytest.param(
            [["header", "header", "small"], ["header", "small", "header"]],
            [0, 100],
            [0, 120 - 16 + 100 - 16],
            id="a block that stands in a prompt twice is not its own hit",
        ),
        pytest.param(
            # In the last one `other`, v w, and u v are spans of at least 64 tokens only where they are long enough.
            [["header", *"uvwx"], ["other", *"uvwx"], ["other", *"xwvu"], ["other", *"vwyzuv"]],
            None,
            [0, 120 - 16, 84, 84],
            id="short blocks make a span where they stand as they stood when they came",
        ),
    ],
)
def test_what_counts_as_reused(requests, by_prefix, by_span):
    trace = trace_from(requests, TOKENS)
    assert simulate(trace, SPAN, "lru", 10_000)[0] == by_span
    assert by_prefix is None or simulate(trace.prefixes(), EXACT_PREFIX, "lru", 10_000)[0] == by_prefix


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(25, 6), capacity=st.integers(1, 30))
def test_what_holds_after_every_request(policy, as_prefixes, requests, capacity):
    trace = trace_from(requests, SIZES)
    blocks = trace.prefixes() if as_prefixes else trace
    cache = BlockCache(blocks, POLICIES[policy](), capacity)
    for _, request in blocks.requests:
        before = set(cache.held)
        hits = set(cache.serve(request))
        held = set(cache.held)
        assert hits == before & set(request)
        assert hits <= held <= before | set(request)  # a request evicts none of its own
        assert cache.used_tokens == sum(blocks.tokens[block] for block in held) <= capacity
        assert all(blocks.parents[block] in held | {NONE} for block in held)
        if sum(blocks.tokens[block] for block in set(request)) <= capacity:
            assert set(request) <= held


@pytest.mark.promise("commands", "`python -m validation replay` says which...")
@pytest.mark.parametrize("as_prefixes", [False, True])
@settings(max_examples=40)
@given(requests=requests_of(30, 4), places=st.integers(4, 6))
def test_no_policy_hits_more_than_the_optimum_where_blocks_have_one_size(as_prefixes, requests, places):
    trace = trace_from([[*dict.fromkeys(request), "own"] for request in requests], EQUAL)
    blocks = trace.prefixes() if as_prefixes else trace
    found = {name: sum(simulate(blocks, ReuseRule("rule"), name, 10 * places)[0]) for name in (*POLICIES, OPTIMUM)}
    assert max(found.values()) == found[OPTIMUM]


@pytest.mark.parametrize(
    ("policy", "gone"), [("fifo", "third"), ("lru", "first"), ("lfu", "second"), ("static_semantic", "last")]
)
def test_each_policy_evicts_by_its_own_order(policy, gone):
    """In the order of arrival, of the last use, of uses, or of the weight of a kind."""
    kinds = {"third": "code", "first": "system", "second": "tool", "last": "user", "new": "other"}
    asked = [*[*kinds][:4], "first", "first", "second", "third", "last", "last", "new"]
    blocks = [[TraceBlock(content_hash=each, token_count=10, semantic_type=kinds[each])] for each in asked]
    trace = trace_of(line(index, [], [], blocks=each) for index, each in enumerate(blocks))
    cache = BlockCache(trace, POLICIES[policy](), 40)
    for _, request in trace.requests:
        cache.serve(request)
    assert set(range(5)) - set(cache.held) == {[*kinds].index(gone)}
