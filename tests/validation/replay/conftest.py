"""Lines and traces that several tests of the replay build."""

from validation.replay.trace import TraceBlock, TraceLine, trace_of


def line(index, contents, tokens, tenant=None, **fields):
    """A line: its number, which is also its second, the blocks' contents and their tokens."""
    blocks = [TraceBlock(content_hash=c, token_count=n) for c, n in zip(contents, tokens, strict=True)]
    return TraceLine.model_validate({"timestamp_ms": 1_000.0 * index, "tenant_id": tenant, "blocks": blocks} | fields)


def trace_from(requests, tokens):
    """A trace of requests, each a sequence of contents, given the tokens of each content."""
    return trace_of(line(i, names, [tokens[name] for name in names]) for i, names in enumerate(requests))


def write_trace(path, lines, end=""):
    path.write_text("".join(each.model_dump_json(exclude_none=True) + "\n" for each in lines) + end)
    return str(path)
