"""Known namespaces: numbered once, told apart by salt and model, forgotten with their last donor."""

from __future__ import annotations

import dataclasses

import pytest

from semblend_trt.errors import NamespaceError
from semblend_trt.fleet.known_namespaces import KnownNamespaces
from semblend_trt.namespace import content_value


@pytest.fixture
def known():
    return KnownNamespaces(max_namespaces=3)


def test_ranks_of_one_donor_are_one_namespace(known, namespace) -> None:
    values = namespace.to_dict()
    values["tensor_parallel"] |= {"tp_size": 2, "tp_rank": 0}
    other = namespace.to_dict()
    other["tensor_parallel"] |= {"tp_size": 2, "tp_rank": 1}
    first, second = known.enter(values), known.enter(other)
    assert first is second
    assert first.donors == 2
    known.leave(first)
    assert [each.number for each in known.met_by(None, None)] == [first.number]
    known.leave(second)
    assert known.met_by(None, None) == []
    assert len(known) == 0


def test_numbers_are_never_given_twice(known, namespace) -> None:
    first = known.enter(namespace.to_dict())
    known.leave(first)
    assert known.enter(namespace.to_dict()).number != first.number


def test_a_request_meets_its_own_salt_and_model_only(known, base_namespace) -> None:
    acme = known.enter(base_namespace.for_request("acme", None).to_dict())
    none = known.enter(base_namespace.for_request(None, None).to_dict())
    other = known.enter(dataclasses.replace(base_namespace, model="other").for_request(None, None).to_dict())
    known.enter(other_values := dataclasses.replace(base_namespace, model="other").for_request(None, None).to_dict())
    assert other_values["model"] == "other"
    assert known.met_by("acme", None) == [acme]
    assert known.met_by("Acme", None) == []
    assert known.met_by(None, None) == [other, none]
    assert known.met_by(None, "tiny") == [none]


def test_one_model_under_two_names_is_met_under_both(known, base_namespace) -> None:
    revisions = {"model_revision": content_value("0f"), "tokenizer_revision": content_value("1f")}
    names = ("one", "two")
    first, second = (
        known.enter(dataclasses.replace(base_namespace, model=name, **revisions).to_dict()) for name in names
    )
    assert first is second
    assert [known.met_by(None, name) for name in (*names, "three")] == [[first], [first], []]


def test_a_namespace_with_another_tenants_key_is_refused(known, base_namespace) -> None:
    for salt, foreign in (("acme", "other"), (None, "acme"), ("acme", None)):
        values = base_namespace.for_request(salt, None).to_dict()
        values["extra"]["tenant_key"] = base_namespace.for_request(foreign, None).extra["tenant_key"]
        with pytest.raises(NamespaceError, match="tenant key"):
            known.enter(values)
    known.enter(base_namespace.for_request("", None).to_dict())


def test_there_is_a_most(known, base_namespace) -> None:
    for salt in "abc":
        known.enter(base_namespace.for_request(salt, None).to_dict())
    with pytest.raises(NamespaceError, match="more than 3"):
        known.enter(base_namespace.for_request("d", None).to_dict())
    known.enter(base_namespace.for_request("a", None).to_dict())
