"""What was written is read back bit for bit, and whatever else a file holds is refused by its reason."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from semblend_trt.donors import donor_file
from semblend_trt.donors.donor_file import DonorFileError, read_kv, read_text, write_donor
from semblend_trt.donors.file_size import PAGE

TOKENS = 21


@pytest.fixture
def written(tmp_path, form, make_host_kv, make_text):
    """A donor's file, and the KV that it holds."""
    path, kv = tmp_path / "donor", make_host_kv(8, 13)
    write_donor(path, "donor", make_text(TOKENS), kv, form)
    return path, kv


def assert_refused(reason, call, *arguments):
    with pytest.raises(DonorFileError) as refused:
        call(*arguments)
    assert refused.value.reason == reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kv_and_text_come_back_bit_for_bit(tmp_path, form, make_host_kv, make_text, dtype):
    form = dataclasses.replace(form, dtype=dtype)
    path, kv, text = tmp_path / "donor", make_host_kv(TOKENS, form=form), make_text(TOKENS)
    write_donor(path, "donor", text, kv, form)
    donor_id, read = read_text(path, form)
    assert (donor_id, read.namespace_key, read.digest) == ("donor", text.namespace_key, text.digest)
    assert np.array_equal(read.tokens, text.tokens)
    held = make_host_kv(TOKENS, form=form, fill=math.nan)
    read_kv(path, "donor", form, held)
    assert torch.equal(held.tensor, kv.tensor)


@pytest.mark.parametrize("sizes", [(TOKENS,), (1, 20), (20, 1), (5, 5, 11)])
def test_parts_of_memory_need_not_be_those_of_the_writer(written, form, make_host_kv, sizes):
    path, kv = written
    held = make_host_kv(*sizes, fill=math.nan)
    read_kv(path, "donor", form, held)
    assert torch.equal(held.tensor, kv.tensor)


def test_the_file_takes_the_bytes_that_were_counted_and_its_kv_begins_with_a_page(written, form):
    path, _ = written
    size = form.file_size
    assert path.stat().st_size <= size.of(TOKENS) < path.stat().st_size + PAGE
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert header == size.header_bytes
    assert header % PAGE == 0


def test_others_can_read_it_with_the_library(written):
    path, kv = written
    with safe_open(str(path), framework="pt") as file:
        assert sorted(file.keys()) == ["kv", "tokens"]
        assert torch.equal(file.get_tensor("kv").permute(0, 2, 3, 1, 4), kv.tensor)


def test_an_older_file_of_the_name_is_never_written_over(written, form, make_host_kv, make_text):
    path, _ = written
    before = path.read_bytes()
    with pytest.raises(FileExistsError):
        write_donor(path, "donor", make_text(4), make_host_kv(4), form)
    assert path.read_bytes() == before


def test_a_name_too_long_for_the_header_is_an_error_of_the_system(tmp_path, form, make_host_kv, make_text):
    with pytest.raises(OSError, match="are set aside for it"):
        write_donor(tmp_path / "donor", "d" * 5000, make_text(4), make_host_kv(4), form)


@pytest.mark.parametrize("place", ["first layer", "last layer"])
def test_a_changed_byte_of_kv_is_noticed(written, form, make_host_kv, place):
    path, _ = written
    data = bytearray(path.read_bytes())
    first = form.file_size.header_bytes
    data[first if place == "first layer" else first + TOKENS * form.file_size.bytes_per_token - 1] ^= 1
    path.write_bytes(data)
    read_text(path, form)  # the text is whole
    assert_refused("corrupt", read_kv, path, "donor", form, make_host_kv(TOKENS))


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
def test_kv_of_another_model_or_dtype_is_refused(written, form, make_host_kv, change):
    path, _ = written
    other = dataclasses.replace(form, **change)
    assert_refused("other_geometry", read_text, path, other)
    assert_refused("other_geometry", read_kv, path, "donor", other, make_host_kv(TOKENS, form=other))


def test_the_file_of_another_donor_or_length_is_refused(written, form, make_host_kv):
    path, _ = written
    assert_refused("corrupt", read_kv, path, "another", form, make_host_kv(TOKENS))
    assert_refused("corrupt", read_kv, path, "donor", form, make_host_kv(TOKENS - 1))


def test_a_missing_file_is_an_error_of_the_system(tmp_path, form):
    with pytest.raises(OSError, match="nowhere"):
        read_text(tmp_path / "nowhere", form)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0), bit=st.integers(0, 7))
def test_whichever_bit_changes_what_is_read_is_what_was_written(written, form, make_host_kv, place, bit):
    path, kv = written
    data = path.read_bytes()
    header = len(data[: form.file_size.header_bytes].rstrip())
    place %= 2 * header if place % 3 else len(data)
    changed = bytearray(data)
    changed[place] ^= 1 << bit
    other = path.with_name("changed")
    other.write_bytes(changed)
    held, (_, text) = make_host_kv(TOKENS, fill=math.nan), read_text(path, form)
    try:
        donor_id, found = read_text(other, form)
        read_kv(other, "donor", form, held)
    except DonorFileError:
        return
    assert (donor_id, found.namespace_key, found.digest) == ("donor", text.namespace_key, text.digest)
    assert np.array_equal(found.tokens, text.tokens)
    assert torch.equal(held.tensor, kv.tensor)


def claim(header, **changes):
    for name, value in changes.items():
        *way, last = name.split("__")
        place = header
        for step in way:
            place = place["__metadata__" if step == "about" else step]
        place[last] = value
    return json.dumps(header, separators=(",", ":"))


@pytest.mark.parametrize(
    "say",
    [
        lambda header: "[" * 3000,
        lambda header: "[1]",
        lambda header: "\xff",
        lambda header: claim(header, kv=None),
        lambda header: claim(header, tokens__shape=[]),
        lambda header: claim(header, tokens__shape=21),
        lambda header: claim(header, tokens__shape=[1 << 62], kv__shape=[3, 1 << 62, 2, 2, 8]),
        lambda header: claim(header, tokens__shape=[-1], kv__shape=[3, -1, 2, 2, 8]),
        lambda header: claim(header, tokens__shape=[0], kv__shape=[3, 0, 2, 2, 8]),
        lambda header: claim(header, tokens__shape=[21.0], kv__shape=[3, 21.0, 2, 2, 8]),
        lambda header: claim(header, kv__data_offsets=[-8, 1 << 62]),
        lambda header: claim(header, tokens__dtype="I64"),
        lambda header: claim(header, about__donor_id=7),
        lambda header: claim(header, about__digest="q"),
        lambda header: claim(header, about__text_checksum="many"),
        lambda header: claim(header, about__checksums="1 2"),
        lambda header: claim(header, about__checksums=[1, 2, 3]),
    ],
)
def test_a_header_that_lies_is_refused(written, form, make_host_kv, say):
    path, _ = written
    data, room = path.read_bytes(), form.file_size.header_bytes
    said = say(json.loads(data[8:room])).encode("latin-1")
    path.write_bytes(data[:8] + said.ljust(room - 8) + data[room:])
    assert_refused("corrupt", read_text, path, form)
    assert_refused("corrupt", read_kv, path, "donor", form, make_host_kv(TOKENS))


def test_a_header_of_any_length_that_is_claimed_is_not_read(written, form):
    path, _ = written
    data = path.read_bytes()
    for length in (0, 1 << 20, 1 << 40, (1 << 64) - 1):
        path.write_bytes(length.to_bytes(8, "little") + data[8:])
        assert_refused("corrupt", read_text, path, form)


def test_a_file_that_shrinks_while_it_is_read_is_refused(written, form, make_host_kv, monkeypatch):
    """A page of a mapping that is gone, or that a failing disk cannot give, would end the process."""
    path, _ = written
    checked = donor_file._about

    def cut(*arguments):
        about = checked(*arguments)
        os.truncate(path, form.file_size.header_bytes)
        return about

    monkeypatch.setattr(donor_file, "_about", cut)
    assert_refused("corrupt", read_kv, path, "donor", form, make_host_kv(TOKENS))


def test_nobody_reads_into_the_memory_any_more_behind_an_error(written, form, make_host_kv, monkeypatch):
    """It is another donor's by then."""
    path, _ = written
    read, over, ended = donor_file._read_all, threading.Event(), []

    def fails_at_once_or_takes_long(descriptor, view, start):
        if len(view) * form.num_layers == TOKENS * form.file_size.bytes_per_token:  # a layer's KV
            if start == form.file_size.header_bytes:
                raise OSError(errno.EIO, "a bad sector")
            over.wait(0.05)
            ended.append(start)
        read(descriptor, view, start)

    monkeypatch.setattr(donor_file, "_read_all", fails_at_once_or_takes_long)
    with pytest.raises(OSError, match="a bad sector"):
        read_kv(path, "donor", form, make_host_kv(TOKENS))
    assert len(ended) == form.num_layers - 1
    over.set()


def test_a_disk_that_never_answers_keeps_no_process_from_ending(written, form, make_host_kv, monkeypatch):
    path, _ = written
    readers, read = [], donor_file._layer_read

    def note(*arguments):
        readers.append(threading.current_thread())
        return read(*arguments)

    monkeypatch.setattr(donor_file, "_layer_read", note)
    read_kv(path, "donor", form, make_host_kv(TOKENS))
    assert len(readers) == form.num_layers
    assert all(reader.daemon for reader in readers)
