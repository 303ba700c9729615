"""A key is made once, is its owner's alone, and nothing else is taken for one."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from semblend_trt.donors.disk_key import KEY_BYTES, key_path, make_key, read_key


@pytest.fixture
def file(tmp_path):
    return tmp_path / "state" / "donor-key"


def test_it_is_made_once_and_its_owners_alone(file):
    umask = os.umask(0)
    try:
        key = make_key(file)
    finally:
        os.umask(umask)
    assert (len(key), stat.S_IMODE(file.stat().st_mode), stat.S_IMODE(file.parent.stat().st_mode)) == (32, 0o600, 0o700)
    assert (make_key(file), read_key(file), list(file.parent.iterdir())) == (key, key, [file])
    assert make_key(file.with_name("another")) != key


def test_all_who_make_it_at_once_have_the_same_one(file):
    keys, begin = [], threading.Barrier(8)
    threads = [threading.Thread(target=lambda: (begin.wait(), keys.append(make_key(file)))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert keys == [read_key(file)] * 8
    assert list(file.parent.iterdir()) == [file]


def test_it_is_not_made_where_it_is_only_read(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_key(tmp_path / "key")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o604, 0o602, 0o610, 0o777])
def test_one_that_others_may_come_at_is_refused(file, mode):
    make_key(file)
    file.chmod(mode)
    with pytest.raises(PermissionError, match=f"donor-key has mode {mode:o}, open to others"):
        make_key(file)
    assert stat.S_IMODE(file.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_one_of_another_user_is_refused(file):
    make_key(file)
    os.chown(file, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to user 12345, and this process is user 0"):
        make_key(file)


@pytest.mark.parametrize("size", [0, KEY_BYTES - 1, KEY_BYTES + 1])
def test_one_of_another_length_is_refused(file, size):
    make_key(file)
    file.write_bytes(bytes(size))
    with pytest.raises(OSError, match="no key of 32 bytes; remove it"):
        make_key(file)


@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "folder"])
def test_what_is_no_file_is_refused_and_left_as_it_is(at_once, file, kind):
    target = file.with_name("target")
    if kind == "dangling link":
        file.parent.mkdir()
    else:
        make_key(target)
    if kind == "fifo":
        os.mkfifo(file, 0o600)
    elif kind == "folder":
        file.mkdir(mode=0o700)
    else:
        file.symlink_to(target)
    before = sorted(file.parent.iterdir())
    with pytest.raises(OSError, match="is a symbolic link" if "link" in kind else "no regular file"):
        at_once(lambda: make_key(file))
    assert sorted(file.parent.iterdir()) == before


def test_it_lies_in_the_users_state_folder_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    sealed = tmp_path / "semblend-donors"
    assert key_path(Path("/keys/mine"), sealed) == Path("/keys/mine")
    assert key_path(None, sealed) == tmp_path / "state" / "semblend-trt" / "donor-key"
    for unset in ("", "relative"):  # the specification has a relative one ignored
        monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert key_path(None, sealed) == tmp_path / ".local" / "state" / "semblend-trt" / "donor-key"


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch, tmp_path):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    with pytest.raises(OSError, match="set SEMBLEND_DISK_KEY_PATH"):
        key_path(None, tmp_path)
