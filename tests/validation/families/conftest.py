"""Prompt forms with the tokenizers that they are meant for."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from validation.families.catalog import FamilyRequest, write_family
from validation.models import shipped_model
from validation.prompts import PLAIN, SHIPPED, YARDSTICK, PromptForm

SHARED = Path(__file__).parents[4] / "shared"


@dataclass(frozen=True)
class Writer:
    form: PromptForm
    tokenizer: Tokenizer

    def count(self, text):
        return len(self.tokenizer.encode(text).ids)

    def write(self, name, **changes):
        asked = {"seed": 3, "groups": 2, "questions": 4, "tokens": 900} | changes
        return write_family(name, self.form, self.count, FamilyRequest(**asked))


@pytest.fixture(scope="session", params=[SHIPPED, YARDSTICK], ids=lambda form: form.name)
def writer(request):
    folder = shipped_model() if request.param is SHIPPED else SHARED / "models" / "yardstick-22m"
    if not folder.is_dir():
        pytest.skip("../shared not present")
    return Writer(request.param, Tokenizer.from_file(str(folder / "tokenizer.json")))


@pytest.fixture(scope="session")
def english():
    """A writer of plain English, whose tokens are those of the shipped model."""
    return Writer(PLAIN, Tokenizer.from_file(str(shipped_model() / "tokenizer.json")))
