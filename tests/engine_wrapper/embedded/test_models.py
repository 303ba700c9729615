"""What the embedded engine says at its door of an installation that it cannot run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import transformers

from engine_wrapper.embedded.llm import LLM
from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("version", ["4.53.1", "4.57.1", "4.99.0.dev0"])
def test_transformers_4_is_refused_in_one_sentence(
    tiny_qwen2_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(
        ConfigurationError, match=rf"Transformers {version} is installed.*need 5\.0 or later"
    ) as refused:
        LLM(model=tiny_qwen2_path)
    assert "\n" not in str(refused.value)
