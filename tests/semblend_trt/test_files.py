"""Files that users name are replaced as a whole; what is no file is never replaced."""

from __future__ import annotations

import os
import socket
import stat
import threading
from typing import TYPE_CHECKING

import pytest

from kernels.files import write_bytes
from semblend_trt.errors import ConfigurationError
from semblend_trt.files import check_writable

if TYPE_CHECKING:
    from pathlib import Path


def test_a_file_is_replaced_with_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "folder" / ("n" * 255)
    write_bytes(path, b"old")
    with path.open("rb") as earlier:
        write_bytes(path, b"new")
        assert earlier.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_symlink_is_followed(tmp_path: Path) -> None:
    target, link, further = tmp_path / "far" / "target", tmp_path / "link", tmp_path / "further"
    further.symlink_to(link)
    link.symlink_to(target)
    for content in (b"made", b"replaced"):
        check_writable(further)
        write_bytes(further, content)
        assert target.read_bytes() == content
    assert link.is_symlink()
    assert further.is_symlink()
    assert list(target.parent.iterdir()) == [target]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    check_writable(link)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_bytes(link, b"content")
    reader.join(60)
    assert read == [b"content"]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_device_is_written_to(tmp_path: Path) -> None:
    # A pseudo-terminal is a device that nothing else needs.
    ours, theirs = os.openpty()
    try:
        link = tmp_path / "link"
        link.symlink_to(os.ttyname(theirs))
        check_writable(link)
        write_bytes(link, b"content")
        assert os.read(ours, 100) == b"content"
        assert stat.S_ISCHR(link.stat().st_mode)
    finally:
        os.close(ours)
        os.close(theirs)


def places_that_cannot_be_written(folder: Path) -> dict[str, Path]:
    (folder / "file").touch()
    (folder / "loop").symlink_to(folder / "loop")
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(folder / "socket"))
    return {
        "is a folder": folder,
        "Not a directory": folder / "file" / "report.json",
        "Too many levels": folder / "loop",
        "Permission denied": folder / "socket",
        "File name too long": folder / "new" / "folder" / ("n" * 256),
        "No space left": folder.__class__("/dev/full"),
    }


def test_what_cannot_be_written_is_refused_and_nothing_made(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / ("n" * 255))
    places = places_that_cannot_be_written(tmp_path)
    found = sorted(tmp_path.iterdir())
    for reason, path in places.items():
        with pytest.raises(ConfigurationError, match=reason):
            check_writable(path)
    assert sorted(tmp_path.iterdir()) == found


@pytest.mark.parametrize(("error", "reason"), [(28, "No space left"), (30, "Read-only file system")])
def test_a_folder_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, reason: str) -> None:
    """Permissions say nothing of full disks and read-only file systems, and nothing at all to root."""
    opened = os.open

    def refuse(path: str, flags: int, *rest: int, **named: int) -> int:
        if flags & os.O_CREAT:
            raise OSError(error, os.strerror(error))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigurationError, match=reason):
        check_writable(tmp_path / "report.json")
