"""No forward has more than `max_num_tokens` rows, whatever plans add to what was scheduled."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine_wrapper.embedded import model_runner as runner_module
from engine_wrapper.embedded.llm import LLM, KvCacheConfig, KvCacheConnectorConfig, SamplingParams
from semblend_trt.reuse_profile import ProfileCheck, ReuseProfile
from tests.engine_wrapper.prompts import DOCUMENT, DONOR, SHIFTED, text

if TYPE_CHECKING:
    from engine_wrapper.embedded.llm import RequestOutput

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True, return_generation_logits=True)
PREFILL = SamplingParams(max_tokens=1, ignore_eos=True)
UNBOUNDED = 4096
ASSETS = Path(str(files("validation"))) / "assets"
CONNECTOR = KvCacheConnectorConfig.ours()


BEHIND_A_HOLE = text(5, 150) + DOCUMENT + text(6, 20)
COLD = text(7, 130)
# A random model's KV deviates by about 1 when its context changes: the highest threshold keeps some of the tokens.
SOME_KEPT = ProfileCheck(layer=1, threshold=1.0)


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every forward so far."""
    counted: list[int] = []

    def count(name: str) -> None:
        own = getattr(runner_module, name)

        def counting(*arguments: Any) -> Any:
            schedule = own(*arguments)
            counted.append(len(schedule.positions))
            return schedule

        monkeypatch.setattr(runner_module, name, counting)

    count("schedule_of")
    count("lowest_schedule")
    return counted


class Serving:
    """Engines over one tiny model; each has served DONOR before it answers."""

    def __init__(self, path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._path, self._profile, self._set = path, folder / "profile.json", monkeypatch.setenv
        self.figures: list[dict[str, Any]] = []

    def __call__(
        self, policy: str, max_num_tokens: int, *prompts: list[int], lose: bool = False, **options: Any
    ) -> list[RequestOutput]:
        """What an engine answers to the prompts at once; `figures` are then what it reports of each."""
        self._set("SEMBLEND_POLICY", policy)
        self._set("SEMBLEND_RECOMPUTE_BOUNDARY_LAYER", "2")
        self._set("SEMBLEND_MIN_REUSE_RATIO", "0.1")
        if policy == "verified":
            self._set("SEMBLEND_PROFILE", str(self._profile))
        with self._engine(max_num_tokens, **options) as llm:
            llm.generate([DONOR], PREFILL)
            llm.settle()
            if lose:
                llm.connector_worker.store.clear()
            outputs = llm.generate(list(prompts), GREEDY)
            llm.settle()
            reports = [llm.connector_scheduler.reuse_of(output.request_id) for output in outputs]
            self.figures = [report.figures | {"outcome": report.outcome, "reason": report.reason} for report in reports]
        return outputs

    def cold(self, *prompts: list[int]) -> list[RequestOutput]:
        with LLM(model=self._path, dtype="float32", kv_cache_config=KvCacheConfig(max_tokens=4096)) as llm:
            return llm.generate(list(prompts), GREEDY)

    def make_profile(self, check: ProfileCheck) -> None:
        """What the policy verified goes by from now on."""
        with self._engine(UNBOUNDED) as llm:
            namespace, geometry = llm.connector_scheduler.namespace, llm.executor.pool.geometry
            ReuseProfile.made_for(namespace, geometry, policy="verified", check=check).write(self._profile)

    def _engine(self, max_num_tokens: int, **options: Any) -> LLM:
        return LLM(
            model=self._path,
            dtype="float32",
            max_num_tokens=max_num_tokens,
            kv_connector_config=CONNECTOR,
            kv_cache_config=KvCacheConfig(tokens_per_block=16, max_tokens=4096, **options.pop("cache", {})),
            **options,
        )


@pytest.fixture
def served(tiny_qwen2_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Serving:
    return Serving(tiny_qwen2_path, tmp_path, monkeypatch)


def assert_same(ours: list[RequestOutput], expected: list[RequestOutput]) -> None:
    for own, other in zip(ours, expected, strict=True):
        assert (own.reused_tokens, own.outputs[0].token_ids) == (other.reused_tokens, other.outputs[0].token_ids)
        logits, other_logits = own.outputs[0].generation_logits, other.outputs[0].generation_logits
        assert torch.allclose(torch.stack(list(logits)), torch.stack(list(other_logits)), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("policy", "prompts", "max_num_tokens"),
    [
        ("position_fix", (BEHIND_A_HOLE,), 64),
        ("boundary", (SHIFTED,), 280),
        ("boundary", (SHIFTED,), 64),
        ("boundary", (SHIFTED, BEHIND_A_HOLE, COLD), 100),
        ("cacheblend", (SHIFTED,), 280),
        ("cacheblend", (SHIFTED, BEHIND_A_HOLE), 400),
        ("cacheblend", (COLD, SHIFTED, BEHIND_A_HOLE), 64),
        ("cacheblend", (SHIFTED + text(8, 150),), 100),
        ("verified", (SHIFTED, BEHIND_A_HOLE), 64),
        ("verified", (BEHIND_A_HOLE, SHIFTED), 220),
        ("epic", (SHIFTED, BEHIND_A_HOLE), 64),
    ],
)
def test_plans_run_in_several_forwards_and_come_out_the_same(
    served: Serving,
    rows: list[int],
    policy: str,
    prompts: tuple[list[int], ...],
    max_num_tokens: int,
) -> None:
    served.make_profile(SOME_KEPT)
    expected = served(policy, UNBOUNDED, *prompts)
    assert max(rows) > max_num_tokens, "nothing has to be divided"
    rows.clear()
    figures = served.figures
    ours = served(policy, max_num_tokens, *prompts)
    assert 0 < max(rows) <= max_num_tokens
    assert all(output.reused_tokens for prompt, output in zip(prompts, ours, strict=True) if prompt is not COLD)
    assert_same(ours, expected)
    assert served.figures == [pytest.approx(each, abs=1e-4) for each in figures]


@pytest.mark.parametrize(
    "options",
    [
        {"contract": "1.1", "disable_overlap_scheduler": False},
        {"contract": "main", "cache": {"use_kv_cache_manager_v2": True}},
        {"contract": "1.3rc", "disable_overlap_scheduler": False, "layer_hooks": False},
        {"max_batch_size": 1},
    ],
    ids=["1.1", "v2", "overlapping", "one by one"],
)
def test_every_kind_of_engine_runs_plans_in_parts(served: Serving, rows: list[int], options: dict[str, Any]) -> None:
    served.make_profile(SOME_KEPT)
    prompts = (SHIFTED, COLD, BEHIND_A_HOLE)
    expected = served("verified", UNBOUNDED, *prompts, **options)
    figures = served.figures
    rows.clear()
    assert_same(served("verified", 64, *prompts, **options), expected)
    assert max(rows) <= 64
    assert served.figures == [pytest.approx(each, abs=1e-4) for each in figures]
    assert 0 < figures[0]["reused_tokens"] < figures[0]["checked_tokens"] == len(DOCUMENT)


def test_a_document_that_deviates_is_answered_as_cold_in_parts(served: Serving, rows: list[int]) -> None:
    served.make_profile(ProfileCheck(layer=1, threshold=0.0))
    prompts = (SHIFTED, BEHIND_A_HOLE)
    expected = served.cold(*prompts)
    rows.clear()
    assert_same(served("verified", 64, *prompts), expected)
    assert max(rows) <= 64
    assert [(each["recomputed_tokens"], each["reason"]) for each in served.figures] == [(200, "deviation")] * 2


def test_a_lost_donor_is_computed_in_several_forwards(served: Serving, rows: list[int]) -> None:
    expected = served("position_fix", UNBOUNDED, SHIFTED, lose=True)
    rows.clear()
    assert_same(served("position_fix", 64, SHIFTED, lose=True), expected)
    assert max(rows) <= 64


def test_a_document_behind_another_instruction_is_answered_as_cold_in_parts(
    rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shipped model, with the profile that was measured for it."""
    page = (ASSETS / "excerpt.txt").read_text()[:1500]
    donor, prompt = f"Who speaks here? {page}", f"Read this page of an old book, and go on with it. {page} And"
    answers, figures = [], []
    monkeypatch.setenv("SEMBLEND_PROFILE", str(ASSETS / "model" / "reuse-profile.json"))
    for enabled, bound in ((0, UNBOUNDED), (1, UNBOUNDED), (1, 100)):
        monkeypatch.setenv("SEMBLEND_ENABLED", str(enabled))
        rows.clear()
        with LLM(
            model=ASSETS / "model",
            dtype="float32",
            device="cpu",
            max_num_tokens=bound,
            kv_connector_config=CONNECTOR,
            kv_cache_config=KvCacheConfig(max_tokens=2048),
        ) as llm:
            llm.generate([donor], PREFILL)
            llm.settle()
            (output,) = llm.generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))
            llm.settle()
            answers.append(output.outputs[0].token_ids)
            figures.append(llm.connector_scheduler.reuse_of(output.request_id).figures)
        assert max(rows) <= bound
    assert answers[1] == answers[2] == answers[0]
    assert figures[2] == pytest.approx(figures[1], abs=1e-4)
    assert figures[2]["reused_tokens"] > 100
