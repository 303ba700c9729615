"""What was written is read back bit for bit, and whatever else a file holds is refused by its reason."""

from __future__ import annotations

import dataclasses
import json
import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors import safe_open

from semblend_trt.donors.donor_file import DonorFileError, read_kv, read_text, write_donor
from semblend_trt.donors.file_size import PAGE, FileSize

TOKENS = 21


@pytest.fixture(scope="module")
def threads():
    with ThreadPoolExecutor(2) as pool:
        yield pool


@pytest.fixture
def size_of():
    return lambda form: FileSize(form.num_layers, math.prod(form.shape(1)) * form.dtype.itemsize)


@pytest.fixture
def written(tmp_path, form, make_host_kv, make_text, size_of):
    """A donor's file, and the KV that it holds."""
    path, kv = tmp_path / "donor", make_host_kv(8, 13)
    write_donor(path, "donor", make_text(TOKENS), kv, form, size_of(form))
    return path, kv


def assert_refused(reason, call, *arguments):
    with pytest.raises(DonorFileError) as refused:
        call(*arguments)
    assert refused.value.reason == reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kv_and_text_come_back_bit_for_bit(tmp_path, form, make_host_kv, make_text, size_of, threads, dtype):
    form = dataclasses.replace(form, dtype=dtype)
    path, kv, text = tmp_path / "donor", make_host_kv(TOKENS, form=form), make_text(TOKENS)
    write_donor(path, "donor", text, kv, form, size_of(form))
    donor_id, read = read_text(path, form)
    assert (donor_id, read.namespace_key, read.digest) == ("donor", text.namespace_key, text.digest)
    assert np.array_equal(read.tokens, text.tokens)
    held = make_host_kv(TOKENS, form=form, fill=math.nan)
    read_kv(path, "donor", form, held, threads)
    assert torch.equal(held.tensor, kv.tensor)


@pytest.mark.parametrize("sizes", [(TOKENS,), (1, 20), (20, 1), (5, 5, 11)])
def test_parts_of_memory_need_not_be_those_of_the_writer(written, form, make_host_kv, threads, sizes):
    path, kv = written
    held = make_host_kv(*sizes, fill=math.nan)
    read_kv(path, "donor", form, held, threads)
    assert torch.equal(held.tensor, kv.tensor)


def test_the_file_takes_the_bytes_that_were_counted_and_its_kv_begins_with_a_page(written, form, size_of):
    path, _ = written
    size = size_of(form)
    assert path.stat().st_size <= size.of(TOKENS) < path.stat().st_size + PAGE
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert header == size.header_bytes
    assert header % PAGE == 0


def test_others_can_read_it_with_the_library(written):
    path, kv = written
    with safe_open(str(path), framework="pt") as file:
        assert sorted(file.keys()) == ["kv", "tokens"]
        assert torch.equal(file.get_tensor("kv").permute(0, 2, 3, 1, 4), kv.tensor)


def test_an_older_file_of_the_name_is_never_written_over(written, form, make_host_kv, make_text, size_of):
    path, _ = written
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        write_donor(path, "donor", make_text(4), make_host_kv(4), form, size_of(form))
    assert path.read_bytes() == before


def test_a_name_too_long_for_the_header_is_an_error_of_the_system(tmp_path, form, make_host_kv, make_text, size_of):
    with pytest.raises(OSError, match="are set aside for it"):
        write_donor(tmp_path / "donor", "d" * 5000, make_text(4), make_host_kv(4), form, size_of(form))


@pytest.mark.parametrize("place", ["first layer", "last layer"])
def test_a_changed_byte_of_kv_is_noticed(written, form, make_host_kv, threads, place, size_of):
    path, _ = written
    data = bytearray(path.read_bytes())
    first = size_of(form).header_bytes
    data[first if place == "first layer" else first + TOKENS * size_of(form).bytes_per_token - 1] ^= 1
    path.write_bytes(data)
    read_text(path, form)  # the text is whole
    assert_refused("corrupt", read_kv, path, "donor", form, make_host_kv(TOKENS), threads)


def test_a_changed_token_is_noticed(written, form):
    path, _ = written
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert_refused("corrupt", read_text, path, form)


@pytest.mark.parametrize("name", ["donor_id", "namespace_key", "digest"])
def test_a_changed_name_is_noticed(written, form, name):
    """A file whose namespace was exchanged would be somebody else's."""
    path, _ = written
    data = path.read_bytes()
    about = json.loads(data[8 : int.from_bytes(data[:8], "little") + 8])["__metadata__"]
    changed = about[name][:-1] + ("0" if about[name][-1] != "0" else "1")
    old, new = f'"{name}":"{about[name]}"'.encode(), f'"{name}":"{changed}"'.encode()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    assert_refused("corrupt", read_text, path, form)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_file_cut_short_is_no_file(written, form, keep):
    path, _ = written
    path.write_bytes(path.read_bytes()[:keep])
    assert_refused("corrupt", read_text, path, form)


def test_another_format_is_another_version(written, form):
    path, _ = written
    path.write_bytes(path.read_bytes().replace(b"semblend-donor-1", b"semblend-donor-9"))
    assert_refused("other_version", read_text, path, form)


@pytest.mark.known_defect(37)
@pytest.mark.parametrize("change", [{"num_layers": 4}, {"kv_heads": 1}, {"head_dim": 16}, {"dtype": torch.bfloat16}])
def test_kv_of_another_model_or_dtype_is_refused(written, form, make_host_kv, threads, change):
    path, _ = written
    other = dataclasses.replace(form, **change)
    assert_refused("other_geometry", read_text, path, other)
    assert_refused("other_geometry", read_kv, path, "donor", other, make_host_kv(TOKENS, form=other), threads)


def test_the_file_of_another_donor_or_length_is_refused(written, form, make_host_kv, threads):
    path, _ = written
    assert_refused("corrupt", read_kv, path, "another", form, make_host_kv(TOKENS), threads)
    assert_refused("corrupt", read_kv, path, "donor", form, make_host_kv(TOKENS - 1), threads)


def test_a_missing_file_is_an_error_of_the_system(tmp_path, form):
    with pytest.raises(OSError, match="nowhere"):
        read_text(tmp_path / "nowhere", form)
