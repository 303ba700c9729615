"""The shipped model is small, and its tokenizer and its profile hold for it."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import validation
from kernels.layout import KvGeometry
from semblend_trt.config import Settings
from semblend_trt.connector.lookup import namespace_for
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.reuse_profile import EVIDENCE_FAMILIES, ReuseProfile
from tests.semblend_trt.engine_specs import known_engine
from validation import documents, prompts
from validation.families.catalog import FamilyRequest, Kind, family
from validation.metrics import MARGIN
from validation.models import PROFILE_NAME

ASSETS = Path(validation.__file__).parent / "assets"
MODEL = ASSETS / "model"
PROFILES = sorted(Path(__file__).parents[2].glob("docs/profiles/*.json"))


@pytest.mark.promise(
    "policies",
    "The shipped model has a profile of confirmed figures, of at most 10 MB with its weights",
)
def test_its_profile_is_of_confirmed_figures():
    assert sum(file.stat().st_size for file in MODEL.iterdir()) <= 10_000_000
    profile = ReuseProfile.read(MODEL / PROFILE_NAME)
    confirmed = [each for each in profile.figures if isinstance(each, dict) and each["what"] == "confirmed"]
    bounds = [each[name] for each in confirmed for name in ("exact_match_vs_cold", "log_likelihood_vs_cold")]
    assert profile.policy == "verified"
    assert {"header_trap", "near_duplicates", "reordered", "prose"} <= {str(each["family"]) for each in confirmed}
    assert all(bound["lower"] >= -MARGIN for bound in bounds if bound is not None)


@pytest.mark.parametrize("path", [MODEL / PROFILE_NAME, *PROFILES], ids=lambda path: path.stem)
def test_recorded_profiles_hold_their_digest_and_the_evidence_that_they_need(path):
    profile = ReuseProfile.read(path)
    assert profile.digest is not None
    assert profile.evidence_refusal() is None
    # Of the checked ones without bounds, which are confirmed one by one, none could be served without its check.
    unchecked = profile.model_copy(update={"policy": "position_fix", "check": None})
    assert profile.bounds or unchecked.evidence_refusal() is not None


def test_what_is_evidence_is_what_a_calibration_asks():
    kinds = {family(name).kind for name in EVIDENCE_FAMILIES}
    assert kinds == {Kind.HARMLESS, Kind.TRAP}
    assert set(EVIDENCE_FAMILIES) <= set(FamilyRequest().family_names())


def test_tokenizer_adds_nothing_and_knows_the_marks():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    text = documents.excerpt(random.Random(1), 2_000)
    prompt = prompts.render("Answer briefly.", [text], "How many bolts are in Depot Oslo?")
    ids = tokenizer(prompt).input_ids
    assert (ids[0], ids[-1], [token for token in ids if token < 6]) == (1, 4, [1, 2, 3, 4])
    assert tokenizer.decode(ids) == prompt
    assert ids == Tokenizer.from_file(str(MODEL / "tokenizer.json")).encode(prompt).ids
    assert len(tokenizer("231").input_ids) == 3


@pytest.mark.promise("policies", "Block size, tenant, template, salt and...")
def test_its_profile_holds_for_it_under_another_name(tmp_path):
    renamed = tmp_path / "another-name"
    renamed.symlink_to(MODEL)
    facts, profile = model_facts(renamed), ReuseProfile.read(MODEL / PROFILE_NAME)
    namespace = namespace_for(known_engine(renamed, dtype="float32"), facts, Settings(), 32, "float32")
    geometry = KvGeometry(facts.num_layers, facts.kv_heads, facts.head_dim, 32)
    assert profile.differences(replace(namespace, backend_cache_layout=profile.engines[0]), geometry) == []
