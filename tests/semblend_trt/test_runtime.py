"""One runtime an engine, found through its llm_args, gone with it."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from semblend_trt import runtime as runtime_module
from semblend_trt.plan import EngineMode
from semblend_trt.runtime import MAX_NEWS, Runtime, SavedDonor, runtime_for


class LlmArgs:
    """Equal to every other one, as two engines' arguments may well be."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LlmArgs)

    __hash__ = None  # type: ignore[assignment]


class Engine:
    def __init__(self, llm_args: LlmArgs) -> None:
        self.llm_args = llm_args
        self.itself: Any = self


def test_same_arguments_share_a_runtime_and_equal_ones_do_not() -> None:
    first, second = LlmArgs(), LlmArgs()
    assert runtime_for(first) is runtime_for(first)
    assert runtime_for(first) is not runtime_for(second)


def test_fresh_runtime_promises_only_what_a_stock_engine_can() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    assert runtime.mode is EngineMode.STOCK
    assert not runtime.publication_guard
    assert runtime.engine is None
    assert runtime.pool is None
    assert len(runtime.active_plans) == 0


def test_news_that_nobody_reads_do_not_pile_up() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    for number in range(MAX_NEWS + 3):
        runtime.saved.append(SavedDonor(str(number), 1))
        runtime.failed_loads.append(number)
    assert len(runtime.saved) == len(runtime.failed_loads) == runtime.evidence.maxlen == MAX_NEWS
    assert runtime.saved[-1].donor_id == str(MAX_NEWS + 2)


class Scheduler:
    """Reads the news of a runtime, or fails."""

    def __init__(self, runtime: Runtime, *, fails: bool = False) -> None:
        self.runtime, self.fails, self.read = runtime, fails, list[str]()
        self.prepared = 0

    def prepare(self) -> None:
        self.prepared += 1

    def drain(self) -> None:
        if self.fails:
            raise KeyError("news")
        while self.runtime.saved:
            self.read.append(self.runtime.saved.popleft().donor_id)


def test_news_are_read_as_they_come_as_long_as_there_is_a_reader() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    runtime.saved.append(SavedDonor("before", 1))
    runtime.news_came()
    scheduler = Scheduler(runtime)
    runtime.read_by(scheduler.drain)
    runtime.saved.append(SavedDonor("behind", 1))
    runtime.news_came()
    assert scheduler.read == ["before", "behind"]
    del scheduler
    runtime.saved.append(SavedDonor("unread", 1))
    runtime.news_came()
    assert [news.donor_id for news in runtime.saved] == ["unread"]


def test_a_reader_that_fails_is_counted() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    scheduler = Scheduler(runtime, fails=True)
    runtime.read_by(scheduler.drain)
    runtime.saved.append(SavedDonor("unread", 1))
    runtime.news_came()
    assert runtime.faults == {"saved_news": 1}


def test_the_scheduler_prepares_when_the_caches_are_registered() -> None:
    llm_args = LlmArgs()
    runtime = runtime_for(llm_args)
    runtime.caches_registered()  # a rank without a scheduler
    scheduler = Scheduler(runtime)
    runtime.read_by(scheduler.drain, scheduler.prepare)
    runtime.caches_registered()
    assert scheduler.prepared == 1


def test_runtime_ends_with_its_arguments() -> None:
    llm_args = LlmArgs()
    gone = weakref.ref(runtime_for(llm_args).active_plans)
    before = len(runtime_module._runtimes)
    del llm_args
    gc.collect()
    assert gone() is None
    assert len(runtime_module._runtimes) < before


def test_engine_that_holds_its_arguments_does_not_keep_them() -> None:
    llm_args = LlmArgs()
    engine = Engine(llm_args)
    runtime_for(llm_args).engine = engine
    assert runtime_for(llm_args).engine is engine
    gone = weakref.ref(llm_args)
    del llm_args, engine
    gc.collect()
    assert gone() is None


def test_engine_can_be_taken_away() -> None:
    llm_args = LlmArgs()
    engine = Engine(llm_args)
    runtime_for(llm_args).engine = engine
    runtime_for(llm_args).engine = None
    assert runtime_for(llm_args).engine is None


def test_arguments_without_weak_references_are_refused() -> None:
    llm_args = (1, 2)
    with pytest.raises(TypeError):
        runtime_for(llm_args)
    assert id(llm_args) not in runtime_module._runtimes


def test_threads_meet_in_one_runtime() -> None:
    llm_args = LlmArgs()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: runtime_for(llm_args), range(64)))
    assert len({id(runtime) for runtime in found}) == 1
