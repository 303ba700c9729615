"""A fleet as users run it: two `vllm serve`, a NATS server and LiteLLM's proxy, asked with the openai client."""

import contextlib
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai
import psutil
import pytest

from semblend_trt.cli.main import main
from tests.builders.vllm import SHORT, TRANSFER
from tests.engine_wrapper.vllm.serve_process import ServeProcess
from tests.litellm_proxy import LiteLlm, deployment
from tests.semblend_trt.conftest import NatsServer
from tests.server_process import MODEL, prompts, wait_for

pytestmark = pytest.mark.litellm

NAME = "model"
OPTIONS = ("--max-model-len", "2048", "--enable-prompt-tokens-details", "--served-model-name", NAME)
GREEDY = {"max_tokens": 8, "temperature": 0}
SECRET = {"SEMBLEND_TENANT_SECRET": "a secret of the gateway's own"}


class VllmServer(ServeProcess):
    def __init__(self, number, nats, audit):
        self.audit = audit
        settings = {"worker_id": number, "nats_url": nats, "heartbeat_seconds": 0.5, "audit_path": str(audit)}
        transfer = {**TRANSFER, "kv_connector_extra_config": {**SHORT, "policy": "position_fix", **settings}}
        shared = audit.with_suffix(".metrics")
        shared.mkdir()
        options = (*OPTIONS, "--kv-transfer-config", json.dumps(transfer))
        super().__init__(*options, PROMETHEUS_MULTIPROC_DIR=str(shared))

    def engine(self):
        return next(each for each in psutil.Process(self.pid).children() if "EngineCore" in "".join(each.cmdline()))

    def metrics(self):
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            return response.read().decode()

    def donors(self):
        return self.audit.read_text().count('"event":"donor_registered"')

    @property
    def client(self):
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)


@dataclass
class Fleet:
    workers: dict[str, VllmServer]
    proxy: LiteLlm

    def client(self, tenant="acme"):
        return openai.OpenAI(base_url=f"{self.proxy.url}/v1", api_key=f"sk-{tenant}", max_retries=0, timeout=120)

    def ask(self, prompt, tenant="acme", **fields):
        completions = self.client(tenant).completions.with_raw_response
        raw = completions.create(model="shipped", prompt=prompt, **GREEDY, **fields)
        return raw.headers["x-litellm-model-id"], *told(raw.parse())

    def holder(self, prompt):
        """The worker that answers a prompt, once the proxy knows that it has it."""
        before = self.donors()
        name, _, cached = self.ask(prompt)
        wait_for(lambda: cached or self.donors() > before)
        return name

    def donors(self):
        return self.proxy.metric("semblend_fleet_donors")


def told(answer):
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].text.strip(), (details and details.cached_tokens) or 0


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    with contextlib.ExitStack() as ending:
        nats = NatsServer(folder / "nats")
        ending.callback(nats.kill)
        nats.start()
        workers = {}
        ending.callback(lambda: [worker.kill() for worker in workers.values()])
        for number, name in enumerate(("one", "two"), 1):
            workers[name] = VllmServer(number, nats.url, folder / f"audit-{number}.jsonl")
        listed = [deployment(name, worker.url, at, MODEL) for at, (name, worker) in enumerate(workers.items(), 1)]
        proxy = LiteLlm(folder, listed, {"timeout": 60}, SEMBLEND_NATS_URL=nats.url, **SECRET)
        ending.callback(proxy.kill)
        for worker in workers.values():
            worker.address()
        made = Fleet(workers, proxy)
        made.holder("A first prompt of its own, so that the proxy has loaded its tokenizer and knows of a donor. " * 8)
        yield made


@pytest.mark.promise("fleet", "A gateway sends a request where...")
def test_documents_that_moved_are_served_where_they_are_held(fleet):
    (first, right), *others = prompts(0)
    assert [model.id for model in fleet.client().models.list()] == ["shipped"]
    before = fleet.donors()
    holder, *answered = fleet.ask(first)
    assert answered == [right, 0]
    wait_for(lambda: fleet.donors() > before)
    for prompt, expected in others:
        worker, text, cached = fleet.ask(prompt)
        assert (worker, text) == (holder, expected)
        assert cached > 400
    served = fleet.workers[holder]
    wait_for(lambda: served.audit.read_text().count('"event":"materialized"') == len(others))
    series = ('outcome="backend_materialized_reuse"}', 'semblend_requests_total{outcome="backend_materialized_reuse"}')
    wait_for(lambda: all(f"{each} {len(others)}.0\n" in served.metrics() for each in series))


@pytest.mark.promise("commands", "Every answer has a receipt, in...")
def test_vllms_answer_carries_the_receipt_through_the_proxy(fleet):
    prompt, _ = prompts(0)[1]
    fleet.holder(prompt)
    routed = fleet.client().completions.create(model="shipped", prompt=prompt, **GREEDY)
    receipt = routed.kv_transfer_params["semblend.receipt"]
    assert (receipt["policy"], receipt["outcome"]) == ("position_fix", "backend_materialized_reuse")
    assert 400 < receipt["reused_tokens"] <= routed.usage.prompt_tokens_details.cached_tokens


@pytest.mark.promise("commands", "`semblend-trt spot-check` says of a sample...")
def test_answers_of_vllm_are_compared_with_cold_runs(fleet, tmp_path, capsys):
    """Through the proxy, under the salt of the tenant, and straight."""
    (first, _), (second, _), *_ = prompts(0)
    holder, log = fleet.holder(first), tmp_path / "requests.jsonl"
    log.write_text(json.dumps({"model": "shipped", "prompt": second, **GREEDY}) + "\n")
    words = ["spot-check", "--url", fleet.proxy.url, "--api-key", "sk-acme", "--share", "1", str(log)]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["cold_runs"] == {"equal": 1}
    asked = {"cache_salt": "new", "kv_transfer_params": {"semblend.cold": True}}
    through = fleet.client().completions.create(model="shipped", prompt=first, **GREEDY, extra_body=asked)
    straight = fleet.workers[holder].client.completions.create(model=NAME, prompt=first, **GREEDY, extra_body=asked)
    for cold in (through, straight):
        assert (told(cold)[1], cold.kv_transfer_params["semblend.receipt"]["reason"]) == (0, "cold_run")


@pytest.mark.promise("fleet", "LiteLLM's callback makes each tenant's salt...")
def test_a_tenants_salt_reaches_vllm(fleet):
    """The worker itself has the tenant's documents under the salt that the proxy made, and under no other."""
    prompt, expected = prompts(0)[2]
    holder = fleet.holder(prompt)
    assert fleet.ask(prompt, extra_body={"cache_salt": "guessed"})[0] == holder
    assert fleet.ask(prompt, "globex")[1:] == (expected, 0)
    for salt in ("guessed", None):
        asked = {"cache_salt": salt}
        answer = fleet.workers[holder].client.completions.create(model=NAME, prompt=prompt, **GREEDY, extra_body=asked)
        assert told(answer)[1] < 400, salt


@pytest.mark.promise("fleet", "A dead or frozen worker is...")
def test_a_worker_whose_engine_dies_is_replaced_and_forgotten(fleet):
    """vLLM's server answers what its engine has left with status 500, and ends."""
    prompt, expected = prompts(0)[2]
    holder = fleet.holder(prompt)
    other = next(name for name in fleet.workers if name != holder)
    engine = fleet.workers[holder].engine()
    engine.suspend()  # so that it cannot have answered before it is killed
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(fleet.ask, prompt)
        wait_for(lambda: "vllm:num_requests_running" in fleet.workers[holder].metrics())
        engine.kill()
        worker, text, _ = asking.result()
    assert (worker, text) == (other, expected)
    number = [*fleet.workers].index(holder) + 1
    wait_for(lambda: not fleet.proxy.metric(f'semblend_fleet_donors{{worker="{number}.0"}}'))
