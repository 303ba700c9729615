"""The router's configuration: the documented example, defaults, one sentence for each mistake; and its callers."""

import hashlib
import re
from pathlib import Path

import pytest
import tomllib
from multidict import CIMultiDict

from semblend_trt.cold_runs import VERIFY_HEADER
from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.directory import Holder
from semblend_trt.fleet.router.config import (
    Caller,
    KeyConfig,
    RouterConfig,
    Shares,
    StatusConfig,
    TelemetryConfig,
    Tenants,
    load_config,
)
from semblend_trt.fleet.router.serving import RequestRefusedError
from semblend_trt.fleet.routing_policy import Replica, RoutingRequest
from semblend_trt.namespace import salt_digest

EXAMPLE = Path(__file__).resolve().parents[4] / "docs" / "router.toml"
LEAST = 'model = "m"\n[[replicas]]\nurl = "http://127.0.0.1:1"\nworker_id = 1\n'
SECRET = "0123456789abcdef"
HOLDER, IDLE = (1, 0), (2, 0)


def loaded(tmp_path, text):
    path = tmp_path / "router.toml"
    path.write_text(text)
    return load_config(path)


def with_comments_taken(text):
    """The example with the tables and fields that it only mentions."""
    lines = []
    for line in text.splitlines():
        code = line.removeprefix("# ")
        lines.append(code if code.startswith("[") or code.split(" = ")[0].isidentifier() else line)
    return tomllib.loads("\n".join(lines))


def test_the_example_holds_the_defaults():
    config = load_config(EXAMPLE)
    assert [replica.worker_id for replica in config.replicas] == [1, 2]
    own = {"model", "nats_url", "nats_subject", "replicas"}
    for name, value in tomllib.loads(EXAMPLE.read_text()).items():
        if name not in own:
            assert (name, value) == (name, RouterConfig.model_fields[name].default)
    assert config.keys == []
    assert config.telemetry is None


def test_the_example_names_every_field():
    values = with_comments_taken(EXAMPLE.read_text())
    assert set(values) == set(RouterConfig.model_fields)
    config = RouterConfig.model_validate(values)
    assert {name for key in values["keys"] for name in key} == set(KeyConfig.model_fields)
    assert set(values["telemetry"]) == set(TelemetryConfig.model_fields)
    assert config.telemetry == TelemetryConfig(path=Path("requests.jsonl"))
    assert config.status == StatusConfig(host="127.0.0.1", port=9464, env="STATUS_KEY")
    assert config.keys[0].digest({}) == hashlib.sha256(b"test").hexdigest()
    assert config.keys[1].digest({"SUPPORT_KEY": "k"}) == hashlib.sha256(b"k").hexdigest()
    assert config.secret({"ROUTER_SECRET": SECRET}) == SECRET.encode()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("model = 'm'", "replicas: this field is missing"),
        ("[[replicas]]\nurl = 'http://a'\nworker_id = 1", "model: this field is missing"),
        ("model = ", "router.toml is not TOML: Invalid value"),
        ("color = 1\n" + LEAST, "color: there is no such field"),
        ("policy = 'best'\n" + LEAST, "policy: use one of round_robin, least_loaded, exact_prefix, span_overlap"),
        ("load_weight = 0\n" + LEAST, "load_weight: Input should be greater than 0 (given: 0)"),
        ("load_weight = 1001\n" + LEAST, "load_weight: Input should be less than or equal to 1000 (given: 1001)"),
        ("load_weight = nan\n" + LEAST, "load_weight: Input should be a finite number"),
        ("port = 70000\n" + LEAST, "port: Input should be less than or equal to 65535 (given: 70000)"),
        (LEAST.replace("http:", "ftp:"), "replicas.0.url: give an address that begins with http:// or https://"),
        (LEAST + LEAST[len('model = "m"\n') :], "two replicas have worker_id 1 and dp_rank 0; give each its own"),
        (LEAST + "[telemetry]\npath = 'a'", "keys and telemetry need secret_env"),
        (LEAST + "[[keys]]\ntenants = ['a']", "keys.0: give either sha256 or env"),
        (LEAST + "[[keys]]\nenv = 'K'\nsha256 = 'x'\ntenants = ['a']", "keys.0.sha256: String should match pattern"),
        (LEAST + "[[keys]]\nenv = 'K'\ntenants = ['a b']", "keys.0.tenants.0: String should match pattern"),
        (LEAST + "[[keys]]\nenv = 'K'\ntenants = []", "keys.0.tenants: List should have at least 1 item"),
        ("first_byte_seconds = 0\n" + LEAST, "first_byte_seconds: Input should be greater than or equal to 0.01"),
        ("show_worker = 'often'\n" + LEAST, "show_worker: Input should be a valid boolean"),
        ("max_connections = 0\n" + LEAST, "max_connections: Input should be greater than or equal to 1 (given: 0)"),
        ("max_prompt_tokens = 0\n" + LEAST, "max_prompt_tokens: Input should be greater than or equal to 1"),
        ("tenant_bytes = 4096\n" + LEAST, "tenant_bytes is 4096, and one body may have 2097152 bytes; give as many"),
        (LEAST + "[status]", "status: give host and port, or a key, or leave the table out"),
        (LEAST + "[status]\nport = 1", "status: give host and port, or neither of them"),
        (LEAST + "[status]\nenv = 'K'\nsha256 = '" + "a" * 64 + "'", "status: give either sha256 or env"),
        ("attempts = 0\nhealth_seconds = 0\n" + LEAST, "(1 more fields are wrong)"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path, text, problem):
    with pytest.raises(ConfigurationError, match=re.escape(problem)) as refused:
        loaded(tmp_path, text)
    assert "\n" not in str(refused.value)
    assert "router.toml" in str(refused.value)


@pytest.mark.parametrize(("text", "chosen"), [("", IDLE), ("load_weight = 0.5\n", HOLDER)])
def test_the_load_weight_decides_between_a_queue_and_its_text(tmp_path, text, chosen):
    """A replica holds 300 tokens of the prompt and has 400 to compute, the other neither."""
    policy = loaded(tmp_path, text + LEAST).routing_policy()
    request = RoutingRequest([1] * 500, holders=(Holder(HOLDER, tokens=300),))
    assert policy.choose(request, [Replica(HOLDER, 400.0), Replica(IDLE, 0.0)]).worker == chosen


@pytest.mark.parametrize(
    ("field", "text"),
    [
        ("nats_url", 'nats_url = "' + 1000 * "hidden" + '"\n' + LEAST),
        ("replicas.0.url", LEAST.replace("http://", "ftp://user:hidden@")),
        *((f"keys.0.{each}", f"{LEAST}[[keys]]\n{each} = 'sk-hidden'\ntenants = ['a']") for each in ("sha256", "env")),
        ("secret_env", "secret_env = '0-hidden'\n" + LEAST),
    ],
)
def test_what_may_be_a_secret_is_not_repeated(tmp_path, field, text):
    with pytest.raises(ConfigurationError, match=f"router.toml: {field}: ") as refused:
        loaded(tmp_path, text)
    assert "hidden" not in str(refused.value)


def test_a_servers_password_is_not_shown(tmp_path):
    assert "hidden" not in repr(loaded(tmp_path, 'nats_url = "nats://u:hidden@a"\n' + LEAST))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match="nothing cannot be read: No such file or directory"):
        load_config(tmp_path / "nothing")
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigurationError, match="large has more than 1048576 bytes"):
        load_config(tmp_path / "large")


@pytest.mark.parametrize(
    ("environment", "problem"),
    [
        ({}, "the configuration names the variable S, which is not set; set it"),
        ({"S": "short"}, "the secret in S has 5 bytes; give at least 16"),
    ],
)
def test_a_secret_has_to_be_there(tmp_path, environment, problem):
    config = loaded(tmp_path, 'secret_env = "S"\n' + LEAST)
    with pytest.raises(ConfigurationError, match=problem):
        config.secret(environment)


ENVIRONMENT = {"SECRET": "s" * 16, "SHARED": "shared-key"}


def tenants(environment=ENVIRONMENT, *, with_keys=True):
    keys = [
        KeyConfig(sha256=hashlib.sha256(b"acme-key").hexdigest().upper(), tenants=["acme"]),
        KeyConfig(env="SHARED", tenants=["acme", "globex"]),
    ]
    replicas = [{"url": "http://127.0.0.1:1", "worker_id": 1}]
    config = RouterConfig(model="m", secret_env="SECRET", replicas=replicas, keys=keys if with_keys else [])
    return Tenants(config, environment)


def headers(key=None, tenant=None, session=None):
    given = {"Authorization": None if key is None else f"Bearer {key}", "x-tenant-id": tenant, "x-session-id": session}
    return CIMultiDict({name: value for name, value in given.items() if value is not None})


def test_a_key_of_one_tenant_speaks_for_it():
    known = tenants()
    caller = known.caller(headers("acme-key", session="s1"))
    assert (caller.tenant, caller.session) == ("acme", "s1")
    assert known.caller(headers("acme-key", "acme", "s1")) == caller
    assert known.caller(headers("shared-key", "acme", "s1")) == caller


def test_salts_differ_by_tenant_and_by_secret_and_can_be_salts():
    callers = [tenants().caller(headers("shared-key", tenant)) for tenant in ("acme", "globex")]
    callers.append(tenants(ENVIRONMENT | {"SECRET": "t" * 16}).caller(headers("acme-key")))
    assert len({salt_digest(caller.salt) for caller in callers}) == 3
    assert callers[0].salt not in repr(callers[0])


@pytest.mark.parametrize(
    ("key", "tenant", "session", "status", "reason"),
    [
        *((key, "acme", None, 401, "unknown_key") for key in (None, "guess", "\udcff")),
        *(("acme-key", tenant, None, 403, "tenant_forbidden") for tenant in ("globex", "\udcff")),
        ("shared-key", "initech", None, 403, "tenant_forbidden"),
        ("shared-key", None, None, 400, "tenant_missing"),
        *(("acme-key", None, session, 400, "bad_session") for session in ("s" * 257, "", "\udcff")),
    ],
)
def test_callers_that_claim_more_are_refused(key, tenant, session, status, reason):
    with pytest.raises(RequestRefusedError) as refused:
        tenants().caller(headers(key, tenant, session))
    assert (refused.value.status, refused.value.reason) == (status, reason)
    assert "guess" not in str(refused.value)


def test_without_keys_callers_are_not_distinguished():
    keyless = tenants(with_keys=False)
    assert keyless.caller(headers("whatever", session="s")) == Caller(session="s")
    with pytest.raises(RequestRefusedError, match="missing or unknown"):
        tenants().caller(CIMultiDict({"Authorization": "Basic acme-key"}))
    refusals = {("x-tenant-id", "acme"): "this router knows no tenants", (VERIFY_HEADER, "cold"): "a second run"}
    for given, words in refusals.items():
        with pytest.raises(RequestRefusedError, match=words) as refused:
            keyless.caller(CIMultiDict([given]))
        assert refused.value.status == 403


def test_a_share_is_of_requests_and_of_bytes_and_is_given_back():
    shares = Shares(2, 100)
    with shares.taking("acme", 60):
        told = "60 bytes of requests, and with this one more than the 100 allowed"
        with pytest.raises(RequestRefusedError, match=told):
            shares.taking("acme", 41).__enter__()
        with shares.taking("acme", 40), shares.taking("globex", 100):
            with pytest.raises(RequestRefusedError, match="2 requests are under way for this caller") as refused:
                shares.taking("acme", 0).__enter__()
            assert (refused.value.status, refused.value.reason, refused.value.retry_seconds) == (429, "tenant_busy", 1)
    with shares.taking("acme", 100):
        pass
