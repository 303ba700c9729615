"""Traces: their lines, the blocks of a prompt, and the file that a router writes."""

import json
import os
import threading
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet import telemetry
from semblend_trt.fleet.router.config import Caller, TelemetryConfig
from semblend_trt.fleet.router.counters import RouterCounters
from semblend_trt.fleet.router.replicas import Observed
from semblend_trt.fleet.telemetry import BlockKind, Hasher, TraceBlock, TraceLine, usage_in
from semblend_trt.prompts import PromptReader

short = st.text(min_size=1, max_size=20)
blocks = st.builds(
    TraceBlock,
    content_hash=st.none() | short,
    semantic_type=st.sampled_from([kind.value for kind in BlockKind]),
    token_count=st.integers(0, 1 << 20),
    text=st.none() | st.text(max_size=20),
    position=st.none() | st.integers(0, 1 << 20),
)
lines = st.builds(
    TraceLine,
    request_id=short,
    timestamp_ms=st.floats(0, 1e13),
    blocks=st.lists(blocks, max_size=4),
    observed_ttft_ms=st.none() | st.floats(0, 1e6),
    metadata=st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)


@given(lines)
def test_what_is_written_is_read(line):
    assert TraceLine.model_validate_json(line.to_json()) == line


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("system", BlockKind.SYSTEM_PROMPT),
        ("user", BlockKind.USER_QUERY),
        ("Assistant", BlockKind.ASSISTANT_HISTORY),
        ("legal_evidence", BlockKind.LEGAL_EVIDENCE),
        *((name, BlockKind.OTHER) for name in ("poem", "developer", "function", "ipython", "observation")),
    ],
)
def test_kinds_have_either_systems_names(name, kind):
    assert TraceBlock(semantic_type=name, token_count=1).kind is kind


HASHER = Hasher(b"a secret of sixteen bytes")


@pytest.fixture(scope="module")
def make(tokenizer):
    def maker(block_tokens=8, *, hasher=HASHER, keep_text=False):
        return telemetry.BlockMaker(PromptReader(tokenizer), hasher, block_tokens, keep_text)

    return maker


@settings(max_examples=50)
@given(text=st.text("ab \n", max_size=60), block_tokens=st.integers(1, 9))
def test_blocks_add_up_to_the_prompt(make, text, block_tokens):
    assert {block.text for block in make(block_tokens).blocks({"prompt": text}, "acme")} <= {None}
    blocks = make(block_tokens, keep_text=True).blocks({"prompt": text}, "acme")
    assert "".join(block.text for block in blocks) == text
    ends = [block.position + block.token_count for block in blocks]
    assert [block.position for block in blocks] == [0, *ends][: len(blocks)]
    assert all(1 <= block.token_count <= block_tokens for block in blocks)


def test_a_paragraph_has_the_same_blocks_wherever_it_stands(make):
    document = "a document of some length\n\n"
    first = make().blocks({"prompt": document + "a question"}, "acme")
    second = make().blocks({"prompt": "An instruction.\n\n" + document + "another"}, "acme")
    hashes = [block.content_hash for block in make().blocks({"prompt": document}, "acme")]
    assert [block.content_hash for block in first[: len(hashes)]] == hashes
    assert [block.content_hash for block in second[3 : 3 + len(hashes)]] == hashes


def test_hashes_belong_to_a_tenant_and_a_key(make):
    body = {"prompt": "something"}
    other = Hasher(b"another secret of more bytes")
    makers = [make(99, hasher=hasher) for hasher in (HASHER, other)]
    tenants = (None, "", "acme", "globex")
    hashes = {maker.blocks(body, tenant)[0].content_hash for maker in makers for tenant in tenants}
    assert len(hashes) == 8
    assert make(99).blocks(body, "acme") == make(99).blocks(body, "acme")
    assert len({HASHER.of_text("a", "bc"), HASHER.of_text("ab", "c"), HASHER.of_text(None, "abc")}) == 3
    odd = [[1 << 80], [1 << 81], [-(1 << 80)], [1 << 80, 1], [1, 1 << 80]]  # which no engine has
    assert len({HASHER.of_tokens("acme", ids) for ids in odd}) == len(odd)


def test_kinds_are_those_of_roles(make):
    roles = ("system", "user", "assistant", "tool", "critic")
    messages = [{"role": role, "content": "Be brief."} for role in roles]
    blocks = make(1000).blocks({"messages": messages}, None)
    kinds = ["system_prompt", "user_query", "assistant_history", "tool_output", "other"]
    assert [block.semantic_type for block in blocks] == kinds


def served(number, prompt="some text", tail=b""):
    observed = Observed(0.0, status=200, seconds=0.5, tail=tail)
    asked = Caller(), {"prompt": prompt}, 100
    return telemetry.ServedRequest(f"r{number}", number, "tiny", *asked, observed, {"attempts": 1})


class Log:
    """A log over `path`, and its counters."""

    def __init__(self, tokenizer, path, **fields):
        self.counters = RouterCounters()
        config = TelemetryConfig(path=path, **fields)
        self.log = telemetry.TraceLog(config, Hasher(b"secret"), PromptReader(tokenizer), self.counters)

    def write(self, *requests):
        """Notes the requests and closes the log."""
        for request in requests:
            self.log.note(request)
        self.log.close()

    def count(self, result):
        return self.counters.registry.get_sample_value("semblend_router_trace_lines_total", {"result": result})


def test_lines_can_be_read_back(tokenizer, tmp_path):
    log = Log(tokenizer, tmp_path / "trace.jsonl")
    log.write(*map(served, range(3)), served(3, prompt=5))
    lines = list(map(TraceLine.model_validate_json, (tmp_path / "trace.jsonl").open()))
    assert [line.request_id for line in lines] == ["r0", "r1", "r2", "r3"]
    assert [sum(block.token_count for block in line.blocks) for line in lines] == [9, 9, 9, 0]
    assert lines[0].observed_total_latency_ms == 500
    assert log.count("written") == 4


ODD_IDS = (
    st.integers() | st.integers(-(1 << 70), 1 << 70) | st.booleans() | st.floats() | st.text(max_size=3) | st.none()
)
ODD_PROMPTS = st.recursive(ODD_IDS, lambda inner: st.lists(inner, max_size=4), max_leaves=12)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(prompts=[[1 << 80, -5, 3], [-1], [1 << 31] * 9, [True], [1.5], ["a", 1], [[[1]]], [0] * 5_000, "\ud800"])
@given(prompts=st.lists(ODD_PROMPTS, max_size=5))
@pytest.mark.parametrize("text", ["dropped", "kept"])
def test_no_odd_prompt_loses_a_line(tokenizer, tmp_path, text, prompts):
    path = tmp_path / "trace.jsonl"
    path.unlink(missing_ok=True)
    log = Log(tokenizer, path, text=text, max_bytes=1 << 30)
    log.write(*(served(number, prompt) for number, prompt in enumerate(prompts)))
    lines = list(map(TraceLine.model_validate_json, path.open()))
    assert [line.request_id for line in lines] == [f"r{number}" for number in range(len(prompts))]
    assert (log.count("written"), log.count("failed")) == (len(prompts), 0)
    # Ids have their blocks, whichever they are.
    for line, prompt in zip(lines, prompts, strict=True):
        if isinstance(prompt, list) and all(type(token) is int for token in prompt):
            assert sum(block.token_count for block in line.blocks) == len(prompt)


def test_files_are_rotated_and_bounded_where_a_symlink_leads(tokenizer, tmp_path):
    far, link = tmp_path / "far", tmp_path / "trace.jsonl"
    far.mkdir()
    link.symlink_to(far / "target")
    log = Log(tokenizer, link, max_bytes=4096, files=2)
    log.write(*map(served, range(200)))
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [far, link]
    files = sorted(far.iterdir())
    assert [file.name for file in files] == ["target", "target.1", "target.2"]
    assert all(0 < file.stat().st_size <= 4096 for file in files)
    newest = [json.loads(line)["request_id"] for line in files[0].read_text().splitlines()]
    assert newest[-1] == "r199"


def test_a_pipe_is_written_to_and_never_rotated(tokenizer, tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    log = Log(tokenizer, link, max_bytes=4096, files=2)
    log.write(*map(served, range(100)))
    reader.join(60)
    assert len(read[0].splitlines()) == 100
    assert pipe.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe"]


def test_what_would_pile_up_is_dropped(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "MAX_WAITING_BYTES", 250)
    log, go_on = Log(tokenizer, tmp_path / "trace.jsonl"), threading.Event()
    emit = log.log._file.emit
    monkeypatch.setattr(log.log._file, "emit", lambda record: (go_on.wait(60), emit(record)))
    for number in range(5):
        log.log.note(served(number))
    assert log.count("dropped") == 3
    go_on.set()
    log.log.close()
    assert log.count("written") == 2


def test_a_full_disk_is_counted(tokenizer):
    log = Log(tokenizer, Path("/dev/full"))
    log.log.note(served(1))
    log.log._thread.drain()
    assert (log.count("failed"), log.count("written")) == (1, 0)


def test_a_place_that_cannot_be_written_is_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigurationError, match=r"telemetry\.path .* cannot be written: No such file or directory"):
        Log(tokenizer, tmp_path / "missing" / "trace.jsonl")


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"usage": {"prompt_tokens": 3}}', {"prompt_tokens": 3}),
        (b'ta: {"cut": 1}\n\ndata: {"usage": null}\n\ndata: {"usage": {"a": 1}}\n\ndata: [DONE]\n\n', {"a": 1}),
        *((each, {}) for each in (b'data: {"usage": 5}\n\n', b'{"usage": {"prompt')),
        *((each, {}) for each in (b"[1]", b"[" * 100_000, b"", b"\xff\xfe")),
    ],
)
def test_usage_is_taken_where_it_stands(tail, usage):
    assert usage_in(tail) == usage


@pytest.mark.parametrize("wrong", [b'{"usage": {"prompt_tokens": -1, "prompt_tokens_details": 5}}', b'{"usage": {}}'])
def test_a_replicas_nonsense_is_left_out(tokenizer, tmp_path, wrong):
    log = Log(tokenizer, tmp_path / "trace.jsonl")
    log.write(served(1, tail=wrong))
    line = TraceLine.model_validate_json((tmp_path / "trace.jsonl").read_text())
    assert (line.observed_prefix_hit_tokens, line.observed_prefill_tokens) == (None, None)
    assert line.metadata == {"attempts": 1, "status": 200}
