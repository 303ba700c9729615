"""Settings and plans of the wrapper's tests."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from semblend_trt.plan import (
    EngineExecution,
    EngineMode,
    PlanKind,
    PlanSpan,
    SemanticKvPlan,
    SpanCheck,
)

PlanMaker = Callable[..., SemanticKvPlan]


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests share their processors; only those of the deadline may meet it."""
    monkeypatch.setenv("SEMBLEND_LOOKUP_DEADLINE_MS", "10000")


@pytest.fixture(scope="session")
def make_plan() -> PlanMaker:
    def build(
        tokens: Sequence[int],
        spans: Sequence[tuple[int, int]],
        *,
        num_layers: int,
        block_size: int,
        request_id: int = 1,
        boundary: int = 0,
        num_computed: int = 0,
        prefix_end: int | None = None,
        kind: PlanKind = PlanKind.REQUEST_LOCAL,
        shift: int = 0,
        exact: Collection[int] = (),
        check: SpanCheck | None = None,
        head: int = 0,
    ) -> SemanticKvPlan:
        """`spans` are (start, end) in the prompt, those whose index is in `exact` exact; `prefix_end` is the last
        span's end unless given."""
        end = prefix_end if prefix_end is not None else max((end for _, end in spans), default=num_computed)
        return SemanticKvPlan(
            request_id=request_id,
            kind=kind,
            spans=tuple(
                PlanSpan("donor", start + (0 if index in exact else shift), start, stop - start, index in exact)
                for index, (start, stop) in enumerate(spans)
            ),
            prompt_token_ids=np.array(tokens, dtype=np.int32),
            num_computed_tokens=num_computed,
            matched_tokens=0 if kind is PlanKind.DISCOVERY_ONLY else end - num_computed,
            block_size=block_size,
            execution=EngineExecution(EngineMode.WRAPPER, num_layers, boundary, check, head),
        )

    return build


@pytest.fixture
def interpret(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called in a test, it sends what follows through Triton's interpreter, unless there is a card to run it; the test
    is skipped without Triton."""
    if not find_spec("triton"):
        pytest.skip("skipped: Triton is not installed (the extra `gpu`)")

    def begin() -> None:
        if torch.cuda.is_available():
            return
        from triton.runtime import interpreter

        # As in tests/kernels/conftest.py: NumPy 2.4 refuses `int` of the arrays in which the interpreter holds scalars.
        patch_tensor = interpreter._patch_lang_tensor

        def patch(tensor: type, scope: Any) -> None:
            patch_tensor(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

        monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
        monkeypatch.setenv("TRITON_INTERPRET", "1")

    return begin
