"""Sketches: the hash is SipHash-2-4, shared text is found at any position, and other keys find nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semblend_trt.discovery.fingerprint import fingerprint
from semblend_trt.fleet.sketch import MAX_ENTRIES, MAX_LEVEL, MAX_SKETCH_BYTES, Sketch, keyed, sketch_key, sketch_of
from tests.semblend_trt.fleet.conftest import overlap
from tests.semblend_trt.samples import prompt_fingerprints
from tests.semblend_trt.samples import text as random_tokens

KEY = sketch_key("namespace", "salt")


def test_the_hash_is_siphash():
    low, high = np.frombuffer(bytes(range(16)), dtype="<u8")
    message = np.frombuffer(bytes(range(8)), dtype="<u8").copy()
    assert keyed(message, low, high).tobytes() == bytes.fromhex("6224939a79f5f593")


@given(st.integers(0, 30_000), st.integers(1, MAX_ENTRIES), st.integers(0, 99))
@settings(max_examples=40)
def test_a_sketch_is_the_sample_of_its_level(length, entries, seed):
    tokens = random_tokens(seed, length)
    sketch = sketch_of(tokens, KEY, entries)
    low, high = np.frombuffer(KEY, dtype="<u8")
    values = keyed(fingerprint(tokens).hashes, low, high).tolist()
    assert sketch.anchors == len(values)
    sample = [value & 0xFFFFFFFF for value in values if value >> (64 - sketch.level) == 0]
    assert sketch.entries.tolist() == sample[:entries]
    assert len(sample) <= entries or sketch.level == MAX_LEVEL
    assert not sketch.level or sum(value >> (65 - sketch.level) == 0 for value in values) > entries
    again = Sketch.from_bytes(sketch.to_bytes())
    assert (again.level, again.anchors, again.entries.tolist()) == (sketch.level, sketch.anchors, sample[:entries])
    assert len(sketch.to_bytes()) <= MAX_SKETCH_BYTES


@pytest.mark.promise("fleet", "Sketches of one tenant say nothing...")
@pytest.mark.parametrize("salt", [None, "", "other", "salt ", "salt"])
def test_other_tenants_and_namespaces_see_nothing(salt):
    tokens, other = random_tokens(1, 8000), sketch_key("other" if salt == "salt" else "namespace", salt)
    assert other != KEY
    assert overlap(sketch_of(tokens, KEY), prompt_fingerprints(tokens, other)) == 0.0


def test_bad_sizes_keys_and_tokens_are_refused():
    for entries in (0, MAX_ENTRIES + 1):
        with pytest.raises(ValueError, match="entries"):
            sketch_of(random_tokens(1, 100), KEY, entries)
    with pytest.raises(ValueError, match="16 bytes"):
        sketch_of(random_tokens(1, 100), b"short")
    with pytest.raises(ValueError, match="token ids"):
        prompt_fingerprints([-1] * 40, KEY)


@given(st.binary(max_size=64))
def test_bytes_from_outside_are_checked(data):
    good = sketch_of(random_tokens(1, 400), KEY).to_bytes()
    for candidate in (data, good[:4] + data, good + data[:1] * 5, good[: len(data)]):
        try:
            sketch = Sketch.from_bytes(candidate)
        except ValueError:
            continue
        assert sketch.to_bytes() == candidate
