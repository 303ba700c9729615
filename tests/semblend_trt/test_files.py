"""Files that users name are replaced as a whole; what is no file is never replaced."""

import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from semblend_trt.doctor.trtllm import read_options
from semblend_trt.errors import ConfigurationError, SemBlendError
from semblend_trt.files import bounded_lines, check_writable, open_input, read_input, read_text, too_long, write_bytes
from semblend_trt.model_tokenizer import tokenizer_file
from semblend_trt.reuse_profile import ReuseProfile
from tests.semblend_trt.held_donors import at_once
from validation.cases import content_of
from validation.engines import AuditFile
from validation.estimate.figures import recorded_observations
from validation.replay.trace import trace_file
from validation.results import rows_of


def test_a_file_is_replaced_with_a_new_one(tmp_path):
    path = tmp_path / "folder" / ("n" * 255)
    write_bytes(path, b"old")
    with path.open("rb") as earlier:
        write_bytes(path, b"new")
        assert earlier.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_a_symlink_is_followed(tmp_path):
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


def test_a_pipe_is_written_to(tmp_path):
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    check_writable(link)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    write_bytes(link, b"content")
    reader.join(60)
    assert read == [b"content"]
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_what_cannot_be_written_is_refused_and_nothing_made(tmp_path):
    check_writable(tmp_path / "new" / "folder" / ("n" * 255))
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with socket.socket(socket.AF_UNIX) as ours:
        ours.bind(str(tmp_path / "socket"))
    places = {
        "is a folder": tmp_path,
        "Not a directory": tmp_path / "file" / "report.json",
        "Too many levels": tmp_path / "loop",
        "Permission denied": tmp_path / "socket",
        "File name too long": tmp_path / "new" / "folder" / ("n" * 256),
        "No space left": Path("/dev/full"),
    }
    found = sorted(tmp_path.iterdir())
    for reason, path in places.items():
        with pytest.raises(ConfigurationError, match=reason):
            check_writable(path)
    assert sorted(tmp_path.iterdir()) == found


@pytest.mark.parametrize(("error", "reason"), [(28, "No space left"), (30, "Read-only file system")])
def test_a_folder_is_tried(tmp_path, monkeypatch, error, reason):
    """Permissions say nothing of full disks and read-only file systems, and nothing at all to root."""
    opened = os.open

    def refuse(path, flags, *rest, **named):
        if flags & os.O_CREAT:
            raise OSError(error, os.strerror(error))
        return opened(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigurationError, match=reason):
        check_writable(tmp_path / "report.json")


@pytest.mark.promise(
    "donors",
    "No file that a command is given and no answer of a server makes it wait without end or end in a traceback",
)
@pytest.mark.parametrize("may_be_pipe", [False, True])
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (os.mkfifo, "it is not a regular file"),
        (os.mkdir, "Is a directory"),
        (lambda path: path.symlink_to("/dev/zero"), "it is not a regular file"),
        (lambda path: socket.socket(socket.AF_UNIX).bind(str(path)), "No such device or address"),
        (lambda path: None, "No such file or directory"),
        (lambda path: path.write_bytes(bytes(9)), "it has more than 8 bytes"),
    ],
    ids=["pipe", "folder", "device", "socket", "missing", "large"],
)
def test_what_is_no_file_for_a_command_is_not_waited_for(make, why, tmp_path, may_be_pipe):
    path = tmp_path / "given"
    make(path)
    with pytest.raises(OSError, match=why) as refused:
        at_once(lambda: read_input(path, 8, may_be_pipe=may_be_pipe))
    assert refused.value.filename == str(path)


@pytest.mark.parametrize("name", ["-", "/dev/stdin"])
def test_standard_input_is_read_where_a_pipe_may_be_given(name):
    for may_be_pipe, told in ((True, "b'of a pipe'"), (False, "it ")):
        read = f"try: print(read_input({name!r}, may_be_pipe={may_be_pipe}))"
        code = (
            f"from semblend_trt.files import read_input\n{read}\nexcept OSError as error: print('it', error.strerror)"
        )
        done = subprocess.run([sys.executable, "-c", code], input=b"of a pipe", capture_output=True, check=True)
        assert done.stdout.decode().startswith(told)


def test_a_pipe_that_gives_nothing_is_given_up(monkeypatch):
    monkeypatch.setattr("semblend_trt.files.PIPE_SECONDS", 0.001)
    ours, theirs = os.pipe()
    os.write(theirs, b"a line\nhalf")
    with open_input(f"/dev/fd/{ours}", may_be_pipe=True) as file:
        assert file.readline() == b"a line\n"
        with pytest.raises(TimeoutError, match="not a byte came within"):
            at_once(file.readline)
    os.close(theirs)
    os.close(ours)


def test_long_lines_are_cut_and_counted_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("semblend_trt.files.MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "lines").write_bytes(b"a" * (1 << 20) + b"\n" + b"b" * (3 << 20) + b"\nc")
    with open_input(tmp_path / "lines") as file:
        found = [(len(line), size, too_long(line)) for line, size in bounded_lines(file)]
    long = "longer than 1 MiB"
    assert found == [((1 << 20) + 1, (1 << 20) + 1, long), ((1 << 20) + 1, (3 << 20) + 1, long), (1, 1, None)]


def test_a_byte_that_is_not_utf_8_is_named_with_its_line(tmp_path):
    (tmp_path / "text").write_bytes("eins\nzwei ü\n\n\xe9t\xe9".encode("latin-1", "replace"))
    with pytest.raises(ConfigurationError, match=r"text, line 2: byte 0xfc is not UTF-8; write the file in UTF-8"):
        read_text(tmp_path / "text")


READERS = [
    *(read_options, ReuseProfile.read, content_of, recorded_observations, rows_of, read_text),
    *(lambda path: tokenizer_file(path.parent), lambda path: AuditFile(path).read(), trace_file),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_or_a_device_is_refused_at_once(read, kind, tmp_path):
    path = tmp_path / "tokenizer.json"
    os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    with pytest.raises((SemBlendError, OSError), match="not a regular file"):
        at_once(lambda: read(path))
