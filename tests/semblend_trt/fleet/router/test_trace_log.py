"""The file of trace lines: written beside serving, rotated within its bounds, and dropped rather than waited for."""

from __future__ import annotations

import json
import os
import threading
from typing import TYPE_CHECKING, Any

import pytest

from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet import telemetry
from semblend_trt.fleet.router.config import TelemetryConfig
from semblend_trt.fleet.router.counters import RouterCounters
from semblend_trt.fleet.router.prompts import PromptReader
from semblend_trt.fleet.router.replicas import Observed
from semblend_trt.fleet.router.tenants import Caller
from semblend_trt.fleet.telemetry import Hasher, ServedRequest, TraceLog, read_trace, usage_in

if TYPE_CHECKING:
    from pathlib import Path


def served(number: int, prompt: Any = "some text", tail: bytes = b"") -> ServedRequest:
    observed = Observed(0.0, status=200, seconds=0.5, tail=tail)
    return ServedRequest(f"r{number}", number, "tiny", Caller(), {"prompt": prompt}, 100, observed, {"attempts": 1})


class Log:
    """A log over `path`, and its counters."""

    def __init__(self, tokenizer: Any, path: Path, **fields: Any) -> None:
        self.counters = RouterCounters()
        config = TelemetryConfig(path=path, **fields)
        self.log = TraceLog(config, Hasher.of(b"secret"), PromptReader(tokenizer), self.counters)

    def count(self, result: str) -> float | None:
        return self.counters.registry.get_sample_value("semblend_router_trace_lines_total", {"result": result})


def test_lines_can_be_read_back(tokenizer: Any, tmp_path: Path) -> None:
    log = Log(tokenizer, tmp_path / "trace.jsonl")
    for number in range(3):
        log.log.note(served(number))
    log.log.note(served(3, prompt=5))
    log.log.close()
    lines = list(read_trace((tmp_path / "trace.jsonl").open()))
    assert [line.request_id for line in lines] == ["r0", "r1", "r2", "r3"]
    assert [sum(block.token_count for block in line.blocks) for line in lines] == [9, 9, 9, 0]
    assert lines[0].observed_total_latency_ms == 500
    assert log.count("written") == 4


def test_files_are_rotated_and_bounded(tokenizer: Any, tmp_path: Path) -> None:
    log = Log(tokenizer, tmp_path / "trace.jsonl", max_bytes=4096, files=2)
    for number in range(200):
        log.log.note(served(number))
    log.log.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"]
    assert all(0 < file.stat().st_size <= 4096 for file in files)
    newest = [json.loads(line)["request_id"] for line in files[0].read_text().splitlines()]
    assert newest[-1] == "r199"


def test_a_symlink_stays_and_its_target_is_rotated(tokenizer: Any, tmp_path: Path) -> None:
    far, link = tmp_path / "far", tmp_path / "trace.jsonl"
    far.mkdir()
    link.symlink_to(far / "target")
    log = Log(tokenizer, link, max_bytes=4096, files=2)
    for number in range(100):
        log.log.note(served(number))
    log.log.close()
    assert link.is_symlink()
    assert sorted(each.name for each in far.iterdir()) == ["target", "target.1", "target.2"]
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["far", "trace.jsonl"]


def test_a_pipe_is_written_to_and_never_rotated(tokenizer: Any, tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    log = Log(tokenizer, link, max_bytes=4096, files=2)
    for number in range(100):
        log.log.note(served(number))
    log.log.close()
    reader.join(60)
    assert len(read[0].splitlines()) == 100
    assert pipe.is_fifo()
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "pipe"]


def test_what_would_pile_up_is_dropped(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_full_disk_is_counted(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = Log(tokenizer, tmp_path / "trace.jsonl")

    class Full:
        def write(self, _: str) -> None:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def close(self) -> None: ...

    monkeypatch.setattr(log.log._file, "stream", Full())
    monkeypatch.setattr(log.log._file, "shouldRollover", lambda _: False)
    log.log.note(served(1))
    log.log.close()
    assert (log.count("failed"), log.count("written")) == (1, 0)


def test_a_place_that_cannot_be_written_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"telemetry\.path .* cannot be written: No such file or directory"):
        Log(tokenizer, tmp_path / "missing" / "trace.jsonl")


@pytest.mark.parametrize(
    ("tail", "usage"),
    [
        (b'{"usage": {"prompt_tokens": 3}}', {"prompt_tokens": 3}),
        (b'ta: {"cut": 1}\n\ndata: {"usage": null}\n\ndata: {"usage": {"a": 1}}\n\ndata: [DONE]\n\n', {"a": 1}),
        (b'data: {"usage": 5}\n\n', {}),
        (b'{"usage": {"prompt', {}),
        (b"[1]", {}),
        (b"[" * 100_000, {}),
        (b"", {}),
        (b"\xff\xfe", {}),
    ],
)
def test_usage_is_taken_where_it_stands(tail: bytes, usage: dict[str, Any]) -> None:
    assert usage_in(tail) == usage


@pytest.mark.parametrize("wrong", [b'{"usage": {"prompt_tokens": -1, "prompt_tokens_details": 5}}', b'{"usage": {}}'])
def test_a_replicas_nonsense_is_left_out(tokenizer: Any, tmp_path: Path, wrong: bytes) -> None:
    log = Log(tokenizer, tmp_path / "trace.jsonl")
    log.log.note(served(1, tail=wrong))
    log.log.close()
    (line,) = read_trace((tmp_path / "trace.jsonl").open())
    assert (line.observed_prefix_hit_tokens, line.observed_prefill_tokens) == (None, None)
    assert line.metadata == {"attempts": 1, "status": 200}
