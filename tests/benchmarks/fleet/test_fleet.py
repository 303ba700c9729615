"""Short runs of the fleet's benchmarks make every row."""

from benchmarks.fleet import directory, events
from tests.benchmarks.dry_runs import dry_rows


def test_the_directory_finds_holders_and_places_while_donors_come_and_go(tmp_path, monkeypatch):
    small = {"PROMPTS": 5, "ROUNDS": 1, "WRITE_SECONDS": 1, "WRITE_ROUNDS": 1, "LOOKUPS_PER_S": 20, "DOCUMENTS": 20}
    small |= {"EVENTS_PER_S": 200, "REQUESTS_PER_S": 5, "SECONDS": 1, "PLACED_ROUNDS": 1, "WRITES_PER_S": 200}
    for name, value in small.items():
        monkeypatch.setattr(directory, name, value)
    rows = dry_rows(directory, tmp_path, "--donors", "200")
    looked_up = {"directory_lookup_p99_ms", "directory_lookup_under_writes_p99_ms", "directory_events_per_s"}
    assert set(rows) == looked_up | {"placement_added_ms_p50", "placement_added_ms_p99"}
    assert min(row.value for row in rows.values()) > 0


def test_events_are_timed_and_counted_by_the_server(tmp_path, monkeypatch):
    small = {"ROUNDS": 1, "DONORS": 80, "HELD": 16, "WARM_UP": 8}
    # A donor that goes while its coming still waits to be sent would cost no event.
    for name, value in (small | {"SENT_HELD": 512, "MAX_WAITING": 16, "DONORS_AT_ONCE": 16}).items():
        monkeypatch.setattr(events, name, value)
    rows = dry_rows(events, tmp_path, "--seconds", "1", "--tokens", "256")
    assert {"event_cost_p99_us", "publisher_events_per_s", "publisher_events_per_s_msgpack"} < set(rows)
    assert min(row.value for row in rows.values()) > 0
