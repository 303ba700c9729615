"""What watching a model's weights costs: at every step, and where a call may have written them.

`python -m benchmarks.weights --json benchmarks/results/<machine>`. Random weights. The check at every step
depends on the number of tensors alone. They are small, and their number is that of 28 layers in vLLM. The
digest reads `--megabytes` of bfloat16.
"""

from functools import partial

import numpy as np
import torch
from torch import nn

from benchmarks.program import Count, run_counted, seconds
from semblend_trt.runtime import Weights, weights_digest
from validation.results import Results

LAYERS, STEPS, GOAL_MS = 28, 2000, 0.1
# Of a layer of Qwen2, joined as in vLLM, and the scales of its attention.
PARAMETERS = ("qkv_weight", "qkv_bias", "o_weight", "gate_up_weight", "down_weight", "norm_weight", "post_norm_weight")
BUFFERS = ("q_scale", "k_scale", "v_scale", "prob_scale")


def model_of(layers: int, elements: int, device: torch.device) -> nn.Module:
    """Return a module that holds the tensors of `layers` layers, `elements` in each parameter."""
    model = nn.ModuleList()
    for _ in range(layers):
        weights = {name: torch.rand(elements, dtype=torch.bfloat16, device=device) for name in PARAMETERS}
        model.append(layer := nn.ParameterDict(weights).requires_grad_(False))
        for name in BUFFERS:
            layer.register_buffer(name, torch.ones(1, device=device))
    return model


def run(megabytes: int, rows: Results) -> None:
    """Add the rows of both checks, on the card where there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights = Weights(model_of(LAYERS, 64, device))
    p50, p99 = np.percentile([seconds(weights.have_changed) * 1e3 for _ in range(STEPS)], [50, 99])
    tensors = LAYERS * (len(PARAMETERS) + len(BUFFERS))
    baseline = f"{tensors} tensors, median of {STEPS} steps; 99 of 100 within {p99:.3f} ms"
    rows.add("weights_check_ms", p50, "ms", baseline, GOAL_MS)
    large = model_of(1, megabytes * 1_000_000 // 2 // len(PARAMETERS), device)
    weights_digest(large)
    took = seconds(weights_digest, large)
    baseline = f"{megabytes} MB in {took:.2f} s, {device.type}"
    rows.add("weights_digest_gb_per_s", megabytes / 1e3 / took, "GB/s", baseline)


main = partial(run_counted, {"weights": run}, __doc__, [Count("megabytes", 400, "that the digest reads")])


if __name__ == "__main__":
    main()
