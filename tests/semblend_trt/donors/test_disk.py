"""A folder that fails half way leaves neither a file that nobody counts nor a lock that nobody lets go."""

from __future__ import annotations

import errno
import os

import pytest
import torch

from semblend_trt.donors.disk import FOLDER, DiskTier
from semblend_trt.errors import DonorUnavailableError

TOKENS = 5


@pytest.fixture
def tier(tmp_path, form):
    made = DiskTier(tmp_path, form)
    yield made
    made.close()


def fail(*arguments, **keywords):
    raise OSError(errno.EROFS, "Read-only file system")


def names(tier):
    return sorted(path.name for path in tier._folder.glob("*.donor.*"))


def test_a_folder_that_cannot_be_cleared_is_not_kept_locked(tmp_path, form):
    """The engine serves without it; another one may have it."""
    in_the_way = tmp_path / FOLDER / "donor.donor.unfinished"
    in_the_way.mkdir(parents=True)
    with pytest.raises(OSError, match=r"donor\.unfinished"):
        DiskTier(tmp_path, form)
    in_the_way.rmdir()
    DiskTier(tmp_path, form).close()


def test_the_second_engine_of_a_folder_is_refused(tmp_path, form, tier):
    for _ in range(2):
        with pytest.raises(BlockingIOError):
            DiskTier(tmp_path, form)


def test_a_file_whose_name_is_not_synced_is_no_file(tier, make_text, make_host_kv, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_sync_folder", fail)
        with pytest.raises(OSError, match="Read-only"):
            tier.write("donor", make_text(TOKENS), make_host_kv(TOKENS))
    assert names(tier) == []
    with pytest.raises(DonorUnavailableError):
        tier.tokens_of("donor")
    tier.write("donor", make_text(TOKENS), make_host_kv(TOKENS))
    assert tier.tokens_of("donor") == TOKENS


def test_what_a_folder_holds_that_has_become_read_only_is_read(tier, make_text, make_host_kv, monkeypatch):
    kv, held = make_host_kv(TOKENS), make_host_kv(TOKENS, fill=float("nan"))
    tier.write("donor", make_text(TOKENS), kv)
    monkeypatch.setattr(os, "utime", fail)
    tier.read("donor", held)
    assert torch.equal(held.tensor, kv.tensor)


def test_a_folder_that_has_vanished_is_an_error_of_the_system(tier, tmp_path, make_text, make_host_kv):
    tier.write("donor", make_text(TOKENS), make_host_kv(TOKENS))
    (tmp_path / FOLDER).rename(tmp_path / "elsewhere")
    for call in (
        lambda: tier.write("another", make_text(TOKENS), make_host_kv(TOKENS)),
        lambda: tier.read("donor", make_host_kv(TOKENS)),
    ):
        with pytest.raises(FileNotFoundError):
            call()
    tier.forget("donor")
    assert list(tier.scan()) == []
