"""A folder that fails half way, or that another process changes, leaves no file that is not counted and no lock."""

import errno
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch

from semblend_trt.donors.disk_tier import FOLDER, KEY_BYTES, DiskTier, DonorFileError, key_path, make_key, read_key
from semblend_trt.donors.offload import DonorText
from semblend_trt.errors import DonorUnavailableError
from tests.semblend_trt.held_donors import FORM, at_once, host_kv, text_of, whole

TOKENS = 5


@pytest.fixture(autouse=True)
def what_a_link_leads_to_is_left_as_it_was(tmp_path):
    yield
    target = tmp_path / "target"
    if target.is_file():
        assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"of another owner", 0o644)
    assert not (tmp_path / "nowhere").exists()


@pytest.fixture
def tier(tmp_path):
    made = DiskTier(tmp_path, FORM)
    yield made
    made.close()


def write(tier, donor_id, fill=None):
    tier.write(text_of(TOKENS, donor_id), host_kv(TOKENS, fill=fill))


def fail(*arguments, **keywords):
    raise OSError(errno.EROFS, "Read-only file system")


def names(tier):
    return sorted(path.name for path in tier._folder.glob("*.donor.*"))


def test_what_an_unfinished_write_left_is_cleared_where_that_can_be(tmp_path, tier):
    for name, make in (("begun", Path.touch), ("in the way", Path.mkdir)):
        make(tmp_path / FOLDER / f"{name}.donor.unfinished")
    assert [each.reason for each in tier.scan()] == ["unfinished"] * 2
    assert names(tier) == ["in the way.donor.unfinished"]


@pytest.mark.parametrize("call", ["pwrite", "fsync of the file", "fsync of the folder"])
def test_a_file_that_is_not_written_or_not_synced_is_no_file(tier, monkeypatch, call):
    def sync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == (call == "fsync of the folder"):
            fail()

    with monkeypatch.context() as patch:
        patch.setattr(os, call.split()[0], fail if call == "pwrite" else sync)
        with pytest.raises(OSError, match="Read-only"):
            write(tier, "donor")
    assert names(tier) == []
    with pytest.raises(DonorUnavailableError):
        tier.tokens_of("donor")
    write(tier, "donor")
    assert tier.tokens_of("donor") == TOKENS


def test_what_a_folder_holds_that_has_become_read_only_is_read(tier, monkeypatch):
    kv, held = host_kv(TOKENS), host_kv(TOKENS, fill=float("nan"))
    tier.write(text_of(TOKENS), kv)
    monkeypatch.setattr(os, "utime", fail)
    tier.read("donor", held)
    assert torch.equal(whole(held), whole(kv))


def move_folder(folder):
    folder.rename(folder.with_name("elsewhere"))


def replace_folder(folder):
    move_folder(folder)
    folder.mkdir(mode=0o700)
    (folder / "lock").touch(mode=0o600)


def link_to_folder(folder):
    replace_folder(folder)
    elsewhere = folder.with_name("third")
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


def replace_lock(folder):
    (folder / "lock").unlink()
    (folder / "lock").touch(mode=0o600)


@pytest.mark.promise("donors", "A folder that is moved or replaced during a run is used no more")
@pytest.mark.parametrize("change", [move_folder, replace_folder, link_to_folder, shutil.rmtree, replace_lock])
def test_a_folder_that_is_moved_removed_or_replaced_is_not_used_any_more(tier, tmp_path, change):
    """Another engine may have it, or another one in its place."""
    write(tier, "donor")
    change(tmp_path / FOLDER)
    before = sorted(tmp_path.rglob("*"))
    read = partial(tier.read, "donor", host_kv(TOKENS))
    for call in (partial(write, tier, "another"), read, lambda: list(tier.scan())):
        with pytest.raises(FileNotFoundError):
            call()
    assert sorted(tmp_path.rglob("*")) == before
    tier.forget("donor")
    assert names(tier) == []


@pytest.mark.promise("donors", "The folder is one engine's and...")
@pytest.mark.parametrize(
    ("what", "mode"),
    [*((FOLDER, mode) for mode in (0o777, 0o720, 0o702)), *(("key", mode) for mode in (0o640, 0o620, 0o604, 0o602))],
)
def test_a_folder_that_others_can_write_or_a_key_that_they_can_read_is_refused(tmp_path, what, mode):
    DiskTier(tmp_path, FORM, tmp_path / "key").close()
    (tmp_path / what).chmod(mode)
    with pytest.raises(PermissionError, match=f"{what} has mode {mode:o}, open to others"):
        DiskTier(tmp_path, FORM, tmp_path / "key")
    assert stat.S_IMODE((tmp_path / what).stat().st_mode) == mode


def test_a_folder_that_others_can_read_is_closed_to_them(tmp_path):
    (tmp_path / FOLDER).mkdir(mode=0o755)
    DiskTier(tmp_path, FORM).close()
    assert stat.S_IMODE((tmp_path / FOLDER).stat().st_mode) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
@pytest.mark.parametrize("what", [f"{FOLDER}", f"{FOLDER}/lock", "key"])
def test_a_folder_lock_or_key_of_another_user_is_refused(tmp_path, what):
    DiskTier(tmp_path, FORM, tmp_path / "key").close()
    os.chown(tmp_path / what, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to user 12345, and this process is user 0"):
        DiskTier(tmp_path, FORM, tmp_path / "key")


@pytest.mark.promise("donors", "The folder is one engine's and...")
@pytest.mark.parametrize("is_there", [True, False])
@pytest.mark.parametrize("link", ["path", "folder"])
def test_a_link_is_no_folder_and_nothing_behind_it_is_touched(tmp_path, link, is_there):
    target, path = tmp_path / "target", tmp_path / "path"
    if is_there:
        target.mkdir()
        target.chmod(0o755)
    if link == "folder":
        path.mkdir()
    (path if link == "path" else path / FOLDER).symlink_to(target)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OSError, match="is a symbolic link or no folder"):
        DiskTier(path, FORM)
    assert sorted(tmp_path.rglob("*")) == before
    if is_there:
        assert stat.S_IMODE(target.stat().st_mode) == 0o755


def a_link(path):
    target = path.parents[1] / "target"
    target.write_bytes(b"of another owner")
    target.chmod(0o644)
    path.symlink_to(target)


def a_dangling_link(path):
    path.symlink_to(path.parents[1] / "nowhere")


def a_socket(path):
    with socket.socket(socket.AF_UNIX) as made, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # the whole path may be longer than a socket's may be
        made.bind(path.name)


def a_device(path):
    try:
        os.mknod(path, stat.S_IFCHR | 0o600, os.stat(os.devnull).st_rdev)
    except PermissionError:
        pytest.skip("this user cannot make devices")


THINGS = pytest.mark.parametrize("thing", [os.mkfifo, os.mkdir, a_link, a_dangling_link, a_socket, a_device])


@THINGS
def test_what_is_no_file_is_left_where_it_is_when_donors_are_looked_for(tmp_path, tier, thing):
    write(tier, "donor")
    thing(tmp_path / FOLDER / "planted.donor.safetensors")
    planted, found = sorted(at_once(lambda: list(tier.scan())), key=lambda each: isinstance(each, DonorText))
    assert (planted.reason, found.donor_id) == ("unreadable", "donor")
    assert "planted" in str(planted)
    assert names(tier) == ["donor.donor.safetensors", "planted.donor.safetensors"]


@THINGS
def test_what_came_in_place_of_a_donors_file_is_not_read(tmp_path, tier, thing):
    write(tier, "donor")
    path = tmp_path / FOLDER / "donor.donor.safetensors"
    path.unlink()
    thing(path)
    with pytest.raises(OSError):  # noqa: PT011 - each kind has its own words
        at_once(lambda: tier.read("donor", host_kv(TOKENS)))
    if thing is not os.mkdir:
        tier.forget("donor")
        assert names(tier) == []


@THINGS
@pytest.mark.parametrize("suffix", [".donor.unfinished", ".donor.safetensors"])
def test_a_donor_is_never_written_through_what_is_no_file(tmp_path, tier, thing, suffix):
    thing(tmp_path / FOLDER / ("donor" + suffix))
    try:
        at_once(lambda: write(tier, "donor"))
    except OSError:
        assert thing is os.mkdir or names(tier) == []
    else:
        at_once(lambda: tier.read("donor", host_kv(TOKENS)))


@THINGS
@pytest.mark.parametrize("what", [f"{FOLDER}/lock", f"{FOLDER}/../keys/key"])
def test_what_is_no_file_is_no_lock_and_no_key(tmp_path, thing, what):
    path = tmp_path / what
    (tmp_path / FOLDER).mkdir()
    (tmp_path / "keys").mkdir()
    thing(path)
    with pytest.raises(OSError):  # noqa: PT011
        at_once(lambda: DiskTier(tmp_path, FORM, tmp_path / "keys" / "key"))


def test_files_that_changed_names_are_refused(tmp_path, tier):
    """Both are ours and whole; each would be the other's text and KV."""
    for name, fill in (("one", 1.0), ("two", 2.0)):
        write(tier, name, fill)
    one, two = (tmp_path / FOLDER / f"{name}.donor.safetensors" for name in ("one", "two"))
    one.rename(tmp_path / "between")
    two.rename(one)
    (tmp_path / "between").rename(two)
    for name in ("one", "two"):
        with pytest.raises(DonorFileError):
            tier.read(name, host_kv(TOKENS))
    assert [each.reason for each in tier.scan()] == ["corrupt", "corrupt"]
    assert names(tier) == []


@pytest.mark.promise("donors", "A file that was made or...")
def test_files_of_another_key_are_refused_and_removed(tmp_path):
    first = DiskTier(tmp_path, FORM, tmp_path / "keys" / "one")
    write(first, "donor")
    first.close()
    second = DiskTier(tmp_path, FORM, tmp_path / "keys" / "two")
    assert [each.reason for each in second.scan()] == ["other_key"]
    assert names(second) == []
    second.close()


@pytest.mark.promise("donors", "The key is made once, is...")
@pytest.mark.parametrize("way", ["plain", "link"])
def test_a_key_among_the_files_that_it_seals_is_refused(tmp_path, way):
    folder = tmp_path / FOLDER
    if way == "link":
        folder.mkdir()
        (tmp_path / "keys").symlink_to(folder)
        folder = tmp_path / "keys"
    with pytest.raises(OSError, match="lies among the files that it seals; set SEMBLEND_DISK_KEY_PATH"):
        DiskTier(tmp_path, FORM, folder / "key")
    assert not (tmp_path / FOLDER / "key").exists()


@pytest.mark.parametrize("size", [0, KEY_BYTES - 1, KEY_BYTES + 1])
def test_no_folder_is_made_without_a_key(tmp_path, size):
    (tmp_path / "key").write_bytes(bytes(size))
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(OSError, match="no key of 32 bytes; remove it"):
        DiskTier(tmp_path / "donors", FORM, tmp_path / "key")
    assert not (tmp_path / "donors").exists()


@pytest.mark.promise("donors", "The key is made once, is its owner's alone and lies outside of the files' folder")
def test_a_key_is_made_once_and_its_owners_alone(tmp_path):
    file, begin, umask = tmp_path / "state" / "donor-key", threading.Barrier(8), os.umask(0)
    try:
        with ThreadPoolExecutor(8) as pool:
            keys = list(pool.map(lambda _: (begin.wait(), make_key(file))[1], range(8)))
    finally:
        os.umask(umask)
    assert (len(keys[0]), keys, list(file.parent.iterdir())) == (32, [read_key(file)] * 8, [file])
    assert [stat.S_IMODE(each.stat().st_mode) for each in (file, file.parent)] == [0o600, 0o700]
    assert make_key(file.with_name("another")) != keys[0]


def test_it_lies_in_the_users_state_folder_unless_it_is_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path))
    sealed = tmp_path / "semblend-donors"
    assert key_path(Path("/keys/mine"), sealed) == Path("/keys/mine")
    assert key_path(None, sealed) == tmp_path / "state" / "semblend-trt" / "donor-key"
    for unset in ("", "relative"):  # the specification has a relative one ignored
        monkeypatch.setenv("XDG_STATE_HOME", unset)
        assert key_path(None, sealed) == tmp_path / ".local" / "state" / "semblend-trt" / "donor-key"


@pytest.mark.promise("donors", "The folder is one engine's and one user's; links, pipes and others' files are not used")
def test_a_killed_engines_folder_can_be_had_and_a_living_ones_cannot(tmp_path):
    holds = (
        "import sys, pathlib, torch\n"
        "from kernels.layout import KvGeometry\n"
        "from semblend_trt.donors.disk_tier import DiskTier, KvForm\n"
        "tier = DiskTier(pathlib.Path(sys.argv[1]), KvForm(KvGeometry(3, 2, 8, 1), torch.float32))\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    arguments = [sys.executable, "-c", holds, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(BlockingIOError, match=f"another engine keeps its donors in {tmp_path / FOLDER}"):
            at_once(lambda: DiskTier(tmp_path, FORM))
        other.kill()
    DiskTier(tmp_path, FORM).close()
