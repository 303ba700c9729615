"""A fleet as users run it: two `vllm serve`, a NATS server and the router, asked with the openai client."""

import contextlib
import hashlib
import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import openai
import psutil
import pytest

from semblend_trt.cli.main import main
from semblend_trt.fleet.router.config import Tenants, load_config
from tests.engine_wrapper.vllm.conftest import SHORT, TRANSFER
from tests.engine_wrapper.vllm.serve_process import ServeProcess
from tests.semblend_trt.conftest import NatsServer
from tests.server_process import MODEL, prompts, router, wait_for

NAME = "stock-lists"
SECRET = {"ROUTER_SECRET": "a secret of the router"}
OPTIONS = ("--max-model-len", "2048", "--enable-prompt-tokens-details", "--served-model-name", NAME)
CONFIG = f"""
port = 0
show_worker = true
model = "{MODEL}"
name = "{NAME}"
secret_env = "ROUTER_SECRET"
health_seconds = 0.2
"""
GREEDY = {"model": NAME, "max_tokens": 8, "temperature": 0}


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


@dataclass
class Fleet:
    workers: dict[str, VllmServer]
    url: str
    tenants: Tenants

    @property
    def salt(self):
        return self.tenants.caller({"Authorization": "Bearer key of acme"}).salt

    def client(self, tenant, url=None):
        return openai.OpenAI(base_url=f"{url or self.url}/v1", api_key=f"key of {tenant}", max_retries=0, timeout=120)

    def ask(self, prompt, tenant="acme", **fields):
        raw = self.client(tenant).completions.with_raw_response.create(prompt=prompt, **GREEDY, **fields)
        return raw.headers["X-SemBlend-Worker"], *told(raw.parse())

    def holder(self, prompt):
        worker, *_ = self.ask(prompt)
        wait_for(lambda: self.metric("donors", worker))
        return worker

    def metric(self, name, worker):
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as response:
            lines = response.read().decode().splitlines()
        series = f'semblend_router_{name}{{worker="{worker}"}}'
        return sum(float(line.split()[1]) for line in lines if line.startswith(series))


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
        tables = f'{CONFIG}nats_url = "{nats.url}"\n'
        for number in (1, 2):
            workers[f"{number}.0"] = worker = VllmServer(number, nats.url, folder / f"audit-{number}.jsonl")
            tables += f'[[replicas]]\nurl = "{worker.url}"\nworker_id = {number}\n'
        for tenant in ("acme", "globex"):
            digest = hashlib.sha256(f"key of {tenant}".encode()).hexdigest()
            verify = "verify = true\n" * (tenant == "acme")
            tables += f'[[keys]]\nsha256 = "{digest}"\ntenants = ["{tenant}"]\n{verify}'
        config = folder / "router.toml"
        config.write_text(tables)
        # Before any worker answers: the router has to find out when they have come up.
        front = router(config, **SECRET)
        ending.callback(front.kill)
        made = Fleet(workers, front.address(), Tenants(load_config(config), SECRET))
        for name, worker in workers.items():
            worker.address()
            wait_for(lambda name=name: made.metric("replica_healthy", name))
        yield made


def test_documents_that_moved_are_served_where_they_are_held(fleet):
    (first, right), *others = prompts(0)
    assert [model.id for model in fleet.client("acme").models.list()] == [NAME]
    holder, *answered = fleet.ask(first)
    assert answered == [right, 0]
    wait_for(lambda: fleet.metric("donors", holder))
    for prompt, expected in others:
        worker, text, cached = fleet.ask(prompt)
        assert (worker, text) == (holder, expected)
        assert cached > 400
    served = fleet.workers[holder]
    wait_for(lambda: served.audit.read_text().count('"event":"materialized"') == len(others))
    series = ('outcome="backend_materialized_reuse"}', 'semblend_requests_total{outcome="backend_materialized_reuse"}')
    wait_for(lambda: all(f"{each} {len(others)}.0\n" in served.metrics() for each in series))


def test_vllms_answer_carries_the_receipt_and_the_router_puts_it_into_the_usage(fleet):
    prompt, _ = prompts(0)[1]
    holder = fleet.holder(prompt)
    routed = fleet.client("acme").completions.create(prompt=prompt, **GREEDY)
    receipt = routed.usage.semblend
    assert (receipt["policy"], receipt["outcome"]) == ("position_fix", "backend_materialized_reuse")
    assert 400 < receipt["reused_tokens"] <= routed.usage.prompt_tokens_details.cached_tokens
    assert routed.kv_transfer_params is None
    salt = {"extra_body": {"cache_salt": fleet.salt}}
    straight = fleet.client("acme", fleet.workers[holder].url).completions.create(prompt=prompt, **GREEDY, **salt)
    assert straight.kv_transfer_params == {"semblend.receipt": receipt}


def test_an_answer_of_vllm_is_compared_with_a_cold_run(fleet):
    prompt, _ = prompts(0)[1]
    fleet.holder(prompt)
    acme, header = fleet.client("acme"), {"X-SemBlend-Verify": "cold"}
    answer = acme.completions.create(prompt=prompt, **GREEDY, extra_headers=header)
    assert answer.usage.semblend["reused_tokens"] > 400
    assert answer.usage.semblend["verified"] == {"result": "equal", "compared": "tokens"}
    assert not {"token_ids", "prompt_token_ids"} & set(answer.choices[0].model_extra or ())
    sampled = acme.completions.create(prompt=prompt, **GREEDY | {"temperature": 1.0}, extra_headers=header)
    assert sampled.usage.semblend["verified"]["result"] == "not_comparable"
    with pytest.raises(openai.PermissionDeniedError, match="verify"):
        fleet.client("globex").completions.create(prompt=prompt, **GREEDY, extra_headers=header)
    worker = acme.with_options(base_url=f"{fleet.workers[fleet.holder(prompt)].url}/v1")
    asked = {"cache_salt": "new", "kv_transfer_params": {"semblend.cold": True}}
    cold = worker.completions.create(prompt=prompt, **GREEDY, extra_body=asked)
    assert (told(cold)[1], cold.kv_transfer_params["semblend.receipt"]["reason"]) == (0, "cold_run")


def test_a_tenants_salt_reaches_vllm(fleet):
    """The worker itself has the tenant's documents under the salt that the router made, and under no other."""
    prompt, expected = prompts(0)[2]
    holder = fleet.holder(prompt)
    assert fleet.ask(prompt, extra_body={"cache_salt": "guessed"})[0] == holder
    assert fleet.ask(prompt, "globex")[1:] == (expected, 0)
    worker = fleet.client("acme", fleet.workers[holder].url)
    for salt, is_known in ((fleet.salt, True), ("guessed", False), (None, False)):
        answer = worker.completions.create(prompt=prompt, **GREEDY, extra_body={"cache_salt": salt})
        assert (told(answer)[1] > 400) == is_known, salt


def test_documents_that_are_sent_ahead_are_reused_by_the_first_request(fleet, tmp_path):
    (first, _), (second, expected), *_ = prompts(7)
    path, worker = tmp_path / "document.txt", fleet.workers["1.0"]
    path.write_text(first)
    held = worker.audit.read_text().count('"event":"donor_registered"')
    assert main(["warm", "--url", worker.url, str(path)]) == 0
    wait_for(lambda: worker.audit.read_text().count('"event":"donor_registered"') > held)
    text, cached = told(fleet.client("acme", worker.url).completions.create(prompt=second, **GREEDY))
    assert (text, cached > 400) == (expected, True)


def test_a_worker_whose_engine_dies_is_replaced_and_forgotten(fleet):
    """vLLM's server answers what its engine has left with status 500, and ends."""
    prompt, expected = prompts(0)[2]
    holder = fleet.holder(prompt)
    other = next(name for name in fleet.workers if name != holder)
    engine = fleet.workers[holder].engine()
    engine.suspend()  # so that it cannot have answered before it is killed
    with ThreadPoolExecutor(1) as thread:
        asking = thread.submit(fleet.ask, prompt)
        wait_for(lambda: fleet.metric("replica_in_flight", holder))
        engine.kill()
        worker, text, _ = asking.result()
    assert (worker, text) == (other, expected)
    wait_for(lambda: not fleet.metric("donors", holder))
    assert (fleet.metric("replica_healthy", holder), fleet.metric("replica_healthy", other)) == (0, 1)
