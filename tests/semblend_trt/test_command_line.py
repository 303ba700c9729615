"""Text from outside is shown, and controls no terminal."""

import logging
import sys

from semblend_trt.command_line import PrintableFormatter, printable

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
