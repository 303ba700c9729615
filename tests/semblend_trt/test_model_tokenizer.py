"""A model's tokenizer: by its own rules where Transformers would take those of the model's type, or a clear refusal."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from semblend_trt.errors import ConfigurationError
from semblend_trt.model_tokenizer import load_tokenizer, tokenizer_file

TEXT = "It's 12 345 o'clock,  and naïve."


def test_the_files_own_rules_hold(tiny_qwen2_path):
    """Transformers would split text as Qwen2's tokenizer does, against the file."""
    written = Tokenizer.from_file(str(tiny_qwen2_path / "tokenizer.json"))
    assert load_tokenizer(str(tiny_qwen2_path)).encode(TEXT) == written.encode(TEXT).ids
    by_type, by_file = (
        json.loads(each.to_str())["pre_tokenizer"]
        for each in (AutoTokenizer.from_pretrained(tiny_qwen2_path).backend_tokenizer, written)
    )
    used = load_tokenizer(str(tiny_qwen2_path)).backend_tokenizer
    assert by_type != by_file
    assert json.loads(used.to_str())["pre_tokenizer"] == by_file


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigurationError, match=f"tokenizer {tmp_path} cannot be read"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"tokenizer\.json cannot be read"):
        tokenizer_file(tmp_path)
