"""Namespaces of donors are told apart, and read as one where they are one."""

import dataclasses

import pytest

from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.known_namespaces import KnownNamespaces
from semblend_trt.namespace import content_value
from tests.semblend_trt.samples import BASE_NAMESPACE, NAMESPACE


@pytest.fixture
def known():
    return KnownNamespaces(max_namespaces=3)


def test_ranks_of_one_donor_are_one_namespace(known):
    values = NAMESPACE.to_dict()
    values["tensor_parallel"] |= {"tp_size": 2, "tp_rank": 0}
    other = NAMESPACE.to_dict()
    other["tensor_parallel"] |= {"tp_size": 2, "tp_rank": 1}
    first, second = known.enter(values), known.enter(other)
    assert first is second
    assert first.donors == 2
    known.leave(first)
    assert known.met_by(None) == [first]
    known.leave(second)
    assert known.met_by(None) == []
    assert known.enter(NAMESPACE.to_dict()) is not first


def test_a_request_meets_its_own_salt_only_and_most_donors_first(known):
    acme = known.enter(BASE_NAMESPACE.for_request("acme", None).to_dict())
    none = known.enter(BASE_NAMESPACE.for_request(None, None).to_dict())
    other = known.enter(dataclasses.replace(BASE_NAMESPACE, model="other").for_request(None, None).to_dict())
    known.enter(dataclasses.replace(BASE_NAMESPACE, model="other").for_request(None, None).to_dict())
    assert known.met_by("acme") == [acme]
    assert known.met_by("Acme") == []
    assert known.met_by(None) == [other, none]


def test_one_model_under_two_names_is_one_namespace(known):
    revisions = {"model_revision": content_value("0f"), "tokenizer_revision": content_value("1f")}
    first, second = (
        known.enter(dataclasses.replace(BASE_NAMESPACE, model=name, **revisions).to_dict()) for name in ("one", "two")
    )
    assert first is second


def test_a_namespace_with_another_tenants_key_is_refused(known):
    for salt, foreign in (("acme", "other"), (None, "acme"), ("acme", None)):
        values = BASE_NAMESPACE.for_request(salt, None).to_dict()
        values["extra"]["tenant_key"] = BASE_NAMESPACE.for_request(foreign, None).extra["tenant_key"]
        with pytest.raises(NamespaceError, match="tenant key"):
            known.enter(values)
    known.enter(BASE_NAMESPACE.for_request("", None).to_dict())


def test_there_is_a_most(known):
    for salt in "abc":
        known.enter(BASE_NAMESPACE.for_request(salt, None).to_dict())
    with pytest.raises(NamespaceError, match="more than 3"):
        known.enter(BASE_NAMESPACE.for_request("d", None).to_dict())
    known.enter(BASE_NAMESPACE.for_request("a", None).to_dict())
