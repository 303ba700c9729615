"""The CUDA graphs that vLLM captured of its compiled model, replayed for rows that are not a step's.

Facts: vLLM, `compilation/cuda_graph.py`.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor

from engine_wrapper.vllm.hooks import forward_context

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch


class StepGraphs:
    """The graphs of what lies between two attentions.

    They read the two buffers that steps hand to the model, and one that says which rows are padding.
    """

    def __init__(
        self, input_ids: torch.Tensor, positions: torch.Tensor, is_padding: torch.Tensor | None = None
    ) -> None:
        """`input_ids`, `positions` and, where the engine has it, `is_padding`: [rows of a step], the beginning of the
        buffers. Graphs that read other buffers are left out."""
        self._buffers = [each for each in (input_ids, positions, is_padding) if each is not None]
        addresses = {each.data_ptr() for each in (input_ids, positions)}
        parts = [
            each.concrete_cudagraph_entries
            for each in CUDAGraphWrapper._all_instances
            if each.runtime_mode is CUDAGraphMode.PIECEWISE
        ]
        # Adapters have batches of their own.
        plain = [each for each in (parts[0] if parts else ()) if each == BatchDescriptor(each.num_tokens)]
        found = [each for each in plain if _read([part.get(each) for part in parts], addresses)]
        self._batches = sorted(found, key=lambda each: each.num_tokens) if positions.ndim == 1 else []

    @contextmanager
    def replayed(self, input_ids: torch.Tensor, positions: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What to call the model with for these rows, within vLLM's forward context: the buffers, longer by padding, if
        a graph has room for the rows. The step finds its buffers as it left them."""
        rows = len(input_ids)
        batch = next((each for each in self._batches if each.num_tokens >= rows), None)
        if batch is None:
            yield input_ids, positions
            return
        ids, places, *padding = buffers = [each.as_strided((batch.num_tokens,), (1,)) for each in self._buffers]
        kept = [each.clone() for each in buffers]
        ids[:rows], places[:rows] = input_ids, positions
        for each in padding:
            each[:rows], each[rows:] = False, True
        try:
            with forward_context(batch_descriptor=batch, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE):
                yield ids, places
        finally:
            for each, own in zip(buffers, kept, strict=True):
                each.copy_(own)


def _read(graphs: Sequence[Any], addresses: set[int]) -> bool:
    """Whether all parts of the model have a graph, and these read the addresses."""
    is_whole = all(each is not None and each.cudagraph is not None for each in graphs)
    return is_whole and addresses <= {address for each in graphs for address in each.input_addresses}
