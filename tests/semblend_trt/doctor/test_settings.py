"""Servers, folders and files that settings name are tried, and left as they were found."""

from __future__ import annotations

import fcntl
import os
import re
from typing import TYPE_CHECKING

import pytest

from semblend_trt.config import load_settings
from semblend_trt.doctor.finding import Status
from semblend_trt.doctor.settings import audit, disk, nats, variables
from tests.semblend_trt.held_donors import at_once

if TYPE_CHECKING:
    from pathlib import Path


def test_every_variable_is_read_or_told(monkeypatch) -> None:
    monkeypatch.setenv("TRTLLM_SEMBLEND_MIN_SPAN", "96")
    monkeypatch.setenv("SEMBLEND_MIN_SPAN", "128")
    monkeypatch.setenv("SEMBLEND_MAX_DONORS", "7")
    monkeypatch.setenv("SEMBLEND_MAX_DONOR", "7")
    unknown, ignored, given, short = variables(load_settings(), None)
    assert (unknown.status, unknown.text) == (
        Status.FAILED,
        "SEMBLEND_MAX_DONOR is not read; did you mean SEMBLEND_MAX_DONORS?",
    )
    assert (ignored.status, ignored.text.split(" is ")[0]) == (Status.NOTE, "SEMBLEND_MIN_SPAN")
    assert given.status is Status.OK
    assert given.text.startswith("2 of ")
    assert (short.status, "SEMBLEND_MAX_DONORS" in short.text) == (Status.NOTE, True)


def test_a_retired_setting_is_a_note(monkeypatch) -> None:
    monkeypatch.setenv("SEMBLEND_DONOR_DTYPE", "model")
    note, _ = variables(load_settings(), None)
    assert (note.status, note.text) == (
        Status.NOTE,
        "SEMBLEND_DONOR_DTYPE is ignored: donors are kept in the dtype of the cache",
    )


@pytest.mark.parametrize(
    ("settings", "reason"), [({"enabled": False}, "disabled"), ({"policy": "off"}, "policy_off"), ({}, None)]
)
def test_what_is_switched_off_is_refused(settings, reason: str | None) -> None:
    assert [each.reason for each in variables(load_settings(**settings), None) if each.is_problem] == [
        reason for reason in [reason] if reason
    ]


def test_nats_answers(nats_server) -> None:
    (answer,) = nats(load_settings(nats_url=nats_server.url, nats_stream="donors"))
    assert answer.status is Status.OK
    assert answer.details["server_version"].count(".") == 2


def test_nats_is_out_of_reach(make_nats_server) -> None:
    server = make_nats_server()
    server.kill()
    (failed,) = nats(load_settings(nats_url=server.url.replace("//", "//alice:hunter2@")))
    assert failed.status is Status.FAILED
    assert "hunter2" not in failed.text
    (failed,) = nats(load_settings(nats_url=server.url))
    assert f"out of reach at {server.url} (NoServersError): start it, or mend SEMBLEND_NATS_URL" in failed.text


@pytest.mark.parametrize("is_pipe", [False, True])
def test_a_certificate_that_is_not_there(nats_server, tmp_path: Path, is_pipe: bool) -> None:
    if is_pipe:
        os.mkfifo(tmp_path / "ca.pem")
    settings = load_settings(nats_url=nats_server.url, nats_tls_ca=str(tmp_path / "ca.pem"))
    failed, *_ = at_once(lambda: list(nats(settings)))
    assert (failed.status, "SEMBLEND_NATS_TLS_CA" in failed.text) == (Status.FAILED, True)


def test_without_an_address_no_server_is_asked() -> None:
    assert list(nats(load_settings())) == []


@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_can_be_written(tmp_path: Path, is_there: bool) -> None:
    folder = tmp_path / "donors"
    if is_there:
        (folder / "semblend-donors").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    (found,) = disk(load_settings(disk_bytes=1, disk_path=str(folder)))
    assert (found.status, sorted(tmp_path.rglob("*"))) == (Status.OK, before)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    (failed,) = disk(load_settings(disk_bytes=1, disk_path=str(tmp_path / "file")))
    assert (failed.status, "SEMBLEND_DISK_PATH" in failed.text) == (Status.FAILED, True)


def test_a_folder_that_an_engine_uses_is_told(tmp_path: Path) -> None:
    folder = tmp_path / "semblend-donors"
    folder.mkdir()
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        note, found = disk(load_settings(disk_bytes=1, disk_path=str(tmp_path)))
    assert (note.status, found.status) == (Status.NOTE, Status.OK)
    assert "in use" in note.text
    (found,) = disk(load_settings(disk_bytes=1, disk_path=str(tmp_path)))
    assert found.status is Status.OK


@pytest.mark.parametrize(
    ("hindrance", "told"),
    [
        ("folder for all", "SEMBLEND_DISK_PATH: .* has mode 777"),
        ("linked folder", "SEMBLEND_DISK_PATH: .* is a symbolic link"),
        ("fifo for a lock", "SEMBLEND_DISK_PATH: lock is no regular file"),
        ("key for all", "SEMBLEND_DISK_KEY_PATH: .* has mode 644"),
        ("linked key", "SEMBLEND_DISK_KEY_PATH: .* is a symbolic link"),
        ("short key", "SEMBLEND_DISK_KEY_PATH: .* is no key of 32 bytes"),
        ("no place for a key", "SEMBLEND_DISK_KEY_PATH: no file can be made in"),
        ("key among the files", "SEMBLEND_DISK_KEY_PATH: .* lies among the files"),
    ],
)
def test_what_an_engine_would_refuse_is_told_and_left_as_it_is(tmp_path: Path, hindrance: str, told: str) -> None:
    folder, key = tmp_path / "semblend-donors", tmp_path / "key"
    folder.mkdir()
    key.write_bytes(bytes(31 if hindrance == "short key" else 32))
    key.chmod(0o644 if hindrance == "key for all" else 0o600)
    if hindrance == "folder for all":
        folder.chmod(0o777)
    elif hindrance == "linked folder":
        folder.rename(tmp_path / "target")
        folder.symlink_to(tmp_path / "target")
    elif hindrance == "fifo for a lock":
        os.mkfifo(folder / "lock")
    elif hindrance == "linked key":
        key.rename(tmp_path / "target")
        key.symlink_to(tmp_path / "target")
    elif hindrance == "no place for a key":
        key /= "key"
    elif hindrance == "key among the files":
        key = folder / "key"
    before = [(path, path.lstat().st_mode) for path in sorted(tmp_path.rglob("*"))]
    (failed,) = disk(load_settings(disk_bytes=1, disk_path=str(tmp_path), disk_key_path=str(key)))
    assert failed.status is Status.FAILED
    assert re.match(told, failed.text)
    assert failed.text.endswith("; no donor is kept on disk")
    assert [(path, path.lstat().st_mode) for path in sorted(tmp_path.rglob("*"))] == before


@pytest.mark.parametrize(
    ("settings", "status"),
    [({"disk_bytes": 1}, [Status.FAILED]), ({"disk_path": "somewhere"}, [Status.NOTE]), ({}, [])],
)
def test_half_a_disk_tier(settings, status: list[Status]) -> None:
    assert [found.status for found in disk(load_settings(**settings))] == status


def test_a_disk_with_too_little_room(tmp_path: Path) -> None:
    (note,) = disk(load_settings(disk_bytes=1 << 50, disk_path=str(tmp_path)))
    assert (note.status, note.text.endswith("what is in it counts too")) == (Status.NOTE, True)


def test_the_audit_log(tmp_path: Path) -> None:
    (fine,) = audit(load_settings(audit_path=str(tmp_path / "audit.jsonl")))
    (failed,) = audit(load_settings(audit_path=str(tmp_path)))
    assert (fine.status, failed.status) == (Status.OK, Status.FAILED)
    assert list(tmp_path.iterdir()) == []
    for path, told in ((tmp_path / ("n" * 256), "File name too long"), ("/dev/full", "No space left")):
        (failed,) = audit(load_settings(audit_path=str(path)))
        assert (failed.status, told in failed.text) == (Status.FAILED, True)
    (fine,) = audit(load_settings(audit_path="/dev/null"))
    assert fine.status is Status.OK
    assert list(audit(load_settings())) == []
