"""One byte more or less is another model, and a digest is only taken over from a file that stayed as it was."""

import json
import os
import shutil
import stat
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

import pytest

from semblend_trt import model_files
from semblend_trt.errors import ConfigurationError
from semblend_trt.model_files import DigestCache, FileState, digest_of_files, file_states, weights_digest
from tests.engine_wrapper.watching import watched


@pytest.mark.parametrize(
    ("patterns", "name"),
    [
        *((model_files._WEIGHTS, name) for name in ("model.safetensors", "rank0.pt")),
        *((model_files.TOKENIZER_FILES, name) for name in ("tokenizer.model", "qwen.tiktoken", "chat_template.jinja")),
        *((model_files.PARAMETER_FILES, name) for name in ("hf_quant_config.json", "quant_cfg.json")),
    ],
)
def test_every_byte_of_the_files_that_fit_counts(tmp_path, patterns, name):
    digest = weights_digest if patterns is model_files._WEIGHTS else partial(model_files.digest_in, patterns=patterns)
    seen, blob = set(), tmp_path / "blob"
    (tmp_path / name).symlink_to(blob)  # as in a snapshot of the hub
    for content in (b"a" * 9000, b"a" * 8999 + b"b"):
        blob.write_bytes(content)
        seen.add(digest(tmp_path))
    (tmp_path / "README.md").write_text("of no account")
    assert digest(tmp_path) in seen
    assert len(seen) == 2
    blob.unlink()
    with pytest.raises((OSError, ConfigurationError), match="No such file"):
        digest(tmp_path)


def test_shards_count_wherever_an_index_says_they_are(tmp_path):
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


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}', "[" * 10_000])
def test_an_index_that_cannot_be_read_is_refused(tmp_path, content):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ConfigurationError, match="is no index of weights"):
        weights_digest(tmp_path)


NO_WEIGHTS = {"empty": "holds no weights", "missing": "none cannot be read: No such"}
NO_WEIGHTS |= dict.fromkeys(("pipe", "loop"), "cannot be read")


@pytest.mark.parametrize(("kind", "told"), NO_WEIGHTS.items())
def test_what_holds_no_weights_is_refused_without_a_wait(tmp_path, kind, told):
    weights = tmp_path / "model.safetensors"
    if kind == "pipe":
        os.mkfifo(weights)
    elif kind == "loop":
        weights.symlink_to(weights)
    with pytest.raises(ConfigurationError, match=told):
        weights_digest(tmp_path / "none" if kind == "missing" else tmp_path)


def test_the_states_of_a_models_files_tell_of_every_write(tiny_qwen2_path, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_qwen2_path, copy)
    before = file_states(copy)
    assert set(before) == {"config.json", "model.safetensors"}
    (copy / "notes.txt").write_text("of no account")
    (copy / "notes").symlink_to(copy / "notes")  # a loop, which nothing may follow
    assert file_states(copy) == before
    (copy / "config.json").write_text((copy / "config.json").read_text() + " ")
    assert file_states(copy) != before


CHUNK = 1000


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Chunks of 1,000 bytes, and files that may be remembered as soon as they are written."""
    monkeypatch.setattr(model_files, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(model_files, "READ_BYTES", 300)
    monkeypatch.setattr(model_files, "STAMP_NS", -1)


@pytest.fixture
def reads(monkeypatch):
    """The path of every chunk that is read."""
    return watched(monkeypatch, model_files, "_chunk", lambda _, state, start: state.path)


def written(path, content):
    path.write_bytes(content)
    return {path.name: path}


@pytest.mark.promise("donors", "A change of weights that any...")
@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7])
def test_each_byte_and_the_size_count(tmp_path, size):
    content = bytes(index % 251 for index in range(size))
    base = digest_of_files(written(tmp_path / "a", content))
    assert digest_of_files(written(tmp_path / "a", content + b"\0")) != base
    for changed in {0, size // 2, size - 1} if size else ():
        other = bytearray(content)
        other[changed] ^= 1
        assert digest_of_files(written(tmp_path / "a", bytes(other))) != base
    assert digest_of_files(written(tmp_path / "a", content)) == base


def test_neither_chunks_nor_names_can_change_places(tmp_path):
    one, two = (written(tmp_path / name, name.encode() * CHUNK)[name] for name in "12")
    a, b = b"a" * CHUNK, b"b" * CHUNK
    first, second = (digest_of_files(written(tmp_path / "x", content)) for content in (a + b, b + a))
    assert first != second
    assert digest_of_files({"a": one, "b": two}) == digest_of_files({"b": two, "a": one})
    named = ({"a": one, "b": two}, {"a": two, "b": one}, {"a": one}, {"a": one, "b": one})
    assert len(set(map(digest_of_files, named))) == 4


@pytest.mark.promise("donors", "Digests of weights are kept for the next start where only this user writes")
def test_what_was_read_once_is_not_read_again(tmp_path, reads):
    files = written(tmp_path / "a", b"x" * 2500)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "a")
    cache = DigestCache(tmp_path / "cache")
    first = digest_of_files(files, cache)
    digest_of_files({"a": link, "b": tmp_path / "a"}, cache)
    assert (digest_of_files(files, DigestCache(tmp_path / "cache")), len(reads)) == (first, 3)
    assert digest_of_files(written(tmp_path / "a", b"y" * 2500), cache) != first
    assert len(reads) == 6


def test_a_file_that_was_just_written_is_read_again(tmp_path, reads, monkeypatch):
    monkeypatch.setattr(model_files, "STAMP_NS", 10**18)
    cache = DigestCache(tmp_path / "cache")
    files = written(tmp_path / "a", b"x")
    assert digest_of_files(files, cache) == digest_of_files(files, cache)
    assert len(reads) == 2
    assert not (tmp_path / "cache").exists()


@pytest.mark.promise("donors", "A change of weights that any program can make is seen")
def test_a_write_that_keeps_size_and_mtime_shows(tmp_path):
    files = written(tmp_path / "a", b"x" * 100)
    cache = DigestCache(tmp_path / "cache")
    before, first = os.stat(tmp_path / "a"), digest_of_files(files, cache)
    while os.stat(tmp_path / "a").st_ctime_ns == before.st_ctime_ns:
        (tmp_path / "a").write_bytes(b"y" * 100)
        os.utime(tmp_path / "a", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(tmp_path / "a").st_mtime_ns == before.st_mtime_ns
    assert digest_of_files(files, cache) != first


@pytest.mark.parametrize("content", [b"short", b"z" * 2500], ids=["cut", "rewritten"])
def test_a_file_that_changes_while_it_is_read_has_no_digest(tmp_path, monkeypatch, content):
    read, files = model_files._chunk, written(tmp_path / "a", b"x" * 2500)

    def write_between(state, start):
        if start:
            (tmp_path / "a").write_bytes(content)
            os.utime(tmp_path / "a", ns=(0, 0))
        return read(state, start)

    monkeypatch.setattr(model_files, "_chunk", write_between)
    with pytest.raises(OSError, match=r"shorter|changed"):
        digest_of_files(files, DigestCache(tmp_path / "cache"))
    assert not (tmp_path / "cache").exists()


DIGEST = "0f" * 32
USER_FOLDER = model_files.user_folder  # the fixture for all tests puts another in its place


@pytest.fixture
def state(tmp_path):
    (tmp_path / "weights").write_bytes(b"x")
    return FileState.of(tmp_path / "weights")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "home" / "digests"


@pytest.fixture
def cache(folder, state):
    kept = DigestCache(folder)
    kept.keep(state, DIGEST)
    return kept


@pytest.fixture
def entry(cache, folder):
    (path,) = folder.iterdir()
    return path


def test_what_was_kept_is_found_and_only_its_owner_may_look(cache, state, folder, entry):
    assert cache.find(state) == DIGEST
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, entry)] == [0o700, 0o600]


@pytest.mark.parametrize("name", [field.name for field in fields(FileState)])
def test_another_state_is_not_found(cache, state, name):
    value = getattr(state, name)
    other = replace(state, **{name: value + "x" if isinstance(value, str) else value + 1})
    assert cache.find(other) is None


BROKEN = [b"", b"{", b"[]", b"null", b"{}", b"\xff", b'{"digest": 3}', b"[" * 20_000, b" " * 20_000]
NO_DIGESTS = ["", "0f", "G" * 64, "../" * 21 + "x", 3, None, [DIGEST]]


@pytest.mark.parametrize("content", [*BROKEN, *NO_DIGESTS], ids=range(len(BROKEN) + len(NO_DIGESTS)))
def test_an_entry_that_holds_no_digest_is_not_read(cache, state, entry, content):
    if content not in BROKEN:
        content = json.dumps({**json.loads(entry.read_text()), "digest": content}).encode()
    entry.write_bytes(content)
    assert cache.find(state) is None
    cache.keep(state, DIGEST)
    assert cache.find(state) == DIGEST


@pytest.mark.promise("donors", "Digests of weights are kept for...")
@pytest.mark.parametrize("mode", [0o770, 0o702, 0o777, None])
def test_a_folder_that_others_can_write_or_own_is_left_alone(cache, state, folder, entry, monkeypatch, mode):
    owner = os.geteuid()
    if mode is None:
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    else:
        folder.chmod(mode)
    before = entry.read_bytes()
    assert cache.find(state) is None
    cache.keep(state, DIGEST[::-1])
    assert entry.read_bytes() == before


def test_links_pipes_and_what_others_can_write_are_not_read(cache, state, folder, entry, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    assert DigestCache(tmp_path / "link").find(state) is None
    os.link(entry, tmp_path / "second-name")
    assert cache.find(state) is None
    (tmp_path / "second-name").unlink()
    assert cache.find(state) == DIGEST
    entry.chmod(0o620)
    assert cache.find(state) is None
    entry.rename(tmp_path / "elsewhere")
    entry.symlink_to(tmp_path / "elsewhere")
    assert cache.find(state) is None
    entry.unlink()
    os.mkfifo(entry)
    assert cache.find(state) is None


def test_a_place_that_cannot_be_made_costs_nothing_else(state, tmp_path):
    (tmp_path / "file").write_text("in the way")
    nowhere = DigestCache(tmp_path / "file" / "digests")
    nowhere.keep(state, DIGEST)
    assert nowhere.find(state) is None


def test_the_setting_moves_it_or_switches_it_off(state, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert DigestCache.from_setting(Path("off")) is None
    monkeypatch.setattr(model_files, "user_folder", USER_FOLDER)
    for path, place in ((None, tmp_path / "xdg" / "semblend-trt"), (tmp_path / "mine", tmp_path / "mine")):
        DigestCache.from_setting(path).keep(state, DIGEST)
        assert len(list(place.iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert USER_FOLDER() == tmp_path / "home" / ".cache" / "semblend-trt"
    monkeypatch.setenv("HOME", "here")
    assert USER_FOLDER() is None
