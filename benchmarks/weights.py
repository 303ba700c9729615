"""What watching a model's weights costs: at every step, and where a call may have written them.

`python -m benchmarks.weights --json benchmarks/results/<machine>`. Random weights. The check at every step
depends on the number of tensors alone. They are small, and their number is that of 28 layers in vLLM. The
digest reads `--megabytes` of bfloat16.
"""

import time
from functools import partial

import torch
from torch import nn

from benchmarks.program import Count, run_counted
from semblend_trt.runtime import Weights, weights_digest
from validation.results import Results

LAYERS, STEPS, GOAL_MS = 28, 2000, 0.1
# Of a layer of Qwen2, joined as in vLLM, and the scales of its attention.
PARAMETERS = ("qkv.weight", "qkv.bias", "o.weight", "gate_up.weight", "down.weight", "norm.weight", "post_norm.weight")
BUFFERS = ("q_scale", "k_scale", "v_scale", "prob_scale")


def model_of(layers: int, elements: int, device: torch.device) -> nn.Module:
    """Return a module that holds the tensors of `layers` layers, `elements` in each parameter."""
    model = nn.ModuleList()
    for _ in range(layers):
        layer = nn.Module()
        for name in PARAMETERS:
            held = nn.Parameter(torch.rand(elements, dtype=torch.bfloat16, device=device), requires_grad=False)
            layer.register_parameter(name.replace(".", "_"), held)
        for name in BUFFERS:
            layer.register_buffer(name, torch.ones(1, device=device))
        model.append(layer)
    return model


def run(megabytes: int, rows: Results) -> None:
    """Add the rows of both checks, on the card where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights, taken = Weights(model_of(LAYERS, 64, device)), []
    for _ in range(STEPS):
        began = time.perf_counter()
        weights.have_changed()
        taken.append((time.perf_counter() - began) * 1e3)
    tensors = LAYERS * (len(PARAMETERS) + len(BUFFERS))
    taken.sort()
    baseline = f"{tensors} tensors, median of {STEPS} steps; 99 of 100 within {taken[STEPS * 99 // 100]:.3f} ms"
    rows.add("weights_check_ms", taken[STEPS // 2], "ms", baseline, GOAL_MS)
    large = model_of(1, megabytes * 1_000_000 // 2 // len(PARAMETERS), device)
    weights_digest(large)
    began = time.perf_counter()
    weights_digest(large)
    seconds = time.perf_counter() - began
    rows.add(
        "weights_digest_gb_per_s",
        megabytes / 1e3 / seconds,
        "GB/s",
        f"{megabytes} MB in {seconds:.2f} s, {device.type}",
    )


main = partial(run_counted, {"weights": run}, __doc__, [Count("megabytes", 400, "that the digest reads")])


if __name__ == "__main__":
    main()
