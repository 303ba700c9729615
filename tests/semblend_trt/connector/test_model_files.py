"""Digests that tell models and tokenizers apart, and files found without a network."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from semblend_trt.connector.model_files import (
    file_states,
    is_local,
    quantisation_digest,
    snapshot,
    tokenizer_digest,
    weights_digest,
)
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


def write_weights(folder: Path, weight: torch.Tensor, name: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({"weight": weight}, folder / name)
    return folder


def test_equal_weights_have_one_digest_wherever_they_lie(tmp_path: Path) -> None:
    weight = torch.randn(300, 500)
    assert weights_digest(write_weights(tmp_path / "a", weight)) == weights_digest(
        write_weights(tmp_path / "b", weight)
    )


def test_a_fine_tune_of_the_same_shape_differs(tmp_path: Path) -> None:
    weight = torch.randn(700, 900)
    base = weights_digest(write_weights(tmp_path / "base", weight))
    assert weights_digest(write_weights(tmp_path / "tuned", weight + 1e-3)) != base


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "rank0.pt", "model.gguf"])
def test_every_byte_of_every_kind_of_weights_counts(tmp_path: Path, name: str) -> None:
    content = bytearray(1 << 20)
    seen = set()
    for changed in (None, 0, 8, 5000, 600_001, len(content) - 1):
        if changed is not None:
            content[changed] ^= 1
        (tmp_path / name).write_bytes(content)
        seen.add(weights_digest(tmp_path))
    assert len(seen) == 6


def test_shapes_names_and_shards_count(tmp_path: Path) -> None:
    weight = torch.zeros(16, 4)
    digests = {
        weights_digest(write_weights(tmp_path / "one", weight)),
        weights_digest(write_weights(tmp_path / "reshaped", weight.view(4, 16))),
        weights_digest(write_weights(tmp_path / "half", weight.half())),
        weights_digest(write_weights(tmp_path / "named", weight, "other.safetensors")),
        weights_digest(write_weights(write_weights(tmp_path / "two", weight), weight, "second.safetensors")),
    }
    assert len(digests) == 5


def test_shards_count_wherever_an_index_says_they_are(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "deep/two.weights"}}))
    (tmp_path / "deep").mkdir()
    (tmp_path / "one.safetensors").write_bytes(b"x" * 100)
    seen = set()
    for content in (b"y" * 100, b"y" * 99 + b"z"):
        (tmp_path / "deep" / "two.weights").write_bytes(content)
        seen.add(weights_digest(tmp_path))
    index.write_text(index.read_text().replace('"a"', '"c"'))
    seen.add(weights_digest(tmp_path))
    assert len(seen) == 3
    (tmp_path / "deep" / "two.weights").unlink()
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        weights_digest(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "[" * 10_000])
def test_an_index_that_cannot_be_read_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigurationError, match="is no index of weights"):
        weights_digest(tmp_path)


def test_a_snapshot_of_the_hub_is_what_its_links_point_at(tmp_path: Path) -> None:
    blob, folder = tmp_path / "blobs" / "0f3c", tmp_path / "snapshots" / "0123456789abcdef0123456789abcdef01234567"
    blob.parent.mkdir()
    folder.mkdir(parents=True)
    (folder / "model.safetensors").symlink_to(blob)
    blob.write_bytes(b"x" * 100)
    before = weights_digest(folder)
    blob.write_bytes(b"x" * 99 + b"y")
    assert weights_digest(folder) != before


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no weights"):
        weights_digest(tmp_path)
    with pytest.raises(ConfigurationError, match="none cannot be read: No such"):
        weights_digest(tmp_path / "none")


@pytest.mark.parametrize("kind", ["pipe", "loop"])
def test_what_is_no_file_is_refused_without_a_wait(tmp_path: Path, kind: str) -> None:
    weights = tmp_path / "model.safetensors"
    os.mkfifo(weights) if kind == "pipe" else weights.symlink_to(weights)
    with pytest.raises(ConfigurationError, match="cannot be read"):
        weights_digest(tmp_path)


def test_a_weight_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "missing")
    with pytest.raises(ConfigurationError, match="cannot be read: No such file"):
        weights_digest(tmp_path)


def test_the_tokenizers_digest_follows_its_files(tiny_qwen2_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_qwen2_path, copy)
    assert tokenizer_digest(copy) == tokenizer_digest(tiny_qwen2_path)
    (copy / "README.md").write_text("not the tokenizer's")
    assert tokenizer_digest(copy) == tokenizer_digest(tiny_qwen2_path)
    (copy / "tokenizer.json").write_text((copy / "tokenizer.json").read_text() + " ")
    assert tokenizer_digest(copy) != tokenizer_digest(tiny_qwen2_path)
    assert tokenizer_digest(tmp_path) is None


@pytest.mark.parametrize(
    "name", ["tokenizer.model", "vocab.txt", "merges.txt", "tekken.json", "qwen.tiktoken", "chat_template.jinja"]
)
def test_every_file_of_a_tokenizer_counts(tmp_path: Path, name: str) -> None:
    seen = set()
    for content in (b"a" * 9000, b"a" * 8999 + b"b"):
        (tmp_path / name).write_bytes(content)
        seen.add(tokenizer_digest(tmp_path))
    assert len(seen) == 2
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "missing")
    with pytest.raises(OSError, match="No such file"):
        tokenizer_digest(tmp_path)


def test_a_model_is_a_directory_or_a_hub_id(tmp_path: Path) -> None:
    assert is_local(tmp_path)
    assert is_local(str(tmp_path))
    assert not is_local("some-org/some-model.v1")
    for neither in ("", "/no/such", "./no-such", "a/b/c", "-x/y", tmp_path / "none"):
        with pytest.raises(ConfigurationError, match="neither a directory that exists nor a hub id"):
            is_local(neither)


def test_a_hub_id_without_a_local_copy_has_no_snapshot(tmp_path: Path) -> None:
    assert snapshot(tmp_path) == tmp_path
    assert snapshot("semblend-test-org/no-such-model-on-this-machine") is None


def test_files_of_quantisation_are_taken_by_their_content(tmp_path: Path) -> None:
    assert quantisation_digest(tmp_path) is None
    seen = set()
    for name in ("hf_quant_config.json", "quantize_config.json", "quant_cfg.json", "dtypes.json"):
        (tmp_path / name).write_text("{}")
        seen.add(quantisation_digest(tmp_path))
    assert len(seen) == 4


def test_the_states_of_a_models_files_tell_of_every_write(tiny_qwen2_path: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_qwen2_path, copy)
    before = file_states(copy)
    assert set(before) == {"config.json", "model.safetensors"}
    (copy / "notes.txt").write_text("of no account")
    assert file_states(copy) == before
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert file_states(copy) != before
