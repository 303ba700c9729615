"""Only equal namespaces share a key; salts are never kept; what is unknown matches nothing."""

import copy
import hashlib
import json
import math
import pickle

import pytest

from semblend_trt import namespace as module
from semblend_trt.errors import NamespaceError
from semblend_trt.namespace import NO_SALT, CacheNamespace, content_value, salt_digest, tenant_key, unknown_value
from tests.semblend_trt.samples import unknown_fields

FIELDS = {
    "model": "Qwen/Qwen2.5-0.5B",
    "model_revision": "sha256:0f3c",
    "tokenizer": "Qwen/Qwen2.5-0.5B",
    "tokenizer_revision": "sha256:77aa",
    "kv_layout": "HND",
    "block_size": 32,
    "kv_dtype": "bfloat16",
    "cache_dtype": "bfloat16",
    "quantization": None,
    "adapter": None,
    "rope_config": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 1.0},
    "tensor_parallel": {"tp_size": 2, "pp_size": 1, "cp_size": 1, "tp_rank": 0, "pp_rank": 0, "cp_rank": 0},
    "backend_cache_layout": "trtllm_pytorch_primary_pool_v1",
    "extra": {"tenant": "acme", "template": "support"},
}

# Frozen: donors on disk and in other processes are found by these keys.
KEY = "8b8b13d2321b499273e0db5e71af9fddc8181f617210978676b2a7cc2fe6f0d7"
SALTED_KEY = "8e4e014159574d2cc7b2a39aae1a7c61cff1a44f85f0ece7790b684abbad5cd8"


def namespace(**changes):
    return CacheNamespace(**{**copy.deepcopy(FIELDS), **changes})


def parallel(**changes):
    return {**FIELDS["tensor_parallel"], **changes}


def rope(**changes):
    return {**FIELDS["rope_config"], **changes}


CHANGES = [
    *((name, "other") for name, value in FIELDS.items() if value is None or isinstance(value, str)),
    ("block_size", 64),
    *(("rope_config", each) for each in (rope(rope_theta=10_000.0), rope(factor=4.0), {})),
    *(("tensor_parallel", each) for each in (parallel(tp_size=4), parallel(cp_size=2))),
    *(("extra", each) for each in ({"tenant": "acme", "template": "sales"}, {})),
]


def test_key_is_frozen():
    assert {name for name, _ in CHANGES} == set(FIELDS)
    assert namespace().key == KEY
    assert namespace().for_request("s3cret", "lora-7").key == SALTED_KEY


@pytest.mark.parametrize(("name", "value"), CHANGES, ids=[f"{i}-{name}" for i, (name, _) in enumerate(CHANGES)])
def test_every_hard_field_changes_the_key(name, value):
    changed = namespace(**{name: value})
    assert changed.key != namespace().key
    assert changed != namespace()


@pytest.mark.known_defect(23)
def test_ranks_agree_on_the_key():
    other_rank = namespace(tensor_parallel=parallel(tp_rank=1))
    assert other_rank.key == namespace().key
    assert other_rank == namespace()
    assert namespace(tensor_parallel={"tp_size": 2, "pp_size": 1, "cp_size": 1}) == namespace()


ENDLESS: dict[str, object] = {}
ENDLESS["deeper"] = ENDLESS


def test_order_and_number_type_do_not_matter():
    reordered = dict(reversed(list(FIELDS["rope_config"].items())))
    assert namespace(rope_config={**reordered, "rope_theta": 1_000_000}) == namespace()
    assert namespace(rope_config=rope(mscale=True)) != namespace(rope_config=rope(mscale=1))


def test_salt_is_bound_by_its_digest_and_never_kept():
    bound = namespace().for_request("s3cret", None)
    assert bound.extra["cache_salt"] == "semblend:ns:salt:" + hashlib.sha256(b"s3cret").hexdigest()[:32]
    assert "s3cret" not in json.dumps(bound.to_dict())
    assert "s3cret" not in repr(bound)
    assert b"s3cret" not in pickle.dumps(bound)
    assert bound.key == namespace().for_request("s3cret", None).key
    # White space sets tenants apart too: the engine does not trim salts either.
    assert bound.key != namespace().for_request(" s3cret ", None).key


@pytest.mark.promise("reuse", "Requests with different salts, or one...")
def test_salted_and_unsalted_requests_never_meet():
    keys = {namespace().for_request(salt, None).key for salt in (None, "", " ", "a", "a ", " a", "b", NO_SALT, "none")}
    assert len(keys) == 9


def test_absent_salt_equals_the_engines_own_key():
    unsalted = namespace().for_request(None, None)
    assert unsalted.key == namespace().key
    assert "cache_salt" not in unsalted.extra
    assert namespace(extra={**FIELDS["extra"], "cache_salt": NO_SALT}).key == unsalted.key


def test_tenant_key_vectors():
    assert tenant_key("tenant-acme") == "semblend:tenant:v1:9332cc3fc0ec09d0f04fa8e1e08637b5"
    assert tenant_key(None) == tenant_key("") == "semblend:tenant:v1:none"
    assert tenant_key(" a") != tenant_key("a")
    bound = namespace().for_request("tenant-acme", None)
    assert bound.to_dict()["extra"].pop("tenant_key") == tenant_key("tenant-acme")
    assert namespace(extra={k: v for k, v in bound.extra.items() if k != "tenant_key"}).key == bound.key


@pytest.mark.parametrize("salt", [7, b"salt", True, ["salt"], "x" * (module.MAX_TEXT + 1), "\ud800"])
def test_bad_salts_are_refused_without_being_repeated(salt):
    for use in (lambda: namespace().for_request(salt, None), lambda: salt_digest(salt), lambda: tenant_key(salt)):
        with pytest.raises(NamespaceError) as caught:
            use()
        assert "xxxx" not in str(caught.value)


def test_raw_salt_in_extra_is_refused():
    for extra in ({"cache_salt": "s3cret"}, {"cache_salt": 3}, {"tenant_key": "s3cret"}):
        with pytest.raises(NamespaceError) as caught:
            namespace(extra=extra)
        assert "s3cret" not in str(caught.value)


def test_adapters_of_the_request_and_of_the_engine():
    base, tuned = namespace(), namespace(adapter="merged")
    bound = [base, tuned, base.for_request(None, "lora-1"), tuned.for_request(None, "lora-1")]
    assert len({item.key for item in bound}) == 4
    assert tuned.for_request(None, None).key == tuned.key


def test_a_bound_namespace_is_not_bound_again():
    with pytest.raises(NamespaceError, match="bound to a request already"):
        namespace().for_request("a", None).for_request(None, None)


@pytest.mark.promise("reuse", "What cannot be determined matches no other engine")
@pytest.mark.parametrize("name", [name for name in FIELDS if name != "extra"])
def test_namespaces_with_an_unknown_field_never_meet(name):
    inner = {"rope_config": "rope_theta", "tensor_parallel": "tp_size"}.get(name)
    values = (unknown_value() if inner is None else {**FIELDS[name], inner: unknown_value()} for _ in range(2))
    first, second = (namespace(**{name: value}) for value in values)
    assert first != second
    assert first.key != second.key
    assert first.key not in (namespace().key, second.for_request(None, None).key)
    assert first == first.from_dict(first.to_dict()) == copy.deepcopy(first)
    assert unknown_fields(first) == [name]


def test_a_name_binds_unless_its_revision_is_a_digest_of_the_content():
    for name, revision in module.REVISION_OF.items():
        named = {namespace(**{name: other}).key for other in ("one", "two")}
        digested = {namespace(**{name: other, revision: content_value("0f")}).key for other in ("one", "two")}
        assert (len(named), len(digested)) == (2, 1)
        assert namespace(**{revision: content_value("1f")}).key not in digested
        shown = namespace(**{name: "one", revision: content_value("0f")}).to_dict()
        assert shown[name] == "one"
        assert CacheNamespace.from_dict(shown).key in digested


@pytest.mark.parametrize("item", [namespace(), namespace(adapter="ü").for_request("s", "lora"), namespace(extra={})])
def test_round_trips(item):
    shown = item.to_dict()
    again = [CacheNamespace.from_dict(each) for each in (shown, json.loads(json.dumps(shown)))]
    for read in (*again, pickle.loads(pickle.dumps(item)), copy.deepcopy(item)):
        assert read == item
        assert (read.key, hash(read)) == (item.key, hash(item))


def test_namespace_cannot_be_changed_behind_its_key():
    source = rope()
    built = namespace(rope_config=source)
    source["rope_theta"] = 1.0
    built.to_dict()["rope_config"]["rope_theta"] = 1.0
    assert built == namespace()
    with pytest.raises(TypeError):
        built.rope_config["rope_theta"] = 1.0
    with pytest.raises(AttributeError):
        built.model = "other"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "") for name in ("model", "quantization")),
        *((name, None) for name in ("model", "model_revision", "tensor_parallel", "rope_config")),
        ("kv_dtype", "x" * (module.MAX_TEXT + 1)),
        ("adapter", 7),
        *(("block_size", size) for size in (0, "32")),
        ("tensor_parallel", {"tp_size": 1, "pp_size": 1}),
        *(("tensor_parallel", parallel(**each)) for each in ({"tp_size": 0}, {"rank": 0})),
        *(("rope_config", each) for each in ({"rope_theta": math.nan}, {"rope_theta": object()}, {1: 2})),
        *(("extra", each) for each in ({"tenant": {1, 2}}, "tenant", ENDLESS)),
    ],
)
def test_bad_fields_are_refused_by_name(name, value):
    with pytest.raises(NamespaceError, match=name):
        namespace(**{name: value})


@pytest.mark.parametrize("values", [None, [], "x", {}, {**FIELDS, "surplus": 1}])
def test_from_dict_refuses_other_forms(values):
    with pytest.raises(NamespaceError):
        CacheNamespace.from_dict(values)
