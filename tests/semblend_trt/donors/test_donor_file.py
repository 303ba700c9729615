"""What was written is read back bit for bit, and any other content of a file is refused by its reason."""

import dataclasses
import errno
import json
import math
import os
import random
import threading

import numpy as np
import pytest
import torch
from safetensors import safe_open

from semblend_trt.donors import disk_tier
from semblend_trt.donors.disk_tier import PAGE, DonorFileError, KvForm, read_kv, read_text, write_donor
from tests.engine_wrapper.watching import watched
from tests.semblend_trt.held_donors import FORM, host_kv, text_of, whole

TOKENS = 21
KEY, OTHER_KEY = bytes(range(32)), bytes(range(1, 33))


def write(path, kv, form=FORM, key=KEY, **of_text):
    """Writes the file of a donor with this KV; returns its seal."""
    with path.open("xb", buffering=0) as file:
        return write_donor(file.fileno(), text_of(kv.capacity, **of_text), kv, form, key)


def text_in(path, form=FORM):
    with path.open("rb", buffering=0) as file:
        return read_text(file.fileno(), form, KEY)


def kv_in(path, seal, held=None, form=FORM):
    """Reads the KV of the file into `held`, of TOKENS tokens unless it is given."""
    with path.open("rb", buffering=0) as file:
        read_kv(file.fileno(), seal, form, KEY, held or host_kv(TOKENS, form=form))


@pytest.fixture
def written(tmp_path):
    """A donor's file, the KV that it holds, and its seal."""
    path, kv = tmp_path / "donor", host_kv(8, 13)
    return path, kv, write(path, kv)


def assert_refused(reason, call, *arguments):
    with pytest.raises(DonorFileError) as refused:
        call(*arguments)
    assert refused.value.reason == reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_kv_and_text_come_back_bit_for_bit(tmp_path, dtype):
    form = dataclasses.replace(FORM, dtype=dtype)
    path, kv, text = tmp_path / "donor", host_kv(TOKENS, form=form), text_of(TOKENS)
    seal = write(path, kv, form=form)
    read, found = text_in(path, form)
    assert (found, read.donor_id, read.namespace_key) == (seal, "donor", text.namespace_key)
    assert np.array_equal(read.tokens, text.tokens)
    held = host_kv(TOKENS, form=form, fill=math.nan)
    kv_in(path, seal, held, form)
    assert torch.equal(whole(held), whole(kv))


@pytest.mark.promise("reuse", "A donor keeps its generation on...")
def test_the_generation_comes_back_and_files_without_one_are_of_generation_0(tmp_path, written):
    path = tmp_path / "approximate"
    write(path, host_kv(TOKENS), generation=2)
    assert [text_in(each)[0].generation for each in (path, written[0])] == [2, 0]
    assert b"generation" not in written[0].read_bytes()[:PAGE]  # as files were before there were generations


@pytest.mark.parametrize("sizes", [(TOKENS,), (1, 20), (20, 1), (5, 5, 11)])
def test_parts_of_memory_need_not_be_those_of_the_writer(written, sizes):
    path, kv, seal = written
    held = host_kv(*sizes, fill=math.nan)
    kv_in(path, seal, held)
    assert torch.equal(whole(held), whole(kv))


def test_the_file_takes_the_bytes_that_were_counted_and_its_kv_begins_with_a_page(written):
    path, *_ = written
    assert path.stat().st_size <= FORM.file_bytes(TOKENS) < path.stat().st_size + PAGE
    header = int.from_bytes(path.read_bytes()[:8], "little") + 8
    assert header == FORM.header_bytes
    assert header % PAGE == 0


def test_others_can_read_it_with_safetensors(written):
    path, kv, _ = written
    with safe_open(str(path), framework="pt") as file:
        assert sorted(file.keys()) == ["kv", "tokens"]
        assert torch.equal(file.get_tensor("kv").permute(0, 2, 3, 1, 4), whole(kv))


def test_a_name_too_long_for_the_header_is_an_error_of_the_system(tmp_path):
    with pytest.raises(OSError, match="are set aside for it"):
        write(tmp_path / "donor", host_kv(4), donor_id="d" * 5000)


@pytest.fixture
def short(tmp_path):
    """A file of two tokens, open for reading and writing, its bytes and its seal."""
    path = tmp_path / "short"
    seal = write(path, host_kv(2))
    with path.open("r+b", buffering=0) as file:
        yield file.fileno(), path.read_bytes(), seal


@pytest.mark.promise("donors", "A file that was made or changed without the key is removed unread")
def test_whichever_byte_changes_the_file_is_refused(short):
    file, data, seal = short
    held, chance = host_kv(2), random.Random(0)
    kv = range(FORM.header_bytes, len(data) - 8)
    for place in range(len(data)):
        os.pwrite(file, bytes([data[place] ^ 1 << chance.randrange(8)]), place)
        if place in kv:
            read_text(file, FORM, KEY)
        else:
            with pytest.raises(DonorFileError):
                read_text(file, FORM, KEY)
        if place < kv.stop:
            with pytest.raises(DonorFileError):
                read_kv(file, seal, FORM, KEY, held)
        os.pwrite(file, data[place : place + 1], place)
    read_kv(file, seal, FORM, KEY, held)
    assert torch.equal(whole(held), whole(host_kv(2)))


def test_a_file_of_any_other_length_is_refused(short):
    file, data, _ = short
    os.pwrite(file, b"\0", len(data))
    for length in (len(data) + 1, *reversed(range(len(data)))):
        os.ftruncate(file, length)
        assert_refused("corrupt", read_text, file, FORM, KEY)


@pytest.mark.parametrize("forgery", ["another key under our key's name", "our seal", "no seal", "no key"])
def test_altered_kv_under_right_digests_is_refused(written, tmp_path, forgery, monkeypatch):
    """A process that writes the folder may know the format and read all files there; the key lies elsewhere."""
    *_, seal = written
    name = disk_tier._key_name(KEY)
    forged = tmp_path / "forged"
    with monkeypatch.context() as patch:
        patch.setattr(disk_tier, "_key_name", lambda key: name)
        forged_seal = write(forged, host_kv(TOKENS, fill=1.0), key=OTHER_KEY)
    data = forged.read_bytes()
    if forgery == "our seal":
        data = data.replace(forged_seal.encode(), seal.encode())
    elif forgery != "another key under our key's name":
        room, gone = FORM.header_bytes, "seal" if forgery == "no seal" else "key"
        header = json.loads(data[8:room])
        del header["__metadata__"][gone]
        data = data[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(room - 8) + data[room:]
    forged.write_bytes(data)
    assert_refused("corrupt", text_in, forged)
    for known in (seal, forged_seal):
        assert_refused("corrupt", kv_in, forged, known)


@pytest.mark.parametrize("version", [b"semblend-donor-1", b"semblend-donor-9"])
def test_another_format_is_another_version(written, version):
    path, *_ = written
    path.write_bytes(path.read_bytes().replace(disk_tier.FORMAT.encode(), version))
    assert_refused("other_version", text_in, path)


@pytest.mark.known_defect(37)
@pytest.mark.parametrize("change", [{"num_layers": 4}, {"kv_heads": 1}, {"head_dim": 16}, {"dtype": torch.bfloat16}])
def test_kv_of_another_model_or_dtype_is_refused(written, change):
    path, _, seal = written
    sizes = {name: value for name, value in change.items() if name != "dtype"}
    other = KvForm(dataclasses.replace(FORM.geometry, **sizes), change.get("dtype", FORM.dtype))
    assert_refused("other_geometry", text_in, path, other)
    assert_refused("other_geometry", kv_in, path, seal, None, other)


def test_the_file_of_another_seal_or_length_is_refused(written):
    path, _, seal = written
    assert_refused("corrupt", kv_in, path, "0" * 64)
    assert_refused("corrupt", kv_in, path, seal, host_kv(TOKENS - 1))


@pytest.mark.parametrize(
    "change",
    [
        {"kv": None},
        {"tokens": {"dtype": "I32", "shape": [], "data_offsets": [0, 0]}},
        *({"tokens": {"shape": [tokens]}, "kv": {"shape": [3, tokens, 2, 2, 8]}} for tokens in (-1, 21.0, 10**4000)),
        *({"__metadata__": {name: value}} for name, value in (("donor_id", 7), ("digests", [1, 2]), ("seal", None))),
        b"[" * 3000,
        b"\xff",
        *(0, 1 << 20, 1 << 40, (1 << 64) - 1),
    ],
)
def test_a_header_that_lies_is_refused(written, change):
    """A number: the length that it claims."""
    path, _, seal = written
    data, room = path.read_bytes(), FORM.header_bytes
    if isinstance(change, int):
        data = change.to_bytes(8, "little") + data[8:]
    elif isinstance(change, bytes):
        data = data[:8] + change.ljust(room - 8) + data[room:]
    else:
        header = json.loads(data[8:room])
        header |= {name: value and header[name] | value for name, value in change.items()}
        data = data[:8] + json.dumps(header, separators=(",", ":")).encode().ljust(room - 8) + data[room:]
    path.write_bytes(data)
    assert_refused("corrupt", text_in, path)
    assert_refused("corrupt", kv_in, path, seal)


def test_no_thread_reads_into_the_memory_behind_an_error(written, monkeypatch):
    """It is another donor's by then."""
    path, _, seal = written
    read, over, ended = disk_tier._read_all, threading.Event(), []

    def fails_at_once_or_takes_long(descriptor, view, start):
        if len(view) * FORM.geometry.num_layers == TOKENS * FORM.token_bytes:  # a layer's KV
            if start == FORM.header_bytes:
                raise OSError(errno.EIO, "a bad sector")
            over.wait(0.05)
            ended.append(start)
        read(descriptor, view, start)

    monkeypatch.setattr(disk_tier, "_read_all", fails_at_once_or_takes_long)
    with pytest.raises(OSError, match="a bad sector"):
        kv_in(path, seal)
    assert len(ended) == FORM.geometry.num_layers - 1
    over.set()


def test_a_disk_that_never_answers_keeps_no_process_from_ending(written, monkeypatch):
    path, _, seal = written
    readers = watched(monkeypatch, disk_tier, "_read_all", lambda *_: threading.current_thread())
    kv_in(path, seal)
    assert [reader.daemon for reader in readers if reader is not threading.main_thread()] == [True] * 3


def test_a_file_that_shrinks_while_it_is_read_is_refused(written, monkeypatch):
    """A page of a mapping that is gone, or that a failing disk cannot give, would end the process."""
    path, _, seal = written
    watched(monkeypatch, disk_tier, "_header_of", lambda *_: os.truncate(path, FORM.header_bytes))
    assert_refused("corrupt", kv_in, path, seal)
