"""docs/failure-modes.md and docs/vllm.md name every reason for which the code refuses or drops, and no other."""

from __future__ import annotations

from engine_wrapper.vllm import refusals
from semblend_trt import audit
from semblend_trt.donors.disk_tier import FILE_REASONS
from semblend_trt.donors.offload import OffloadEventKind
from semblend_trt.fleet.publisher import DROP_REASONS, RESYNC_REASONS
from semblend_trt.fleet.router import counters, serving
from semblend_trt.outcome import FAULTS, OTHER_REASON, REASONS
from tests.pages import Page, code_in

PAGES = [Page("docs/failure-modes.md"), Page("docs/vllm.md")]
# The names in the last columns of their tables.
TOLD = {name for page in PAGES for row in page.rows for name in code_in(row[-1]) if name.isidentifier()}
FAILED_MOVES = {
    OffloadEventKind.WRITE_FAILED,
    OffloadEventKind.WRITE_SKIPPED,
    OffloadEventKind.FETCH_FAILED,
    OffloadEventKind.PROMOTE_FAILED,
    OffloadEventKind.FILE_REFUSED,
    OffloadEventKind.DISK_UNAVAILABLE,
}
ROUTER = {*counters.REFUSALS, *counters.FALLBACKS, *counters.FAILED_ATTEMPTS, *serving.DROPPED}
# Of a connection to NATS, of a line of telemetry, and of a worker that a reader does not follow.
OTHER_COUNTS = {"failed", "dropped", "refused"}


def test_the_pages_have_every_reason_and_no_other() -> None:
    """What is listed here needs a row that counts as it, or an entry among the code's reasons."""
    events = {*DROP_REASONS, *RESYNC_REASONS, *audit.DROP_REASONS, *(event.value for event in FAILED_MOVES)}
    code = {*REASONS, OTHER_REASON, *FAULTS, *FILE_REASONS, *events, *ROUTER, *OTHER_COUNTS}
    assert TOLD ^ code == set()


def test_each_of_vllms_reasons_is_counted_under_its_name() -> None:
    assert refusals.REASONS.keys() <= REASONS


def test_rows_are_whole() -> None:
    rows = [line for line in PAGES[0].text.splitlines() if line.startswith("|")]
    assert [line for line in rows if line.replace("\\|", "").count("|") != 5] == []
