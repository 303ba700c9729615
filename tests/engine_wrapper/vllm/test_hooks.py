"""What vLLM does not hand over is found among the callers, and its model runners are left as they were found."""

from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from engine_wrapper.self_check import LayoutError
from engine_wrapper.vllm.hooks import find_runner, find_scheduler, watch_worker_calls


def register(self):
    """Finds the runner, as it is among the callers."""
    return find_runner()


class SecondRunner(GPUModelRunner):
    """vLLM's V2 runner at the time when it registers its caches; without a card it makes no batches."""

    def __init__(self, mode):
        self.attn_groups = [["a group"]]
        self.model = torch.nn.Linear(1, 1)
        self.cudagraph_manager = SimpleNamespace(cudagraph_mode=mode)
        self.decode_query_len = 3

    def prepare_inputs(self, *arguments, **options):
        batch = InputBatch.__new__(InputBatch)
        batch.req_ids = list(arguments[0])
        return batch


class FirstRunner:
    """vLLM's V1 runner, as far as a planned forward reads it."""

    def __init__(self, mode):
        self.attn_groups = [["a group"]]
        self.input_batch = SimpleNamespace(req_ids=["a", "b"])
        self.compilation_config = SimpleNamespace(cudagraph_mode=mode)
        self.uniform_decode_query_len = 3
        self.model = torch.nn.Linear(1, 1)

    def get_model(self):
        return self.model


def test_the_second_runner_tells_the_order_of_every_step_and_is_left_as_it_was():
    runner = SecondRunner(CUDAGraphMode.PIECEWISE)
    found = register(runner)
    assert (found.groups, found.model, found.order()) == (["a group"], runner.model, [])
    for step in (["b", "a"], ["c"]):
        assert isinstance(runner.prepare_inputs(step, batch_desc=None), InputBatch)
        assert found.order() == step
    found.remove()
    assert "prepare_inputs" not in vars(runner)
    runner.prepare_inputs(["d"])
    assert found.order() == ["c"]


@pytest.mark.promise(
    "engines",
    "In vLLM a full graph of a decode replays no step whose plan would be lost: such a plan is computed, and later "
    "ones are executed",
)
@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
@pytest.mark.parametrize(
    ("mode", "is_breakable", "replayed"),
    [
        (CUDAGraphMode.FULL, False, None),
        (CUDAGraphMode.FULL_AND_PIECEWISE, False, 3),
        (CUDAGraphMode.FULL_DECODE_ONLY, False, 3),
        (CUDAGraphMode.FULL_AND_PIECEWISE, True, None),
        (CUDAGraphMode.PIECEWISE, True, None),
        (CUDAGraphMode.PIECEWISE, False, 0),
        (CUDAGraphMode.NONE, True, 0),
    ],
)
def test_prefills_that_are_replayed_whole_are_refused(kind, mode, is_breakable, replayed, monkeypatch):
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", str(int(is_breakable)))
    runner = kind(mode)
    if replayed is not None:
        found = register(runner)
        assert (found.model, found.replayed) == (runner.model, replayed)
        return
    with pytest.raises(LayoutError) as refused:
        register(runner)
    assert refused.value.reason == "full_cuda_graphs"
    assert "prepare_inputs" not in vars(runner)


@pytest.mark.parametrize(
    ("find", "problem"),
    [
        (find_runner, "the model runner is of a kind that is not known"),
        (lambda: watch_worker_calls(None), "executor is of a kind that is not known"),
        (find_scheduler, "the scheduler is not among the callers"),
    ],
    ids=["runner", "executor", "scheduler"],
)
def test_objects_of_another_kind_are_not_taken(find, problem):
    with pytest.raises(LookupError, match=problem):
        find()
