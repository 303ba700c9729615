"""A profile reads back as it was written, holds for the engine it was made for, and says what keeps it from others."""

import grp
import json
import logging
import os
import pwd
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.layout import KvGeometry
from semblend_trt.config import load_settings
from semblend_trt.connector.lookup import ProfileMatch, ProfileMatcher
from semblend_trt.errors import ConfigurationError, ProfileError
from semblend_trt.namespace import CacheNamespace, content_value, unknown_value
from semblend_trt.plan import BudgetLevel, EngineMode, ReuseTerms
from semblend_trt.reuse_profile import (
    EVIDENCE_FAMILIES,
    MAX_BYTES,
    ProfileBound,
    ProfileCheck,
    ProfileLevel,
    ReuseProfile,
)
from tests.semblend_trt import test_namespace

GEOMETRY = KvGeometry(num_layers=12, kv_heads=2, head_dim=64, block_size=32)
FIELDS = test_namespace.FIELDS | {
    "model_revision": "0f3c",
    "tokenizer_revision": "77aa",
    "cache_dtype": "auto",
    "rope_config": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tensor_parallel": {"tp_size": 1, "pp_size": 1, "cp_size": 1},
    "backend_cache_layout": "engine/default/pool",
    "extra": {"compute_dtype": "bfloat16", "configuration": "c0ff"},
}
CHECK = ProfileCheck(layer=2, threshold=0.2, max_span_share=0.5, min_saved_share=0.1, window_threshold=0.06)
FALLING = {"deviation": 0.2, "share": 0.1}
FIXED = {"policy": "position_fix", "check": None}
RELYING, AGAIN = {"check__witness_bounds": [0.4, 1.5]}, "make it again with `python -m validation calibrate`"
BOUNDS = [{"max_kl": 0.01, "risk": 0.05, "levels": [{"deviation": 0.1, "share": 0.2}]}]
# Field of the namespace, another value, and what the sentence must name.
OTHERS = [
    ("model", "Qwen/Qwen2.5-1.5B", "model Qwen/Qwen2.5-0.5B; this engine runs Qwen/Qwen2.5-1.5B"),
    ("model_revision", "beef", "weights 0f3c; this engine runs beef"),
    ("tokenizer", "other", "tokenizer"),
    ("tokenizer_revision", "other", "tokenizer revision"),
    ("kv_layout", "NHD", "KV layout"),
    ("kv_dtype", "float16", "KV dtype bfloat16; this engine runs float16"),
    ("cache_dtype", "bfloat16", "cache dtype"),
    ("quantization", "awq:12", "quantisation none; this engine runs awq:12"),
    ("adapter", "legal", "adapter none; this engine runs legal"),
    ("rope_config", {"rope_type": "default", "rope_theta": 10_000}, 'RoPE {"rope_theta": 1000000'),
    ("tensor_parallel", {"tp_size": 2, "pp_size": 1, "cp_size": 1}, "parallel layout"),
    (
        "backend_cache_layout",
        "other",
        "engine and cache layout engine/default/pool; this engine runs other, which `python -m validation confirm` can "
        "add.",
    ),
    ("extra", {"compute_dtype": "float16", "configuration": "c0ff"}, "compute dtype"),
    ("extra", {"compute_dtype": "bfloat16", "configuration": "eeee"}, "configuration c0ff; this engine runs eeee"),
]


def namespace(**changes):
    return CacheNamespace(**{**FIELDS, **changes})


def profile(**changes):
    return ReuseProfile.made_for(namespace(), GEOMETRY, **{"policy": "verified", "check": CHECK, **changes})


def stored(path, **changes):
    """A profile's file in which some values have been written over by hand."""
    values = profile().model_dump(mode="json")
    for name, value in changes.items():
        *outer, last = name.split("__")
        target = values
        for part in outer:
            target = target[part]
        target[last] = value
    path.write_text(json.dumps(values))
    return path


@pytest.mark.promise("policies", "Block size, tenant, template, salt and names may differ")
@pytest.mark.parametrize(
    "changes",
    [
        {"block_size": 64},
        {"extra": {**FIELDS["extra"], "tenant": "acme", "template": "support"}},
        {"rope_config": {"rope_theta": 1_000_000, "rope_type": "default"}},
        {"tensor_parallel": {"tp_size": 1, "pp_size": 1, "cp_size": 1, "tp_rank": 0}},
    ],
)
def test_what_does_not_change_the_kv_does_not_bind(changes):
    assert profile().differences(namespace(**changes), GEOMETRY) == []
    assert profile().differences(namespace(**changes).for_request("a secret salt", None), GEOMETRY) == []


@pytest.mark.promise(
    "policies",
    "A profile holds for the weights, configuration, tokenizer, dtypes, adapter, RoPE, layout and version that it "
    "was made for",
)
@pytest.mark.parametrize(("field", "value", "told"), OTHERS, ids=[told for _, _, told in OTHERS])
def test_every_other_field_binds_and_is_named(field, value, told):
    (sentence,) = profile().differences(namespace(**{field: value}), GEOMETRY)
    assert sentence.startswith("The profile was made for ")
    assert told in sentence
    assert sentence.endswith(".")


def test_every_field_of_a_namespace_is_decided_upon():
    assert {field for field, _, _ in OTHERS} | {"block_size"} == set(FIELDS)


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in ("block_size", "extra")])
@pytest.mark.parametrize("word", [unknown_value(), "Unknown"], ids=["made_up", "plain"])
def test_what_an_engine_does_not_know_differs(field, word):
    value = {field: {"tp_size": 1, "pp_size": 1, "cp_size": unknown_value()}}
    if field == "rope_config":
        value = {field: {"rope_type": word}}
    elif field != "tensor_parallel":
        value = {field: word}
    (sentence,) = profile().differences(namespace(**value), GEOMETRY)
    assert "runs what is not known." in sentence


@pytest.mark.parametrize("name", ["model", "tokenizer"])
def test_a_name_binds_only_where_no_digest_tells_the_content(name):
    digested = {f"{name}_revision": content_value("0f")}
    made = ReuseProfile.made_for(namespace(**digested), GEOMETRY, policy="position_fix")
    assert made.differences(namespace(**digested, **{name: "other"}), GEOMETRY) == []
    (sentence,) = made.differences(namespace(**{f"{name}_revision": content_value("1f"), name: "other"}), GEOMETRY)
    assert "semblend:content:1f" in sentence
    assert len(made.differences(namespace(**{name: "other"}), GEOMETRY)) == 2


def test_unknown_on_both_sides_is_no_match(tmp_path):
    unknown = unknown_value()
    read = ReuseProfile.read(stored(tmp_path / "profile.json", namespace__model_revision=unknown))
    (sentence,) = read.differences(namespace(model_revision=unknown), GEOMETRY)
    assert sentence == "The profile was made for weights what is not known; this engine runs what is not known."
    read = ReuseProfile.read(stored(tmp_path / "profile.json", namespace__compute_dtype=None))
    assert len(read.differences(namespace(extra={"configuration": "c0ff"}), GEOMETRY)) == 1


@pytest.mark.parametrize("changes", [{"num_layers": 13}, {"kv_heads": 4}, {"head_dim": 128}], ids=str)
def test_another_geometry_differs(changes):
    (sentence,) = profile().differences(namespace(), replace(GEOMETRY, **changes))
    ((name, value),) = changes.items()
    assert f"{name} {getattr(GEOMETRY, name)}; this engine runs {value}." in sentence


@pytest.mark.promise("policies", "A profile holds in the engines that it lists, and in no other")
def test_it_holds_in_every_engine_of_its_list_and_in_no_other():
    made = profile(figures=["made"])
    confirmed = made.confirmed_in("other/pool", ["made", "confirmed"])
    assert made.engines == ["engine/default/pool"]
    assert (confirmed.engines, confirmed.figures) == (["engine/default/pool", "other/pool"], ["made", "confirmed"])
    assert confirmed.confirmed_in("other/pool") == confirmed
    for engine in confirmed.engines:
        assert confirmed.differences(namespace(backend_cache_layout=engine), GEOMETRY) == []
    (sentence,) = confirmed.differences(namespace(backend_cache_layout="third/pool"), GEOMETRY)
    assert "engine/default/pool or other/pool; this engine runs third/pool" in sentence
    (other,) = confirmed.differences(namespace(backend_cache_layout="other/pool", kv_dtype="float16"), GEOMETRY)
    assert "KV dtype" in other


@pytest.mark.parametrize("word", [unknown_value(), "Unknown"], ids=["made_up", "plain"])
def test_an_engine_that_is_not_known_is_in_no_list(tmp_path, word):
    listed = ReuseProfile.read(stored(tmp_path / "profile.json", engines=["engine/default/pool", word]))
    assert len(listed.differences(namespace(backend_cache_layout=word), GEOMETRY)) == 1
    with pytest.raises(ConfigurationError, match="engine and cache layout of this engine cannot be determined"):
        ReuseProfile.made_for(namespace(backend_cache_layout=unknown_value()), GEOMETRY, policy="position_fix")


@pytest.mark.promise("policies", "A profile holds for the weights,...")
def test_another_version_differs(monkeypatch):
    made = profile()
    monkeypatch.setattr("semblend_trt.reuse_profile.__version__", "9.9.9")
    (sentence,) = made.differences(namespace(), GEOMETRY)
    assert "version" in sentence
    assert "runs 9.9.9" in sentence


@pytest.mark.parametrize(
    "execution",
    [
        {"head_tokens": 8, "generations": 2},
        {"check": CHECK.model_copy(update={"sample_every": 8}), "bounds": BOUNDS, "floor": 0.1, "template": "0f" * 32},
        {"policy": "exact", "check": None},
    ],
    ids=str,
)
def test_it_reads_back_as_written(tmp_path, execution):
    made = profile(figures=[{"ü\n": [1.5, None, True]}, 2**53], command="calibrate 'ü'", **execution)
    path = tmp_path / "deep" / "profile.json"
    made.write(path)
    read = ReuseProfile.read(path)
    assert read.model_copy(update={"digest": None}) == made
    assert (read.differences(namespace(), GEOMETRY), read.terms) == ([], made.terms)


@pytest.mark.promise("reuse", "A profile made without `generations` goes on working, and allows none")
def test_a_profile_without_the_fields_has_no_generations_or_sample(tmp_path):
    sample = {"sample_every": 8, "sample_threshold": 0.1, "window_tokens": 16}
    values = profile(generations=3, check=CHECK.model_copy(update=sample)).model_dump(mode="json")
    del values["generations"]
    for name in sample:
        del values["check"][name]
    (tmp_path / "profile.json").write_text(json.dumps(values))
    assert ReuseProfile.read(tmp_path / "profile.json") == profile()


RECORDED = sorted(Path(__file__).parents[2].glob("docs/profiles/*.json"))


@pytest.mark.promise(
    "reuse",
    "A profile of an earlier version whose check has no witnesses goes on working; one that relies on witnesses is "
    "refused with the value and what to do",
)
@pytest.mark.parametrize(
    "path", [each for each in RECORDED if b"witness" in each.read_bytes()], ids=lambda path: path.stem
)
def test_a_recorded_profile_is_read_though_it_has_the_fields_of_witnesses(path, tmp_path, caplog):
    values = json.loads(path.read_text(encoding="utf-8"))
    assert (values["check"]["witness_every"], values["check"]["witness_bounds"]) == (0, [])
    read = ReuseProfile.read(path)
    [warning] = caplog.messages
    assert "witness_bounds is ignored" in warning
    assert read.digest == values["digest"]
    read.write(tmp_path / "profile.json")
    assert ReuseProfile.read(tmp_path / "profile.json").check == read.check
    assert len(caplog.messages) == 1


@pytest.mark.promise("reuse", "A profile of an earlier version...")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        *(
            ({**RELYING, "check__witness_every": each}, f"witness_every is {each}, and only 0 is allowed.*; {AGAIN}")
            for each in (1, 128, -1, None, False, 0.0)
        ),
        ({"schema_version": 1}, f"schema_version is 1: .*; {AGAIN}"),
        ({"engines": []}, "engines is .*at least 1"),
        ({"namespace__backend_cache_layout": "a"}, r"\['backend_cache_layout'\] are not known"),
        ({"policy": "most"}, "policy is 'most'"),
        ({"check__threshold": 1.01}, "check.threshold is 1.01: Input should be less than or equal to 1"),
        ({"check__layer": 0}, "check.layer is 0: Input should be greater than or equal to 1"),
        ({"check__kind": "x"}, "check.kind"),
        ({"namespace__model": ""}, "namespace field model is ''"),
        ({"namespace__tensor_parallel": {}}, "tensor_parallel"),
        ({"figures": [float("nan")]}, "not JSON compliant"),
        ({"bounds": BOUNDS}, "bounds need a check with a sample and 0 generations"),
        (
            {"check__sample_every": 8, "generations": 1, "bounds": BOUNDS},
            "bounds need a check with a sample and 0 gene",
        ),
        ({"bounds": [{**BOUNDS[0], "max_kl": 0}]}, "bounds.0.max_kl is 0"),
        ({"bounds": [{**BOUNDS[0], "levels": BOUNDS[0]["levels"] * 2}]}, "the deviation must rise"),
        ({"bounds": [{**BOUNDS[0], "levels": [*BOUNDS[0]["levels"], FALLING]}]}, "the share must not fall"),
        ({"template": "0f"}, "template is '0f'"),
        ({"check": None}, "verified, and only it, has one"),
        ({"boundary": 1}, "boundary is 1: Input should be 0"),
        ({"engines": ["a", "b", "a"]}, "names an engine twice"),
        ({"check__window_tokens": 16, "check__sample_every": 17}, "sample_every is 17; it may be at most window_token"),
        ({"check__compares_all": False}, "sample_every is 0; a check has to compare"),
        ({"check__layer": 12}, r"check layer 12 is outside 1\.\.11"),
        ({**FIXED, "head_tokens": 8}, "head_tokens 8; only verified may have some"),
        ({**FIXED, "generations": 1}, "generations 1; only verified may have some"),
        ({**FIXED, "policy": "boundary"}, "policy is 'boundary': Input should be 'exact', 'verified' or"),
    ],
)
def test_a_wrong_value_in_a_file_is_refused_with_its_bound(tmp_path, changes, told):
    path = stored(tmp_path / "profile.json", **changes)
    with pytest.raises(ProfileError, match=told) as caught:
        ReuseProfile.read(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.fixture
def path(tmp_path):
    made = tmp_path / "reuse-profile.json"
    unchecked().write(made)
    return made


def matcher(path, policy="verified", **settings):
    return ProfileMatcher(load_settings(policy=policy, profile_path=path, **settings))


def evidence(candidate="position_fix", margin=0.01, groups=299, lower=-0.01, holds=True):
    """The figures of a confirmation of so many groups of each family: 299 are the fewest at that margin."""
    bounds = {"difference": 0.0, "lower": lower, "upper": 0.01}
    shown = {"what": "confirmed", "prompts": groups, "groups": groups, "likelihood_vs_cold": bounds}
    tried = {"what": "tried", "stage": "confirm", "candidate": candidate, "holds": holds}
    rule = {"what": "rule", "margin": margin, "confidence": 0.95}
    return [rule, *({**shown, "family": family} for family in EVIDENCE_FAMILIES), tried]


def unchecked(figures=None, **changes):
    fields = {"policy": "position_fix", "check": None, "figures": evidence() if figures is None else figures}
    return profile(**{**fields, **changes})


def match(asked, space, mode=EngineMode.WRAPPER):
    return asked.match(space, GEOMETRY, mode)


@pytest.mark.promise(
    "policies",
    "The log says once what differs; requests count under `no_profile`, `profile_mismatch` or `profile_unreadable`",
)
def test_another_namespace_is_refused_and_told_once_with_what_differs(path, caplog):
    asked = matcher(path)
    for _ in range(3):
        found = match(asked, namespace(kv_dtype="float16"))
    assert (found.profile, found.refusal) == (None, "profile_mismatch")
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "made for KV dtype bfloat16; this engine runs float16." in record.getMessage()


@pytest.mark.promise("engines", "A check lies above a layer...")
@pytest.mark.parametrize(("lowest", "refusal"), [(1, None), (2, None), (3, "profile_check_layer")])
def test_a_check_below_all_layers_with_full_attention_is_refused(path, lowest, refusal, caplog):
    profile(figures=evidence("verified layer 2 threshold 0.2")).write(path)
    found = match(ProfileMatcher(load_settings(policy="verified", profile_path=path), lowest), namespace())
    assert (found.profile is None, found.refusal if found.profile is None else None) == (refusal is not None, refusal)
    assert ("check layer 2 has no layer with full attention below it; 3 is the lowest" in caplog.text) == bool(refusal)


def test_any_number_of_adapters_is_compared_and_few_are_told(path, caplog):
    asked = matcher(path)
    caplog.clear()
    for index in range(200):
        assert match(asked, namespace().for_request(None, f"adapter-{index}")).refusal == "profile_mismatch"
    assert len(caplog.records) <= 64
    assert match(asked, namespace()).profile is not None


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read: No such file"),
        (os.mkdir, "cannot be read: Is a directory"),
        (os.mkfifo, "cannot be read: it is not a regular file"),
        (b" " * (MAX_BYTES + 1), "cannot be read: it has more than 1048576 bytes"),
        *((each, "make it again") for each in (b"", b"{", b"[]", b"null", b'{"a": \xff}', b"[" * 100_000, b"{}")),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_not_raised(tmp_path, content, told, caplog):
    path = tmp_path / "broken.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        content(path)
    found = match(matcher(path), namespace())
    assert (found.profile, found.refusal) == (None, "profile_unreadable")
    assert f"reuse profile {path}" in found.differences[0]
    assert told in found.differences[0]
    assert str(path) in caplog.text


def test_other_policies_read_no_profile_and_a_missing_one_is_told_once(path, caplog):
    for asked in (matcher(path, "exact"), matcher(None, "exact"), matcher(None)):
        assert match(asked, namespace()) == match(asked, namespace()) == ProfileMatch(None, "no_profile")
    exact, missing = caplog.messages
    assert exact == "SEMBLEND_PROFILE is set, but policy exact uses no profile"
    assert "no reuse profile is set" in missing


def refusal(path, **settings):
    """Why an engine does not use the profile, with the sentence; None where it does."""
    found = match(matcher(path, **settings), namespace())
    return None if found.profile is not None else f"{found.refusal}: {' '.join(found.differences)}"


SAMPLED = ProfileCheck(layer=2, threshold=0.2, sample_every=16, sample_threshold=0.1)
SAMPLED_NAME = "verified layer 2 threshold 0.2 head 8 sample of one in 16 in windows of 32 under 0.1"
LOOSE = ProfileCheck(layer=2, threshold=1.0)
DENSE = ProfileCheck(layer=2, threshold=0.99)
DENSE_NAME = "verified layer 2 threshold 0.99"


@pytest.mark.promise(
    "policies",
    "`verified` reuses more than exact text only where the profile's own evidence confirms these very terms, and "
    "leaves text unchecked only where it does so in every family; an edited profile is refused",
)
@pytest.mark.parametrize(
    ("fields", "candidate"),
    [
        ({}, "position_fix"),
        ({"policy": "verified", "check": SAMPLED}, SAMPLED_NAME),
        ({"policy": "verified", "check": LOOSE}, "verified layer 2 threshold 1"),
        ({"policy": "verified", "check": DENSE}, DENSE_NAME),
    ],
    ids=lambda each: str(each)[:30],
)
def test_what_is_not_exact_needs_evidence_for_these_very_terms(path, fields, candidate):
    unchecked(evidence(candidate), **fields).write(path)
    assert refusal(path) is None
    other = "verified layer 2 threshold 0.2" if candidate != "verified layer 2 threshold 0.2" else "position_fix"
    for figures in ([], evidence(other), evidence(f"{candidate}1"), evidence(candidate, holds=False)):
        unchecked(figures, **fields).write(path)
        assert str(refusal(path)).startswith("profile_evidence: The profile's evidence for its terms (")
        assert refusal(path, profile_trial=True) is None
    unedited = unchecked(evidence(candidate), **fields).model_dump(mode="json")
    path.write_text(json.dumps(unedited))
    assert "lacks a digest;" in str(refusal(path))


TOO_FEW = [{"groups": 298}, {"groups": True}, {"groups": 1e9}, {"lower": -0.0101}, {"lower": "0"}]


@pytest.mark.parametrize(
    ("figures", "lacking"),
    [
        *(([f for f in evidence() if f.get("family") != each], f"lacks {each};") for each in EVIDENCE_FAMILIES),
        *((evidence(**each), "lacks reordered, ") for each in TOO_FEW),
        (evidence(margin=0.11, groups=10**6), "lacks a rule with a margin of at most 0.1;"),
        (evidence(margin=-0.01), "lacks a rule"),
    ],
)
def test_evidence_names_every_family_with_groups_enough_for_its_margin(path, figures, lacking):
    unchecked(figures).write(path)
    assert lacking in str(refusal(path))


@pytest.mark.promise("policies", "`verified` reuses more than exact text...")
@pytest.mark.parametrize(
    "edited",
    [{"generations": 1}, {"check": CHECK.model_dump() | {"threshold": 0.9}}, {"engines": ["e"]}, {"figures": [1]}],
    ids=str,
)
def test_an_edited_field_is_noticed(path, edited):
    profile(figures=evidence("verified layer 2 threshold 0.2")).write(path)
    assert refusal(path) is None
    path.write_text(json.dumps({**json.loads(path.read_text()), **edited}))
    assert str(refusal(path)).startswith("profile_evidence")


def test_a_check_of_every_token_needs_no_families_and_exact_text_no_evidence(path):
    rule, *_, tried = evidence(DENSE_NAME)
    unchecked([rule, tried], policy="verified", check=DENSE).write(path)
    assert refusal(path) is None
    unchecked([], policy="exact").write(path)
    assert refusal(path) is None


@pytest.mark.promise("policies", "A profile that others can write or replace is refused")
@pytest.mark.parametrize(
    ("file_mode", "folder_mode", "is_refused"),
    [
        *((0o644, 0o755, False), (0o400, 0o700, False), (0o666, 0o755, True), (0o664, 0o755, True)),
        *((0o646, 0o755, True), (0o644, 0o777, True), (0o644, 0o775, True), (0o644, 0o1777, False)),
    ],
)
@pytest.mark.parametrize("link_mode", [None, 0o755, 0o777])
def test_a_file_that_others_can_write_or_replace_is_refused(
    tmp_path, path, file_mode, folder_mode, is_refused, link_mode, monkeypatch
):
    monkeypatch.setattr("semblend_trt.reuse_profile._is_private", lambda _: False)
    folder, links = tmp_path / "folder", tmp_path / "links"
    folder.mkdir()
    named = held = path.rename(folder / "profile.json")
    held.chmod(file_mode)
    folder.chmod(folder_mode)
    if link_mode is not None:
        links.mkdir()
        links.chmod(link_mode)
        named = links / "link.json"
        named.symlink_to(held)
    is_refused |= link_mode == 0o777
    assert (str(refusal(named)).partition(":")[0] == "profile_writable") == is_refused
    assert (refusal(named) is None) != is_refused
    if link_mode == 0o777 and (file_mode, folder_mode) == (0o644, 0o755):
        assert f"others can write {links}, whose mode is 777" in str(refusal(named))


@pytest.mark.promise("policies", "A profile that others can write...")
@pytest.mark.skipif(os.geteuid() != 0, reason="skipped: only root can give files to others")
def test_a_file_or_a_link_of_another_user_is_refused_and_one_of_root_is_not(tmp_path, path, monkeypatch):
    link = tmp_path / "link.json"
    link.symlink_to(path)
    for owned, named in ((path, path), (path, link), (link, link)):
        os.chown(owned, 12345, -1, follow_symlinks=False)
        assert f"user 12345 owns {owned}" in str(refusal(named))
        os.chown(owned, 0, -1, follow_symlinks=False)
    os.chown(tmp_path, 12345, -1)
    assert refusal(link) is None
    monkeypatch.setattr(os, "geteuid", lambda: 12345)  # who reads what is root's
    assert refusal(path) is None


def test_what_the_own_group_of_a_user_can_write_is_not_open_to_others(path, monkeypatch):
    """Debian and its kin make such a group for each user, and let it write what that user makes."""
    path.chmod(0o664)
    gid, members = path.stat().st_gid, list[str]()
    user = SimpleNamespace(pw_uid=1000, pw_gid=gid, pw_name="me")
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(grp, "getgrgid", lambda _: SimpleNamespace(gr_name="me", gr_mem=members))
    assert refusal(path) is None
    members.append("you")
    assert "others can write" in str(refusal(path))


NUMBERS = st.floats(0.001, 0.9)
LEVELS = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=4, unique_by=lambda level: level[0]).map(
    lambda found: [
        ProfileLevel(deviation=deviation, share=share)
        for deviation, share in zip(sorted(d for d, _ in found), sorted(s for _, s in found), strict=True)
    ]
)
ALL_BOUNDS = st.lists(st.builds(ProfileBound, max_kl=NUMBERS, risk=NUMBERS, levels=LEVELS), min_size=1, max_size=6)


def bounded(bounds, **changes):
    return profile(**{"check": SAMPLED, "bounds": bounds, **changes})


@pytest.mark.promise(
    "policies",
    "Of a profile's bounds the loosest within `SEMBLEND_MAX_KL` and `SEMBLEND_RISK` is kept, and none that is looser",
)
@given(bounds=ALL_BOUNDS, asked=NUMBERS | st.just("rounding"), risk=NUMBERS, floor=st.none() | NUMBERS)
def test_terms_are_those_of_the_loosest_bound_within_what_is_asked(bounds, asked, risk, floor):
    made = bounded(bounds, floor=floor)
    chosen, terms = made.bound_for(asked, risk), made.terms_for(asked, risk)
    most = 2.0 * (floor or 0.0) if asked == "rounding" else asked
    fitting = [each for each in bounds if each.max_kl <= most and each.risk <= risk]
    assert (chosen in fitting) == bool(fitting)
    assert all(each.max_kl <= chosen.max_kl for each in fitting)
    assert (terms is None) == (chosen is None or not chosen.levels)
    if terms is not None:
        assert terms.check.levels == tuple(BudgetLevel(each.deviation, each.share) for each in chosen.levels)
        assert (terms.check.layer, terms.check.sample_every) == (SAMPLED.layer, SAMPLED.sample_every)


@pytest.mark.promise("policies", "A profile without bounds goes on...")
def test_a_profile_without_bounds_has_its_own_terms_and_none_for_a_number():
    made = profile()
    assert made.terms_for("rounding", 0.05) == made.terms
    assert made.terms_for(1.0, 0.05) is None
    for each in (made, bounded([ProfileBound(**BOUNDS[0])])):
        assert each.terms_for("unbounded", 0.05) == ReuseTerms()


def confirmed(**changes):
    figure = {"what": "bound_confirmed", "max_kl": 0.01, "risk": 0.05, "families": ["a"], "prompts": 100, "broken": 0}
    return {**figure, **changes}


@pytest.mark.promise(
    "policies", "A bound is used only with its confirmation among the profile's figures, and not if those refute it"
)
@pytest.mark.parametrize(
    ("figures", "max_kl", "is_refused"),
    [
        ([confirmed()], 0.01, False),
        ([confirmed(broken=9)], 0.01, False),
        # 10 of 100 are more than 5 % with a confidence of 95 %.
        ([confirmed(broken=10)], 0.01, True),
        ([confirmed(), confirmed(broken=10)], 0.01, True),
        ([confirmed(prompts=0)], 0.01, True),
        ([confirmed(max_kl=0.02)], 0.01, True),
        ([confirmed(risk=0.1)], 0.01, True),
        ([confirmed(what="confirmed")], 0.01, True),
        ([], 0.01, True),
        # No bound is asked for, or none is found: there is nothing to confirm.
        ([], "unbounded", False),
        ([], 0.005, False),
    ],
)
def test_a_bound_needs_its_confirmation(path, caplog, figures, max_kl, is_refused):
    bounded([ProfileBound(**BOUNDS[0])], figures=figures).write(path)
    told = str(refusal(path, max_kl=max_kl))
    assert told.startswith("profile_evidence: The profile's evidence lacks a confirmation of its bound") == is_refused
    assert refusal(path, max_kl=max_kl, profile_trial=True) is None
    assert "states no bound" not in caplog.text
    path.write_text(json.dumps(ReuseProfile.read(path).model_copy(update={"digest": None}).model_dump(mode="json")))
    assert "lacks a digest" in str(refusal(path, max_kl=max_kl))


@pytest.mark.promise("policies", "A profile without bounds goes on working with a warning, and keeps no number")
@pytest.mark.parametrize(("policy", "warnings"), [("position_fix", 1), ("exact", 0)])
def test_a_profile_without_bounds_is_warned_about_once(path, caplog, policy, warnings):
    unchecked(policy=policy).write(path)
    asked = matcher(path)
    assert match(asked, namespace()).profile is not None
    match(asked, namespace())
    assert caplog.text.count("states no bound for answers; make it again with `python -m validation cal") == warnings
