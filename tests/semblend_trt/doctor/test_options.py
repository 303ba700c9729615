"""The file that an engine is given tells which of its options keep it from reuse."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from semblend_trt.config import load_settings
from semblend_trt.doctor.finding import Finding, Status
from semblend_trt.doctor.options import MAX_BYTES, kv_dtype_of, options, read_options
from semblend_trt.errors import ConfigurationError

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "attach.md"
(SOUND,) = re.findall(r"^```yaml\n(.*?)^```$", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def look(tmp_path: Path):
    """look(text, **settings): what is found in a file with this text."""

    def found(text: str, **settings: object) -> list[Finding]:
        (tmp_path / "options.yaml").write_text(text)
        return list(options(read_options(tmp_path / "options.yaml"), load_settings(**settings)))

    return found


def test_the_file_of_the_guide_is_sound(look) -> None:
    (found,) = look(SOUND)
    assert (found.status, found.text) == (Status.OK, "the connector is semblend_trt.connector")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("pipeline_parallel_size: 2", "pipeline_parallel"),
        ("enable_attention_dp: true", "attention_dp"),
        ("speculative_config: {decoding_type: MTP}", "speculative_decoding"),
    ],
)
def test_what_the_connector_refuses_has_its_name(look, text: str, reason: str) -> None:
    _, refused = look(SOUND + text)
    assert (refused.status, refused.reason) == (Status.REFUSED, reason)


def test_options_of_the_cache_are_looked_at_too(look) -> None:
    _, refused = look(SOUND.replace("kv_cache_config:", "kv_cache_config:\n  host_cache_size: 1073741824"))
    assert refused.reason == "host_offload"
    _, failed = look(SOUND.replace("enable_block_reuse: true", "enable_block_reuse: false"))
    assert (failed.status, "never asks" in failed.text) == (Status.FAILED, True)


def test_a_capacity_policy_that_evicts(look) -> None:
    _, failed = look(SOUND + "scheduler_config: {capacity_scheduler_policy: MAX_UTILIZATION}")
    assert (failed.status, "MAX_UTILIZATION" in failed.text) == (Status.FAILED, True)


WRAPPED = SOUND.replace("semblend_trt.connector", "engine_wrapper.connector")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "cuda_graphs"),
        ("cuda_graph_config: {enable_padding: true}", "cuda_graphs"),
        ("cuda_graph_config: null\nlora_config: {lora_dir: [a]}", "lora"),
    ],
)
def test_what_keeps_the_wrapper_out_of_the_decoder_is_told(look, text: str, reason: str) -> None:
    _, note = look(WRAPPED + text)
    assert (note.status, note.reason) == (Status.NOTE, reason)
    assert len(look(SOUND + text)) == 1


def test_a_backend_whose_blocks_are_laid_out_otherwise_is_refused(look) -> None:
    _, refused = look(SOUND + "attn_backend: FLASHINFER")
    assert (refused.status, refused.reason) == (Status.REFUSED, "attention_backend")


def test_nothing_keeps_the_wrapper_out(look) -> None:
    text = WRAPPED + "cuda_graph_config: null"
    (found,) = look(text)
    assert found.status is Status.OK
    _, note = look(text.replace("kv_cache_config:", "kv_cache_config:\n  use_kv_cache_manager_v2: true"))
    assert note.reason == "cache_manager_v2"


def test_a_number_of_ranks_that_is_none(look) -> None:
    (failed,) = look(SOUND + "tensor_parallel_size: two")
    assert failed.text == "tensor_parallel_size is 'two'; give a whole number from 1 on"


def test_a_disk_tier_on_several_ranks(look) -> None:
    _, note = look(SOUND + "tensor_parallel_size: 2", disk_bytes=1)
    assert note.status is Status.NOTE


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("kv_connector_config:", "connector:", "no kv_connector_config"),
        ("semblend_trt.connector", "lmcache.connector", "'lmcache.connector'"),
        ("SemBlendKvConnectorWorker", "Worker", "connector_worker_class is 'Worker'"),
    ],
)
def test_an_engine_without_our_connector(look, old: str, new: str, told: str) -> None:
    (failed,) = look(SOUND.replace(old, new))
    assert (failed.status, told in failed.text) == (Status.FAILED, True)


def test_the_dtype_of_the_cache(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    for text, dtype in (("kv_cache_config: {dtype: FP8}", "fp8"), ("kv_cache_config: {}", "auto"), ("a: 1", "auto")):
        file.write_text(text)
        assert kv_dtype_of(read_options(file)) == dtype


BOMB = "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}' if n else 'x'] * 9)}]\n" for n in range(9)).encode()


@pytest.mark.parametrize(
    "content",
    [
        *(b"- a list", b"", b"a: [", b"a: \xff", b"a" * (MAX_BYTES + 1)),
        *(b"a: " + b"[" * 20_000 + b"]" * 20_000, b"a: " + b'{"a":' * 20_000 + b"1" + b"}" * 20_000),
        *(b"a: &a [*a]", BOMB, b"a: 2001-99-99", b"a: !!bool maybe", b"a: !!timestamp never", b"? [a]\n: 1"),
    ],
)
def test_a_file_that_holds_no_options(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "options.yaml").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"options\.yaml"):
        read_options(tmp_path / "options.yaml")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_options(tmp_path / "options.yaml")
