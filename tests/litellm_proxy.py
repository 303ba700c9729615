"""A real LiteLLM proxy in a process of its own, set up as docs/litellm.yaml, in front of replicas."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import yaml

from tests.pages import ROOT
from tests.server_process import environment, wait_for

# `make litellm-env` makes it beside the environment of the tests.
PROGRAM = Path(sys.prefix.removesuffix("-vllm") + "-litellm") / "bin" / "litellm"
PROGRAM = Path(os.environ.get("LITELLM_PROGRAM", PROGRAM))
# Each key is its team's.
AUTHENTICATION = """
from litellm.proxy._types import UserAPIKeyAuth
async def user_api_key_auth(request, api_key):
    return UserAPIKeyAuth(api_key=api_key, team_id=api_key.removeprefix("sk-"))
"""
VARIABLES = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "DISABLE_ADMIN_UI": "True", "PYTHONPATH": str(ROOT)}


def deployment(name, url, worker_id, tokenizer, group="shipped", **info):
    """An entry of model_list: a replica that calls its model `model`."""
    info |= {"id": name} | ({} if worker_id is None else {"semblend_worker_id": worker_id})
    info |= {} if tokenizer is None else {"semblend_tokenizer": str(tokenizer)}
    parameters = {"model": "hosted_vllm/model", "api_base": f"{url}/v1", "api_key": "key-of-the-replica"}
    return {"model_name": group, "litellm_params": parameters, "model_info": info}


class LiteLlm:
    """A proxy with these deployments; `SEMBLEND_*` variables as keywords."""

    def __init__(self, folder, deployments, router_settings=None, **variables):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.log = f"http://127.0.0.1:{port}", folder / "litellm.log"
        config = yaml.safe_load((ROOT / "docs/litellm.yaml").read_text())
        config["model_list"] = deployments
        config["general_settings"] = {"master_key": "sk-" + "7" * 32, "custom_auth": "auth.user_api_key_auth"}
        config["router_settings"] |= {"cooldown_time": 2} | (router_settings or {})
        (folder / "auth.py").write_text(AUTHENTICATION)
        (folder / "config.yaml").write_text(json.dumps(config))
        arguments = ("--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port), "--telemetry", "False")
        own = environment(**VARIABLES | variables)
        with self.log.open("w") as log:
            self.process = subprocess.Popen([PROGRAM, *arguments], cwd=folder, stdout=log, stderr=log, env=own)
        wait_for(self._lives)

    def _lives(self):
        assert self.process.poll() is None, self.log.read_text()
        try:
            return urllib.request.urlopen(f"{self.url}/health/liveliness", timeout=5).status == 200
        except OSError:
            return False

    def open(self, body, tenant="acme", path="/v1/completions"):
        """The answer to a body, which may be a stream. Raises HTTPError for another status than 200."""
        headers = {"Authorization": f"Bearer sk-{tenant}", "Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, json.dumps(body).encode(), headers)
        return urllib.request.urlopen(request, timeout=120)

    def post(self, body, tenant="acme", path=None):
        """The answer's status, deployment and JSON."""
        path = path or ("/v1/chat/completions" if "messages" in body else "/v1/completions")
        try:
            answer = self.open({"model": "shipped", "max_tokens": 2, "temperature": 0, **body}, tenant, path)
        except urllib.error.HTTPError as error:
            answer = error
        with answer:
            return answer.status, answer.headers.get("x-litellm-model-id"), json.loads(answer.read())

    def ask(self, prompt, **more):
        """The deployment that answered a prompt, and the number of tokens that it reused."""
        status, name, answer = self.post({"prompt": prompt} if isinstance(prompt, str) else prompt, **more)
        assert status == 200, answer
        return name, answer["usage"]["semblend"]["reused_tokens"]

    def metric(self, series):
        request = urllib.request.Request(f"{self.url}/metrics/", headers={"Authorization": "Bearer sk-acme"})
        with urllib.request.urlopen(request, timeout=60) as lines:
            return sum(float(line.split()[-1]) for line in lines if line.startswith(series.encode()))

    def kill(self, number=signal.SIGKILL):
        self.process.send_signal(number)
        return self.process.wait()
