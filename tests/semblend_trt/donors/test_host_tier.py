"""The host tier owns copies, within its budget, and gives back exactly what was saved."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.layout import ContiguousKv
from semblend_trt.donors.host_tier import HostKv, HostMemory, HostTier
from semblend_trt.errors import CapacityError, ConfigurationError, DonorUnavailableError
from tests.semblend_trt.held_donors import fill, held_kv, save

LAYERS, HEADS, HEAD_DIM = 2, 3, 4
BYTES_PER_TOKEN = LAYERS * 2 * HEADS * HEAD_DIM * 4


def donor_kv(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, 2, HEADS, tokens, HEAD_DIM, generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gives_back_what_was_saved(dtype: torch.dtype) -> None:
    tier = HostTier(1 << 20, pin=False)
    kv = donor_kv(9, dtype=dtype)
    save(tier, "a", kv)
    held = held_kv(tier, "a").tensor
    assert torch.equal(held, kv)
    assert held.dtype == dtype
    assert held.permute(0, 3, 1, 2, 4).is_contiguous()  # any tokens of a layer are one run
    assert tier.used_bytes == kv.numel() * kv.element_size()
    assert "a" in tier


def test_owns_its_memory() -> None:
    tier = HostTier(1 << 20, pin=False)
    kv = donor_kv(9)
    expected = kv.clone()
    save(tier, "a", kv)
    kv.fill_(float("nan"))
    assert torch.equal(held_kv(tier, "a").tensor, expected)


def test_a_strided_view_is_held_contiguous() -> None:
    tier = HostTier(1 << 20, pin=False)
    wide = donor_kv(20)
    save(tier, "a", wide[:, :, :, 3:11])
    assert torch.equal(held_kv(tier, "a").tensor, wide[:, :, :, 3:11])
    assert held_kv(tier, "a").tensor.permute(0, 3, 1, 2, 4).is_contiguous()
    assert tier.used_bytes == 8 * BYTES_PER_TOKEN


def test_refuses_above_its_budget_and_keeps_nothing() -> None:
    tier = HostTier(10 * BYTES_PER_TOKEN, pin=False)
    save(tier, "a", donor_kv(6))
    with pytest.raises(CapacityError, match=f"needs {5 * BYTES_PER_TOKEN} bytes; {4 * BYTES_PER_TOKEN} of"):
        save(tier, "b", donor_kv(5))
    assert "b" not in tier
    save(tier, "c", donor_kv(4))
    assert tier.used_bytes == tier.byte_budget
    assert tier.drop("a")
    save(tier, "b", donor_kv(5))


def test_dropped_donors_are_gone_but_what_a_reader_holds_stays() -> None:
    tier = HostTier(1 << 20, pin=False)
    kv = donor_kv(5)
    save(tier, "a", kv)
    reader = held_kv(tier, "a")
    assert tier.drop("a")
    assert not tier.drop("a")
    with pytest.raises(DonorUnavailableError, match="a is not in host memory"):
        held_kv(tier, "a")
    save(tier, "b", donor_kv(5, seed=1))
    assert torch.equal(reader.tensor, kv)


def test_clear_frees_everything() -> None:
    tier = HostTier(1 << 20, pin=False)
    save(tier, "a", donor_kv(5))
    tier.clear()
    assert (tier.used_bytes, "a" in tier) == (0, False)


def test_refuses_an_id_that_is_taken() -> None:
    tier = HostTier(1 << 20, pin=False)
    kv = donor_kv(5)
    save(tier, "a", kv)
    with pytest.raises(ValueError, match="already in host memory"):
        save(tier, "a", donor_kv(5, seed=1))
    assert torch.equal(held_kv(tier, "a").tensor, kv)


def test_a_copy_that_fails_gives_its_room_back() -> None:
    tier = HostTier(1 << 20, pin=False)
    # A tensor on the meta device has a shape and no data, so that the copy itself raises.
    with pytest.raises((RuntimeError, NotImplementedError)):
        save(tier, "a", torch.empty(LAYERS, 2, HEADS, 5, HEAD_DIM, device="meta"))
    assert tier.used_bytes == 0
    save(tier, "a", donor_kv(5))


def test_a_donor_dropped_while_it_is_saved_is_not_held() -> None:
    tier = HostTier(1 << 20, pin=False)

    class DroppedMeanwhile(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.Tensor.copy_:
                assert "a" not in tier
                assert tier.used_bytes == 5 * BYTES_PER_TOKEN
                assert tier.drop("a")
            return super().__torch_function__(func, types, args, kwargs or {})

    with pytest.raises(DonorUnavailableError, match="dropped while it was being saved"):
        save(tier, "a", donor_kv(5).as_subclass(DroppedMeanwhile))
    assert tier.used_bytes == 0
    assert "a" not in tier


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_pinned_memory_holds_what_the_device_had() -> None:
    tier = HostTier(1 << 20, pin=True)
    kv = donor_kv(9).cuda()
    save(tier, "a", kv)
    held = held_kv(tier, "a").tensor
    assert held.is_pinned()
    assert torch.equal(held, kv.cpu())


def one_block(tokens: int) -> HostTier:
    """A tier whose donors lie in one block of memory, as page-locked ones do."""
    size = tokens * BYTES_PER_TOKEN
    return HostTier(size, pin=False, memory=HostMemory(size, lock=False))


@settings(max_examples=80)
@given(st.booleans(), st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 8)), max_size=30))
def test_the_budget_holds_through_any_saves_and_drops(is_one_block: bool, steps: list[tuple[str, int]]) -> None:
    tier = one_block(12) if is_one_block else HostTier(12 * BYTES_PER_TOKEN, pin=False)
    held = dict[str, torch.Tensor]()
    for number, (donor_id, tokens) in enumerate(steps):
        if not tokens:
            assert tier.drop(donor_id) == (donor_id in held)
            held.pop(donor_id, None)
            continue
        kv = donor_kv(tokens, seed=number)
        if donor_id in held:
            with pytest.raises(ValueError, match="already"):
                save(tier, donor_id, kv)
        elif sum(one.shape[3] for one in held.values()) + tokens > 12:
            with pytest.raises(CapacityError):
                save(tier, donor_id, kv)
        else:
            save(tier, donor_id, kv)
            held[donor_id] = kv
        assert tier.used_bytes == sum(one.shape[3] for one in held.values()) * BYTES_PER_TOKEN <= tier.byte_budget
    for donor_id, kv in held.items():
        assert torch.equal(held_kv(tier, donor_id).tensor, kv)


def test_scattered_room_holds_a_donor_in_parts() -> None:
    tier = one_block(12)
    for number, donor_id in enumerate("abcd"):
        save(tier, donor_id, donor_kv(3, seed=number))
    assert tier.drop("a")
    assert tier.drop("c")
    save(tier, "wide", donor_kv(6, seed=9))
    held = held_kv(tier, "wide")
    assert [part.capacity for part in held.parts] == [3, 3]
    assert torch.equal(held.tensor, donor_kv(6, seed=9))
    assert all(part.tensor.permute(0, 3, 1, 2, 4).is_contiguous() for part in held.parts)
    assert torch.equal(held_kv(tier, "b").tensor, donor_kv(3, seed=1))
    assert tier.used_bytes == tier.byte_budget


def test_memory_of_a_dropped_donor_waits_for_its_reader() -> None:
    tier, kv = one_block(5), donor_kv(5)
    save(tier, "a", kv)
    with tier.reading("a") as held:
        assert tier.drop("a")
        with pytest.raises(CapacityError):
            save(tier, "b", donor_kv(1, seed=1))
        assert torch.equal(held.tensor, kv)
    assert tier.used_bytes == 0
    save(tier, "b", donor_kv(5, seed=1))
    with pytest.raises(DonorUnavailableError, match="a is not in host memory"), tier.reading("a"):
        pass


class Reads:
    """An event that notes whether somebody waited for it."""

    def __init__(self) -> None:
        self.has_ended = False

    def query(self) -> bool:
        return self.has_ended

    def synchronize(self) -> None:
        self.has_ended = True


def test_nothing_is_written_before_the_reads_that_were_queued_have_ended() -> None:
    tier, first, second = one_block(5), Reads(), Reads()
    tier.read_until(None)
    tier.read_until(first)  # type: ignore[arg-type]
    tier.read_until(second)  # type: ignore[arg-type]
    with tier.writing("a", (LAYERS, 2, HEADS, 5, HEAD_DIM), torch.float32) as held:
        assert first.has_ended
        assert second.has_ended
        fill(held, donor_kv(5))
    assert torch.equal(held_kv(tier, "a").tensor, donor_kv(5))


class Waits:
    """A stream that notes what it was told to wait for."""

    def __init__(self) -> None:
        self.events: list[object] = []

    def wait_event(self, event: object) -> None:
        self.events.append(event)


def test_a_stream_that_writes_waits_for_the_queued_reads_itself_and_others_still_do() -> None:
    tier, ended, queued, stream = one_block(10), Reads(), Reads(), Waits()
    ended.synchronize()
    tier.read_until(ended)  # type: ignore[arg-type]
    tier.read_until(queued)  # type: ignore[arg-type]
    shape = (LAYERS, 2, HEADS, 5, HEAD_DIM)
    with tier.writing("a", shape, torch.float32, stream) as held:  # type: ignore[arg-type]
        assert stream.events == [queued]
        assert not queued.has_ended
        fill(held, donor_kv(5))
    with tier.writing("b", shape, torch.float32) as held:
        assert queued.has_ended
        fill(held, donor_kv(5))


def test_threads_see_whole_donors_only() -> None:
    tier = HostTier(64 * BYTES_PER_TOKEN, pin=False)
    expected = donor_kv(8, seed=3)
    failures: list[object] = []
    stop = threading.Event()

    def read() -> None:
        try:
            while not stop.is_set():
                try:
                    kv = held_kv(tier, "passing").tensor
                except DonorUnavailableError:
                    continue
                if not torch.equal(kv, expected):
                    failures.append("a reader saw other bytes")
        except Exception as error:
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(100):
        save(tier, "passing", expected)
        tier.drop("passing")
    stop.set()
    for reader in readers:
        reader.join()
    assert failures == []
    assert tier.used_bytes == 0


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


def test_the_smallest_hole_that_fits_is_taken_first():
    memory = HostMemory(10 * ROW, lock=False)
    ranges = [memory.take(rows, ROW) for rows in (4, 1, 2, 1, 2)]
    memory.give_back(ranges[0])
    memory.give_back(ranges[2])
    assert memory.take(2, ROW) == ranges[2]
    assert memory.take(3, ROW) == [(0, 3 * ROW)]


def test_views_show_the_bytes_of_their_range():
    memory = HostMemory(4 * ROW, lock=False)
    (first,), (second,) = memory.take(1, ROW), memory.take(3, ROW)
    memory.view(second, (3, 6, 2), torch.float32).fill_(7)
    memory.view(first, (24,), torch.bfloat16).fill_(1)
    assert memory.view(second, (36,), torch.float32).eq(7).all()


def test_more_memory_than_there_is_cannot_be_locked():
    with pytest.raises(ConfigurationError, match="lower it"):
        HostMemory(1 << 60, lock=True)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_pieces_and_the_whole_hold_the_same_tokens(sizes, data):
    whole = torch.randn(2, 2, 1, sum(sizes), 4, generator=torch.Generator().manual_seed(1))
    held = HostKv(tuple(map(ContiguousKv, whole.split(sizes, dim=3))))
    assert held.capacity == whole.shape[3]
    assert torch.equal(held.tensor, whole)
    start = data.draw(st.integers(0, held.capacity - 1))
    length = data.draw(st.integers(1, held.capacity - start))
    pieces = [part.tensor[:, :, :, first : first + count] for part, first, count in held.parts_of(start, length)]
    assert torch.equal(torch.cat(pieces, dim=3), whole[:, :, :, start : start + length])


def test_a_single_part_is_not_copied():
    tensor = torch.zeros(2, 2, 1, 3, 4)
    assert HostKv((ContiguousKv(tensor),)).tensor is tensor
