"""The API key alone decides who a caller is; a tenant's salt depends on the router's secret and on nothing sent."""

import hashlib

import pytest
from multidict import CIMultiDict

from semblend_trt.fleet.router.config import KeyConfig, ReplicaConfig, RouterConfig
from semblend_trt.fleet.router.serving import RequestRefusedError
from semblend_trt.fleet.router.tenants import Caller, Shares, Tenants
from semblend_trt.namespace import salt_digest

ENVIRONMENT = {"SECRET": "s" * 16, "SHARED": "shared-key"}
REPLICA = ReplicaConfig(url="http://127.0.0.1:1", worker_id=1)


def tenants(environment=ENVIRONMENT, *, with_keys=True):
    keys = [
        KeyConfig(sha256=hashlib.sha256(b"acme-key").hexdigest().upper(), tenants=["acme"]),
        KeyConfig(env="SHARED", tenants=["acme", "globex"]),
    ]
    config = RouterConfig(model="m", secret_env="SECRET", replicas=[REPLICA], keys=keys if with_keys else [])
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
    known = tenants()
    salts = {known.caller(headers("shared-key", tenant)).salt for tenant in ("acme", "globex")}
    salts.add(tenants(ENVIRONMENT | {"SECRET": "t" * 16}).caller(headers("acme-key")).salt)
    assert len(salts) == 3
    assert len({salt_digest(salt or "") for salt in salts}) == 3
    assert known.caller(headers("acme-key")).salt not in repr(known.caller(headers("acme-key")))


@pytest.mark.parametrize(
    ("key", "tenant", "session", "status", "reason"),
    [
        (None, None, None, 401, "unknown_key"),
        ("guess", "acme", None, 401, "unknown_key"),
        ("acme-key", "globex", None, 403, "tenant_forbidden"),
        ("shared-key", "initech", None, 403, "tenant_forbidden"),
        ("shared-key", None, None, 400, "tenant_missing"),
        ("acme-key", None, "s" * 257, 400, "bad_session"),
        ("acme-key", None, "", 400, "bad_session"),
        ("acme-key", None, "\udcff", 400, "bad_session"),
        ("\udcff", None, None, 401, "unknown_key"),
        ("acme-key", "\udcff", None, 403, "tenant_forbidden"),
    ],
)
def test_callers_that_claim_more_are_refused(key, tenant, session, status, reason):
    with pytest.raises(RequestRefusedError) as refused:
        tenants().caller(headers(key, tenant, session))
    assert (refused.value.status, refused.value.reason) == (status, reason)
    assert "guess" not in str(refused.value)


def test_the_scheme_counts():
    with pytest.raises(RequestRefusedError, match="the API key is missing or unknown"):
        tenants().caller(CIMultiDict({"Authorization": "Basic acme-key"}))


def test_without_keys_callers_are_not_distinguished():
    keyless = tenants(with_keys=False)
    assert keyless.caller(headers("whatever", session="s")) == Caller(session="s")
    with pytest.raises(RequestRefusedError, match="this router knows no tenants") as refused:
        keyless.caller(headers(tenant="acme"))
    assert refused.value.reason == "tenant_forbidden"


def test_a_share_is_of_requests_and_of_bytes_and_is_given_back():
    shares = Shares(2, 100)
    with shares.taking("acme", 60):
        with pytest.raises(
            RequestRefusedError, match="60 bytes of requests, and with this one more than the 100 allowed"
        ):
            shares.taking("acme", 41).__enter__()
        with shares.taking("acme", 40), shares.taking("globex", 100):
            with pytest.raises(RequestRefusedError, match="2 requests are under way for this caller") as refused:
                shares.taking("acme", 0).__enter__()
            assert (refused.value.status, refused.value.reason, refused.value.retry_seconds) == (429, "tenant_busy", 1)
    with shares.taking("acme", 100):
        pass
