"""No file that a command is given makes it wait, whichever reads it."""

import os

import pytest

from semblend_trt.doctor.trtllm import read_options
from semblend_trt.errors import SemBlendError
from semblend_trt.files import read_text
from semblend_trt.model_tokenizer import tokenizer_file
from semblend_trt.reuse_profile import ReuseProfile
from tests.semblend_trt.held_donors import at_once
from validation.cases import content_of
from validation.engines import AuditFile
from validation.estimate.figures import recorded_observations
from validation.replay.trace import trace_file
from validation.results import rows_of

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
