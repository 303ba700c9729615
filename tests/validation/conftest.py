"""Samples and rows that several tests build."""

from dataclasses import MISSING, fields

import pytest

from tests.random_models import byte_tokenizer
from tests.validation import trtllm_stand_in
from validation.cli import main
from validation.embedded_engine import EmbeddedEngines
from validation.models import load
from validation.results import Measured
from validation.samples import Sample

_SAMPLE = dict.fromkeys(each.name for each in fields(Sample) if each.default is MISSING)
_SAMPLE |= dict.fromkeys(("rouge1_cold", "rouge_l_cold", "token_f1_cold", "token_agreement", "perplexity_ratio"), 1.0)
_SAMPLE |= dict.fromkeys(("rouge1_reference", "rouge_l_reference", "token_f1_reference"), 1.0)
_SAMPLE |= {"case_id": "case", "group": "case", "workload": "reordered", "size": "2048", "expects": "reuse"}
_SAMPLE |= {"arm": "position_fix", "repeat": 0, "timed": True, "ttft_s": 0.1, "speedup": 4.0}
_SAMPLE |= {"answer": "42", "reference": "42", "answer_tokens": 3, "exact_match": True, "perplexity": 1.1}
_SAMPLE |= {"prompt_tokens": 2000, "exact_prefix_tokens": 0, "expected_exact_tokens": 0, "offered_tokens": 1900}
_SAMPLE |= {"sampled_tokens": 0, "checked_tokens": 1900, "reused_tokens": 1900, "recomputed_tokens": 0}
_SAMPLE |= {"computed_tokens": 100, "computed_share": 0.4, "largest_kept": 0.1, "first_token_kl": 0.001}
_SAMPLE |= {"outcome": "backend_materialized_reuse"}


@pytest.fixture(scope="session")
def shipped():
    """Embedded engines over the shipped model in float32."""
    return EmbeddedEngines(load(None, "cpu", "float32"))


@pytest.fixture
def _trtllm(monkeypatch):
    """Makes a stand-in for `tensorrt_llm` importable."""
    trtllm_stand_in.install(monkeypatch)


@pytest.fixture(scope="session")
def make_sample():
    """Builds a sample of a reused prompt; keywords change its fields."""
    return lambda **changes: Sample(**(_SAMPLE | changes))


CHATML = (
    "{% for each in messages %}<|start|>{{ each.role }}\n{{ each.content | trim }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def chat_tokenizer():
    """Builds a tokenizer of one token a byte, with two special ones and a chat template."""

    def build(template=CHATML):
        tokenizer = byte_tokenizer()
        tokenizer.add_tokens(["<|start|>", "<|stop|>"], special_tokens=True)
        tokenizer.chat_template = template
        return tokenizer

    return build


@pytest.fixture(scope="session")
def chat_model_path(chat_tokenizer, tmp_path_factory):
    """The folder of such a tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizer")
    chat_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture
def check_refused(tmp_path, monkeypatch, capsys):
    """Checks that a command line is bad usage: one sentence that holds the one given, and nothing written."""

    def check(arguments, sentence):
        monkeypatch.chdir(tmp_path)
        assert main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith("validation: ")
        assert captured.out == ""
        assert captured.err.count("\n") == 1
        assert sentence in captured.err
        assert list(tmp_path.rglob("*")) == []

    return check


@pytest.fixture(scope="session")
def measured():
    """What the rows of an imagined run share."""
    return Measured("python -m validation", {"name": "cpu-2core", "cores": 2}, {"torch": "2.13.0"}, "2026-11-21")
