"""Weights: notices that the model of a running engine has got other weights than its KV was computed with.

Training loops and hot updates write parameters in place. KV and a reuse profile belong to the weights before.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from itertools import chain, compress
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any

import torch

from semblend_trt.namespace import unknown_value

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

# Words of 4 bytes that are summed together, each times a factor of its own.
_CHUNK = 1 << 20
_values: Callable[[Any], Iterable[torch.Tensor | None]] = dict.values


class Weights:
    """The parameters and buffers of one model on one rank.

    `have_changed` compares contents only if something points to a write: the end of a tensor, another address, a higher
    write count of torch (`Tensor._version`), or a call of `suspect`. A write through `Tensor.data` or a raw pointer
    raises no count, so every engine call that may write weights must call `suspect`.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Reads all weights once. Raises RuntimeError or TypeError for tensors without an address."""
        self._model = model
        self._is_suspect = self._was_reset = False
        self._watch()
        self._first = self._digest = weights_digest(model)
        self.prefix_is_stale = False

    @property
    def are_first(self) -> bool:
        """True while the weights equal those that the engine started with."""
        return self._digest == self._first

    def suspect(self) -> None:
        """Have the next `have_changed` compare contents: a call that may write weights has been made."""
        if not self._is_suspect:
            self._is_suspect, self._was_reset = True, False

    def prefix_cache_reset(self) -> None:
        """Note that the engine has emptied its own prefix cache."""
        self._was_reset, self.prefix_is_stale = True, False

    def have_changed(self) -> bool:
        """Return True once for every change of contents. Raises nothing: what cannot be read counts as changed.

        After a change `prefix_is_stale` until the engine's prefix cache is reset: it holds KV of the weights before.
        """
        if not self._is_suspect and not self._is_touched():
            return False
        try:
            self._watch()
            digest = weights_digest(self._model)
        except Exception:
            logger.exception("the model's weights cannot be read; they count as changed")
            digest = unknown_value()
        changed = digest != self._digest
        if changed:
            self.prefix_is_stale = not (self._is_suspect and self._was_reset)
        self._digest, self._is_suspect = digest, False
        return changed

    def _watch(self) -> None:
        """Note what each tensor shows now."""
        modules = list(self._model.modules())
        self._held = [each for module in modules for each in (module._parameters, module._buffers) if each]
        tensors = self._tensors()
        self._addressed = [each is not None for each in tensors]
        self._counted = [each is not None and not each.is_inference() for each in tensors]
        self._seen = self._shown()
        # An address may be given again, but only after the tensor's end. Nothing replaced is kept alive.
        watched = [*modules, *compress(tensors, self._addressed)]
        self._alive = [weakref.ref(each, self._on_death) for each in watched]

    def _on_death(self, _: object) -> None:
        self._held.clear()
        self.suspect()

    def _is_touched(self) -> bool:
        try:
            return self._shown() != self._seen
        except (RuntimeError, TypeError):  # a tensor without an address or a count has come in the place of another
            return True

    def _tensors(self) -> list[torch.Tensor | None]:
        return list(chain.from_iterable(map(_values, self._held)))

    def _shown(self) -> tuple[list[int], list[int]]:
        """Addresses, and write counts, which inference tensors lack. Passes in C alone: this runs at every step."""
        tensors = self._tensors()
        addresses = list(map(methodcaller("data_ptr"), compress(tensors, self._addressed)))
        return addresses, list(map(attrgetter("_version"), compress(tensors, self._counted)))


def weights_digest(model: torch.nn.Module) -> str:
    """Return a digest of the names, dtypes, shapes and bytes of all parameters and buffers, in hex.

    Contents enter as sums of 4-byte words times pseudo-random factors (multilinear hashing: Carter and Wegman, 1979),
    which a card computes at the speed of its memory. Two models differ with probability 1 - 2^-32 or more.
    Waits for the device.
    """
    digest, factors = hashlib.blake2b(digest_size=16), dict[torch.device, torch.Tensor]()
    with torch.inference_mode():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            found = _sums(tensor, factors).tolist()
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {found}\n".encode())
    return digest.hexdigest()


def _sums(tensor: torch.Tensor, factors: dict[torch.device, torch.Tensor]) -> torch.Tensor:
    """One sum for each chunk, int64 [chunks]."""
    if tensor.is_meta or not tensor.numel():
        return torch.empty(0, dtype=torch.int64)
    if tensor.device not in factors:
        drawn = torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), generator=torch.Generator().manual_seed(49))
        factors[tensor.device] = drawn.to(tensor.device)
    octets = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if octets.storage_offset() % 4:
        octets = octets.clone()  # words begin at whole addresses
    whole = octets.numel() // 4 * 4
    words = [*octets[:whole].view(torch.int32).split(_CHUNK), *octets[whole:].split(_CHUNK)]
    return torch.stack([_dot(each.long(), factors[tensor.device][: each.numel()]) for each in words])


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    # CUDA has no dot product of integers.
    return (left * right).sum() if left.is_cuda else torch.dot(left, right)
