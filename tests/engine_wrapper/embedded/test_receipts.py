"""Receipts on prompts that are made to break reuse: checked reuse has a cold run's answers, unchecked reuse has not."""

import asyncio

import pytest
from aiohttp.test_utils import TestClient, TestServer

from engine_wrapper.embedded.server import Worker
from semblend_trt.outcome import RECEIPT
from semblend_trt.policy import COLD
from validation import models
from validation.arms import POSITION_FIX, VERIFIED
from validation.cases import Tokeniser, groups
from validation.embedded_engine import EmbeddedEngines, open_llm
from validation.families.catalog import FamilyRequest, write_cases

ANSWER_TOKENS = 8
PROFILE = str(models.shipped_model() / models.PROFILE_NAME)


@pytest.fixture(scope="module")
def runner():
    return models.load(None, "cpu", "float32")


async def post(client, **body):
    async with client.post("/v1/completions", json=body) as answer:
        return await answer.json()


async def receipts(llm, cases, stop_token_ids):
    """Serve the donors of every group, and each prompt with reuse and cold; shut the engine down.

    Return the receipts of the runs with reuse, and whether the cold run has the same answer.
    """
    worker, found = Worker(llm, "model"), []
    asked = {"temperature": 0, "max_tokens": ANSWER_TOKENS, "stop_token_ids": list(stop_token_ids)}
    try:
        async with TestClient(TestServer(worker.app()), raise_for_status=True) as client:
            for group in groups(cases):
                for donor in group[0].donors:
                    await post(client, prompt=donor, max_tokens=1)
                    while llm.executor.pending_transfers:
                        await asyncio.sleep(0)
                for case in group:
                    first = await post(client, prompt=case.prompt, **asked)
                    cold = await post(client, prompt=case.prompt, **asked, kv_transfer_params={COLD: True})
                    found.append((first["usage"][RECEIPT], first["choices"] == cold["choices"]))
    finally:
        worker.close()
    return found


@pytest.mark.parametrize(("policy", "settings"), [(VERIFIED, {"PROFILE": PROFILE}), (POSITION_FIX, {})])
def test_answers_equal_a_cold_runs_where_reuse_is_checked_and_differ_where_it_is_not(runner, policy, settings):
    engines = EmbeddedEngines(runner)
    cases = write_cases(engines, FamilyRequest(("header_trap", "near_duplicates"), 1, 2, 512, 200_000))
    variables = {**settings, "POLICY": policy, "MIN_SPAN": "48"}
    stop_token_ids = Tokeniser(engines, ANSWER_TOKENS).stop_token_ids
    llm = open_llm(models.shipped_model(), runner.share(), variables)
    found = asyncio.run(asyncio.wait_for(receipts(llm, cases, stop_token_ids), 120))
    assert any(receipt["reused_tokens"] for receipt, _ in found)
    equal = [is_equal for _, is_equal in found]
    assert all(equal) if policy == VERIFIED else sum(equal) <= len(equal) / 2
