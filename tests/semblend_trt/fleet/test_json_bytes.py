"""Bytes in JSON are what `json` makes of the list of them."""

from __future__ import annotations

import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from semblend_trt.fleet.json_bytes import as_json_list


@given(st.binary(max_size=4096))
@example(b"")
@example(bytes(range(256)))
@example(b"\xff" * 512)
@example(b"\x00")
@settings(deadline=None)
def test_bytes_are_written_as_json_writes_their_list(data) -> None:
    assert bytes(as_json_list(data)) == json.dumps(list(data), separators=(",", ":")).encode()
