"""From what a caller hands in to checked token ids, salts and settings."""

from __future__ import annotations

import struct
from array import array
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast

import numpy as np

from semblend_trt.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy.typing as npt

Prompt = Union[str, "Sequence[int]"]

T = TypeVar("T")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list. A sequence that starts with an integer is one prompt of token ids."""
    if isinstance(prompts, str):
        return [prompts]
    items: list[Any] = prompts if isinstance(prompts, list) else list(prompts)
    if not items:
        raise ConfigurationError("the prompt is empty; give text, token ids, or a list with at least one of them")
    if isinstance(items[0], Integral):
        return [cast("Sequence[int]", items)]
    return cast("list[Prompt]", items)


def token_ids_of(prompt: Prompt, tokenizer: Any, vocabulary: int) -> tuple[list[int], npt.NDArray[np.int32]]:
    """Token ids of a prompt, as a list of their own and as int32 [n], checked against the vocabulary.

    The list holds the caller's own integers where they come in a list. Raises ConfigurationError.
    """
    given = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    # A tokenizer may begin even an empty text with a token of its own.
    if len(prompt) == 0 or len(given) == 0:
        raise ConfigurationError("the prompt is empty; at least one token is needed")
    tokens = _packed(given) if isinstance(given, list) else None
    if tokens is None or int(tokens.view(np.uint32).max()) >= vocabulary:
        tokens = _read(given, vocabulary)
    # NumPy's integers come in lists of nothing else; a connector is promised Python's.
    return list(given) if isinstance(given, list) and type(given[0]) is int else tokens.tolist(), tokens


def _packed(given: list[Any]) -> npt.NDArray[np.int32] | None:
    """A list of integers as int32, the fastest way by half; None when it holds anything else."""
    packed = bytearray(4 * len(given))
    try:
        struct.pack_into(f"{len(given)}i", packed, 0, *given)
    except struct.error:
        return None
    return np.frombuffer(packed, dtype=np.int32)


def _read(given: Iterable[Any], vocabulary: int) -> npt.NDArray[np.int32]:
    """Any integers as int32. Raises ConfigurationError, naming what is wrong with them."""
    try:
        # It takes integers only; bytes alone it would not read one by one.
        tokens = np.frombuffer(array("q", iter(given)), dtype=np.int64)
    except TypeError:
        raise ConfigurationError("a prompt is text or a sequence of integer token ids, nothing mixed") from None
    except OverflowError:
        raise ConfigurationError(f"the prompt holds a token id beyond the model's ids, 0..{vocabulary - 1}") from None
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if outside.size:
        raise ConfigurationError(f"the prompt holds token id {outside[0]}; the model's ids are 0..{vocabulary - 1}")
    return tokens.astype(np.int32)


def one_each(name: str, values: Any, number: int, kind: type[T]) -> list[T]:
    """`values`, one of `kind` (or None) for all or a sequence with one each, as a list of `number`."""
    if values is None or isinstance(values, kind):
        return [cast("T", values)] * number
    if not isinstance(values, (list, tuple)) or not all(value is None or isinstance(value, kind) for value in values):
        raise ConfigurationError(f"{name} is {values!r}; give one {kind.__name__}, or a list with one for each prompt")
    if len(values) != number:
        raise ConfigurationError(f"{name} has {len(values)} entries for {number} prompts; give one for each")
    return list(values)


def checked_salt(cache_salt: Any) -> str | None:
    """The salt of a single request. Raises ConfigurationError when it is not text."""
    salt: str | None = one_each("cache_salt", cache_salt, 1, str)[0]
    return salt
