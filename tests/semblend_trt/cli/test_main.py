"""The command finds its subcommands, ends with a status for scripts, and shows text that controls no terminal."""

import logging
import subprocess
import sys

import pytest

from semblend_trt.cli import main as command
from semblend_trt.command_line import PrintableFormatter, ended, printable
from semblend_trt.errors import ConfigurationError


def test_every_module_is_a_subcommand(capsys):
    assert "events" in command.subcommands()
    assert "main" not in command.subcommands()
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in command.subcommands())


@pytest.mark.promise("commands", "`semblend-trt doctor` says what is missing...")
@pytest.mark.parametrize(
    ("words", "problem"),
    [
        *((words, "usage: semblend-trt") for words in ("", "nonsense", "events")),
        ("config --json --markdown", "argument --markdown: not allowed with argument --json\n"),
        ("doctor --kv-dtype int3", "invalid choice: 'int3'"),
        ("doctor --model ", "the name is empty"),
        ("events tail --seconds 0", "argument --seconds: '0' is no number above 0 and up to 86400\n"),
        ("fleet status --seconds soon", "argument --seconds: 'soon' is no number above 0 and up to 86400\n"),
        ("fleet status --limit 0.5", "argument --limit: '0.5' is no whole number from 1 on\n"),
        *((f"warm a --url {url}", "argument --url") for url in ("file:///etc", "http://[1", "http://a:b@c")),
        ("warm a --url http://a --concurrency 0", "argument --concurrency"),
        *((f"spot-check a --url http://a --share {share}", f"'{share}' is no share") for share in ("0", "2", "much")),
    ],
)
def test_bad_usage_ends_with_two(words, problem, capsys):
    with pytest.raises(SystemExit) as left:
        command.main(words.split(" ") if words else [])
    shown = capsys.readouterr().err
    assert (left.value.code, "usage: semblend-trt" in shown, problem in shown) == (2, True, True)


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (ConfigurationError("a bad setting"), 2, "semblend-trt: a bad setting\n"),
        (ConfigurationError("a name: \x1b[2J\n"), 2, "semblend-trt: a name: \\x1b[2J\\n\n"),
        (OSError(28, "No space left on device"), 2, "semblend-trt: [Errno 28] No space left on device\n"),
        (RecursionError("too deep"), 2, "semblend-trt: it cannot go on: RecursionError: too deep\n"),
        (KeyboardInterrupt(), 130, "semblend-trt: interrupted\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_what_a_subcommand_raises_becomes_a_status(error, status, told, capsys):
    def fail():
        raise error

    assert ended("semblend-trt", fail) == status
    assert capsys.readouterr().err == told


def test_the_list_of_subcommands_is_quick_to_import():
    code = "import sys; import semblend_trt.cli.main; assert not {'torch', 'nats'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_router_says_what_replaced_it(capsys):
    assert command.main(["router", "--config", "router.toml", "--check"]) == 2
    assert capsys.readouterr().err.count("semblend_trt.fleet.litellm.placement") == 1


FORGED = "a\x1b[2J\x9b1m\r\nb\u202e\u2028\ud800\x7f\0"
SHOWN = r"a\x1b[2J\x9b1m\r\nb\u202e\u2028\ud800\x7f\x00"


def test_what_a_terminal_would_obey_is_escaped():
    assert printable(FORGED) == SHOWN
    assert printable("Größe 3 \\n 北") == "Größe 3 \\n 北"
    assert printable(ValueError("a\nb")) == r"a\nb"


def test_a_log_record_is_one_line_and_its_traceback_several():
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        error = sys.exc_info()
    record = logging.LogRecord("a", logging.ERROR, __file__, 1, "told %s", (FORGED,), error)
    first, *lines = PrintableFormatter().format(record).split("\n")
    assert first == f"told {SHOWN}"
    assert len(lines) > 2
    assert lines[-1] == r"ValueError: \x1b[2J"
