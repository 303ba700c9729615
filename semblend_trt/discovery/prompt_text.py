"""Text from token ids, as the model's own tokenizer writes it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt


def text_decoder(folder: Path) -> Callable[[npt.NDArray[np.int32]], str]:
    """A function from token ids int32 [n] to text without special tokens, for the tokenizer in a model's folder.

    It leaves the interpreter's lock while it decodes. Raises ConfigurationError without a tokenizer.json that can be
    read.
    """
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise ConfigurationError(f"the tokenizer {path} cannot be read: {error}") from error

    def decode(tokens: npt.NDArray[np.int32]) -> str:
        # decode() keeps the lock, decode_batch() does not.
        (text,) = tokenizer.decode_batch([tokens.tolist()], skip_special_tokens=True)
        return str(text)

    return decode
