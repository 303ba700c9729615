"""`semblend-trt router`: a configuration that holds, one sentence for one that does not, and an end when it is told."""

import os
import signal
import threading

import pytest

from semblend_trt.cli.main import main
from semblend_trt.cli.router import settings_of
from semblend_trt.fleet.router.config import load_config

TABLES = '[[replicas]]\nurl = "http://127.0.0.1:1"\nworker_id = 1\n'


@pytest.fixture
def write(tmp_path, tiny_qwen2_path, monkeypatch):
    """write(lines): the path of a configuration with the tiny model and these lines before its tables."""
    for name in [name for name in os.environ if "SEMBLEND_" in name]:
        monkeypatch.delenv(name)

    def make(lines="", model=tiny_qwen2_path, tables=TABLES):
        path = tmp_path / "router.toml"
        path.write_text(f'model = "{model}"\n{lines}\n{tables}')
        return str(path)

    return make


def test_a_configuration_that_holds_is_told(write, capsys):
    path = write()
    assert main(["router", "--config", path, "--check"]) == 0
    assert capsys.readouterr().out == f"{path}: 1 replica, policy span_overlap\n"


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ("colour = 1", "colour: there is no such field"),
        ('secret_env = "NO_SUCH_VARIABLE"', "the configuration names the variable NO_SUCH_VARIABLE, which is not set"),
        ('nats_subject = "a b"', "nats_subject: 'a b' is no subject of letters, digits, _ and -"),
    ],
)
def test_one_that_does_not_is_one_sentence(write, capsys, lines, problem):
    assert main(["router", "--config", write(lines), "--check"]) == 2
    said = capsys.readouterr()
    assert problem in said.err
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_model_without_tokenizer_is_named(write, capsys, tmp_path):
    assert main(["router", "--config", write(model=tmp_path), "--check"]) == 2
    assert f"tokenizer {tmp_path} cannot be read" in capsys.readouterr().err


def test_what_the_file_does_not_say_the_settings_say(write, monkeypatch):
    def found(lines=""):
        settings, nats = settings_of(load_config(write(lines)))
        return settings.audit_sample, nats and (nats.servers, nats.subject, nats.stream)

    assert found() == (0.0, None)
    for name, value in (("NATS_URL", "nats://settings:1"), ("NATS_STREAM", "donors"), ("AUDIT_SAMPLE", "0.5")):
        monkeypatch.setenv(f"SEMBLEND_{name}", value)
    assert found() == (0.5, (("nats://settings:1",), "semantic-kv-events", None))
    by_file = found('nats_url = "nats://file:1"\nnats_subject = "theirs"\naudit_sample = 0.25')
    assert by_file == (0.25, (("nats://file:1",), "theirs", None))


def test_it_serves_until_it_is_told_to_end(write, capsys, monkeypatch):
    """The address is written when it listens, which is when this test ends it."""
    from semblend_trt.fleet.router import serving

    class Heard:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text
            threading.Timer(0, os.kill, (os.getpid(), signal.SIGTERM)).start()

        def flush(self): ...

    heard = Heard()
    monkeypatch.setattr(serving.sys, "stderr", heard)
    assert main(["router", "--config", write("port = 0")]) == 0
    assert heard.text.startswith("routing on http://127.0.0.1:")


def test_an_address_in_use_is_named(write, capsys):
    assert main(["router", "--config", write('host = "192.0.2.1"\nport = 1')]) == 2
    assert "192.0.2.1:1 cannot be listened on" in capsys.readouterr().err
