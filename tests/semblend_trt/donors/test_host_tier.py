"""The host tier owns copies, within its budget, and gives back exactly what was saved."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.layout import ContiguousKv
from semblend_trt.donors.store import HostKv, HostMemory, HostTier
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError
from tests.semblend_trt.held_donors import fill, held_kv, save, whole

LAYERS, HEADS, HEAD_DIM = 2, 3, 4
BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD_DIM * 4


def donor_kv(tokens, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, HEADS, tokens, HEAD_DIM, generator=generator).to(dtype)


def tier_of(tokens, is_one_block=False):
    """A tier whose donors lie in one block of memory, as page-locked ones do, or each in its own."""
    size = tokens * BYTES_PER_TOKEN
    return HostTier(size, HostMemory(size, lock=False) if is_one_block else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_gives_back_what_was_saved_from_memory_of_its_own(dtype):
    tier, wide = tier_of(100), donor_kv(20, dtype=dtype)
    save(tier, "a", wide[:, :, :, 3:11])
    expected = wide[:, :, :, 3:11].clone()
    wide.fill_(float("nan"))
    held = held_kv(tier, "a").parts[0].tensor
    assert torch.equal(held, expected)
    assert held.dtype == dtype
    assert held.permute(0, 3, 1, 2, 4).is_contiguous()  # any tokens of a layer are one run
    assert tier.used_bytes == expected.numel() * expected.element_size()


def test_a_donor_that_is_not_saved_to_its_end_is_not_held():
    tier, shape = tier_of(5), donor_kv(5).shape
    with pytest.raises(RuntimeError, match="copy failed"), tier.writing("a", shape, torch.float32):
        raise RuntimeError("copy failed")
    assert tier.used_bytes == 0
    writing = tier.writing("a", shape, torch.float32)
    writing.__enter__()
    assert ("a" in tier, tier.used_bytes) == (False, 5 * BYTES_PER_TOKEN)
    with pytest.raises(DonorUnavailableError, match="a is not in host memory"), tier.reading("a"):
        pass
    assert tier.drop("a")
    with pytest.raises(DonorUnavailableError, match="dropped while it was being saved"):
        writing.__exit__(None, None, None)
    assert ("a" in tier, tier.used_bytes) == (False, 0)
    save(tier, "a", donor_kv(5))


@settings(max_examples=80)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 8)), max_size=30))
def test_the_budget_holds_through_any_saves_and_drops(is_one_block, steps):
    tier, held = tier_of(12, is_one_block), {}
    for number, (donor_id, tokens) in enumerate(steps):
        used = sum(one.shape[3] for one in held.values())
        kv = donor_kv(tokens, seed=number)
        if not tokens:
            assert tier.drop(donor_id) == (donor_id in held)
            held.pop(donor_id, None)
        elif donor_id in held:
            with pytest.raises(ValueError, match="already in host memory"):
                save(tier, donor_id, kv)
        elif used + tokens > 12:
            told = f"needs {tokens * BYTES_PER_TOKEN} bytes; {(12 - used) * BYTES_PER_TOKEN} of"
            with pytest.raises(CapacityError, match=told):
                save(tier, donor_id, kv)
        else:
            save(tier, donor_id, kv)
            held[donor_id] = kv
        assert {each for each in "abcd" if each in tier} == set(held)
        assert tier.used_bytes == sum(one.shape[3] for one in held.values()) * BYTES_PER_TOKEN
    for donor_id, kv in held.items():
        assert torch.equal(whole(held_kv(tier, donor_id)), kv)
    tier.clear()
    assert tier.used_bytes == 0


def test_memory_of_a_dropped_donor_waits_for_its_reader():
    tier, kv = tier_of(5, is_one_block=True), donor_kv(5)
    save(tier, "a", kv)
    with tier.reading("a") as held:
        assert tier.drop("a")
        with pytest.raises(CapacityError):
            save(tier, "b", donor_kv(1, seed=1))
        assert torch.equal(whole(held), kv)
    assert tier.used_bytes == 0
    save(tier, "b", donor_kv(5, seed=1))
    with pytest.raises(DonorUnavailableError, match="a is not in host memory"), tier.reading("a"):
        pass


class Reads:
    """An event that notes whether it was waited for."""

    def __init__(self, has_ended=False):
        self.has_ended = has_ended

    def query(self):
        return self.has_ended

    def synchronize(self):
        self.has_ended = True


class Waits:
    """A stream that notes what it was told to wait for."""

    def __init__(self):
        self.events = []

    def wait_event(self, event):
        self.events.append(event)


def test_nothing_is_written_before_the_reads_that_were_queued_have_ended():
    """A stream that writes waits for them itself; any other writer waits for its stream."""
    tier, stream, shape = tier_of(10, is_one_block=True), Waits(), donor_kv(5).shape
    ended, first, second = Reads(has_ended=True), Reads(), Reads()
    for end in (None, ended, first, second):
        tier.read_until(end)
    with tier.writing("a", shape, torch.float32, stream) as held:
        assert (stream.events, first.has_ended) == ([first, second], False)
        fill(held, donor_kv(5))
    with tier.writing("b", shape, torch.float32) as held:
        assert first.has_ended
        assert second.has_ended
        fill(held, donor_kv(5))
    assert torch.equal(whole(held_kv(tier, "a")), donor_kv(5))


ROW = 48


@given(rows=st.integers(0, 20), steps=st.lists(st.integers(-6, 9), max_size=40))
def test_every_free_row_can_be_had_and_none_twice(rows, steps):
    """A positive step takes so many rows, any other gives back what was taken first."""
    memory, held = HostMemory(rows * ROW, lock=False), []
    for step in steps:
        used = sum(part.size for ranges in held for part in ranges)
        if step <= 0:
            if held:
                memory.give_back(held.pop(0))
        elif step * ROW > rows * ROW - used:
            with pytest.raises(CapacityError, match="raise SEMBLEND_HOST_BYTES"):
                memory.take(step, ROW)
        else:
            held.append(memory.take(step, ROW))
            assert sum(part.size for part in held[-1]) == step * ROW
        bounds = sorted(part for ranges in held for part in ranges)
        assert all(part.start % ROW == part.size % ROW == 0 and 0 <= part.start < part.end for part in bounds)
        assert all(left.end <= right.start for left, right in pairwise(bounds))
        assert sum(hole.size for hole in memory._holes) == rows * ROW - sum(part.size for part in bounds)
    for ranges in held:
        memory.give_back(ranges)
    if rows:
        assert len(memory.take(rows, ROW)) == 1


def test_more_memory_than_there_is_cannot_be_locked():
    with pytest.raises(ConfigurationError, match="lower it"):
        HostMemory(1 << 60, lock=True)


def test_locked_memory_goes_back_with_its_tier(monkeypatch):
    locked = {}
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: locked.update({address: size}) or 0,
        cudaHostUnregister=locked.pop,
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    memory = HostMemory(3 * ROW, lock=True)
    assert list(locked.values()) == [3 * ROW]
    del memory
    assert locked == {}


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_parts_and_the_whole_hold_the_same_tokens(sizes, data):
    expected = torch.randn(2, 2, 1, sum(sizes), 4, generator=torch.Generator().manual_seed(1))
    held = HostKv(tuple(map(ContiguousKv, expected.split(sizes, dim=3))))
    assert held.capacity == expected.shape[3]
    assert torch.equal(whole(held), expected)
    start = data.draw(st.integers(0, held.capacity - 1))
    length = data.draw(st.integers(1, held.capacity - start))
    parts = [part.tensor[:, :, :, first : first + count] for part, first, count in held.parts_of(start, length)]
    assert torch.equal(torch.cat(parts, dim=3), expected[:, :, :, start : start + length])
