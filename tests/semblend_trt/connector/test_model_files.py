"""Digests that tell models and tokenizers apart, and files found without a network."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from semblend_trt.connector.model_files import commit_of, is_local, snapshot, tokenizer_digest, weights_digest
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


@pytest.mark.parametrize("element", [0, 5000, 199_999])
def test_small_files_are_read_whole(tmp_path: Path, element: int) -> None:
    weight = torch.zeros(200_000, dtype=torch.uint8)
    base = weights_digest(write_weights(tmp_path, weight))
    weight[element] = 1
    assert weights_digest(write_weights(tmp_path, weight)) != base


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


def test_older_weight_files_are_digested_too(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 100)
    before = weights_digest(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 99 + b"y")
    assert weights_digest(tmp_path) != before


def test_no_weights_and_cut_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no weights"):
        weights_digest(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{}")
    with pytest.raises(ConfigurationError, match="end before their header does"):
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


def test_only_a_directory_of_the_hub_cache_stands_for_a_commit(tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    assert commit_of(tmp_path / "snapshots" / commit) == commit
    assert commit_of(tmp_path / commit) is None
    assert commit_of(tmp_path / "snapshots" / "main") is None
