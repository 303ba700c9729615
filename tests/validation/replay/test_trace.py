"""What is kept of a trace, what is refused, and the shapes of the built-in traces."""

import pytest

from semblend_trt.errors import ConfigurationError
from validation.replay.trace import MOONCAKE, TraceBlock, TraceLine, trace_file, trace_of


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
