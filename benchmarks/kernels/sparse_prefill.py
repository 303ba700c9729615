"""Measures sparse_prefill and write_rows: dense against torch's flash SDPA, sparse rows, suffixes and decode.

The shape is one layer of Qwen2.5-7B (28 query heads, 4 KV heads, head dimension 128, bf16) in a pool of 28 layers whose
blocks are shuffled. Every output is checked before it is timed. Speeds are beside those of the card's own limits.

Then attention_mass: 64 rows over 24k tokens, beside torch and the rows' forward, in the same shape. The price is that
of the mass and of the log-sum-exp that the rows' attention stores for it. The rows' own forward is a layer's matrix
products (hidden 3,584, inner 18,944) and its attention.
"""

import sys
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.kernels import ceilings as card
from benchmarks.kernels.ceilings import QWEN_7B, add_share, check_close, copy_gbps, run_on_card, time_ms
from kernels.attention_mass import attention_mass_by_torch, triton_mass
from kernels.layout import PoolLayer
from kernels.sparse_prefill import Queries, SequenceRows, gathered, sparse_prefill_by_torch
from kernels.sparse_prefill.triton_attention import sparse_prefill, write_rows
from validation.results import Results

HEADS = 28
LAYER, SCALE = 14, float(QWEN_7B.head_dim**-0.5)
MAX_ERROR = 1e-2
DENSE_TOKENS = (8192, 16384, 24576, 32768)
SPARSE_TOKENS = 24576
SPARSE_PERCENT = (1, 5, 10, 25)
SUFFIX_ROWS = 128
FP8 = torch.float8_e4m3fn
# One row over all tokens, by the dtype of KV, under a query in bf16.
DECODE = {"decode_24k": torch.bfloat16, "decode_24k_fp8": FP8}
SDPA_GOAL, SPARSE_GOAL = 0.70, 1.6


class Case:
    """Rows at `positions` of a sequence of random KV in shuffled blocks of a pool, on the card."""

    def __init__(self, positions: torch.Tensor, kv_dtype: torch.dtype = torch.bfloat16) -> None:
        held = card.random_pool(int(positions[-1]) + 1, kv_dtype)
        self.q = torch.randn(len(positions), HEADS, QWEN_7B.head_dim, device="cuda", dtype=torch.bfloat16)
        self.kv = PoolLayer(held.pool, LAYER, QWEN_7B)
        self.sequence = SequenceRows(0, positions, held.block_ids).to("cuda")

    @property
    def attended(self) -> int:
        """Pairs of a row and a token that it attends to, of one head."""
        return int((self.sequence.host_positions + 1).sum())

    @property
    def flops(self) -> float:
        """Multiplications and additions of both products, of all heads."""
        return 4.0 * self.attended * self.q.shape[1] * QWEN_7B.head_dim

    def run(self) -> torch.Tensor:
        """Make one launch."""
        return sparse_prefill(Queries(self.q, self.kv, (self.sequence,), SCALE))

    def check(self, output: torch.Tensor) -> float:
        """Return the relative error of some rows against float64 attention; end the program if it is large."""
        rows = torch.linspace(0, self.sequence.count - 1, min(self.sequence.count, 16)).long()
        some = SequenceRows(0, self.sequence.host_positions[rows], self.sequence.host_block_ids)
        expected = sparse_prefill_by_torch(Queries(self.q[rows].double(), self.kv, (some,), SCALE))
        return check_close("sparse_prefill", output[rows], expected, MAX_ERROR)

    def timed(self, repeats: int = 20) -> tuple[float, float]:
        """Return milliseconds of one launch, and the error of its output."""
        error = self.check(self.run())
        return time_ms(self.run, repeats=repeats), error

    def dense_kv(self) -> torch.Tensor:
        """Return [2, kv_heads, tokens, head_dim] of the sequence, gathered."""
        return torch.stack([gathered(self.kv, self.sequence, 0, self.q.dtype, kind) for kind in (0, 1)])

    def sdpa_ms(self) -> float:
        """Return milliseconds of torch's causal attention on the same queries, K and V, gathered beforehand."""
        # keys, values: [1, kv_heads, tokens, head_dim]
        keys, values = (kind[None].contiguous() for kind in self.dense_kv())
        given, causal = (self.q.transpose(0, 1)[None].contiguous(), keys, values), len(self.q) > 1
        attend = partial(scaled_dot_product_attention, *given, is_causal=causal, scale=SCALE, enable_gqa=True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return time_ms(attend, repeats=10)


def random_rows(tokens: int, percent: int) -> torch.Tensor:
    """Return sorted positions of `percent` per cent of `tokens`, the last token always among them."""
    chosen = torch.randperm(tokens - 1, generator=torch.Generator().manual_seed(percent))
    return torch.cat((chosen[: tokens * percent // 100 - 1].sort().values, torch.tensor([tokens - 1])))


def measure_dense(results: Results) -> float:
    """Add the rows of dense prefill; return its milliseconds at SPARSE_TOKENS."""
    times, shares = {}, {}
    for tokens in DENSE_TOKENS:
        case, size = Case(torch.arange(tokens)), f"{tokens // 1024}k"
        times[tokens], error = case.timed(repeats=10)
        flash = case.sdpa_ms()
        shares[size], tflops = flash / times[tokens], case.flops / times[tokens] / 1e9
        limit = f"{tflops / card.matmul_tflops():.2f} of the matrix product's {card.matmul_tflops():.0f} TFLOP/s"
        baseline = f"torch SDPA flash: {flash:.3f} ms, {case.flops / flash / 1e9:.0f} TFLOP/s; error {error:.1e}"
        results.add(f"dense_prefill_{size}_tflops", tflops, "TFLOP/s", f"{limit}; {baseline}", better="higher")
        results.add(f"dense_prefill_share_of_sdpa_{size}", shares[size], "ratio", baseline, SDPA_GOAL, "higher")
    baseline = f"torch SDPA flash, the least of {', '.join(shares)}"
    results.add("dense_prefill_share_of_sdpa", min(shares.values()), "ratio", baseline, SDPA_GOAL, "higher")
    return times[SPARSE_TOKENS]


def measure_rows(results: Results, name: str, case: Case, dense_ms: float, goal: float | None = None) -> None:
    """Add the rows of some rows of SPARSE_TOKENS: time over (their share of the causal work x the dense time)."""
    (ours, error), share = case.timed(), case.attended / (SPARSE_TOKENS * (SPARSE_TOKENS + 1) / 2)
    baseline = f"{share:.4f} of the causal work x dense {dense_ms:.3f} ms; error {error:.1e}"
    results.add(f"{name}_ms", ours, "ms", baseline)
    results.add(name, ours / (share * dense_ms), "ratio", baseline, goal)


def measure_few_rows(results: Results, dense_ms: float) -> None:
    """Add the rows of random rows, of a short suffix, and of decode; of the last two in fp8 too."""
    for percent in SPARSE_PERCENT:
        case = Case(random_rows(SPARSE_TOKENS, percent))
        measure_rows(results, f"sparse_prefill_{percent}pct", case, dense_ms, SPARSE_GOAL)
    suffix = torch.arange(SPARSE_TOKENS - SUFFIX_ROWS, SPARSE_TOKENS)
    measure_rows(results, f"suffix_{SUFFIX_ROWS}_24k_fp8", Case(suffix, FP8), dense_ms)
    measure_rows(results, f"suffix_{SUFFIX_ROWS}_24k", Case(suffix), dense_ms)
    for name, kv_dtype in DECODE.items():
        case = Case(torch.tensor([SPARSE_TOKENS - 1]), kv_dtype)
        ours, error = case.timed()
        speed = SPARSE_TOKENS * QWEN_7B.bytes_per_token(kv_dtype) / QWEN_7B.num_layers / ours / 1e6
        limit = f"{speed / copy_gbps():.2f} of the copy's {copy_gbps():.0f} GB/s"
        baseline = f"torch SDPA flash {case.sdpa_ms():.3f} ms; {limit}; error {error:.1e}"
        results.add(f"{name}_ms", ours, "ms", baseline)
        results.add(f"{name}_gbps", speed, "GB/s", baseline, better="higher")


def measure_write(results: Results) -> None:
    """Add the row of write_rows over all rows of a dense prefill, and check what it wrote."""
    case = Case(torch.arange(SPARSE_TOKENS))
    shape = (2, SPARSE_TOKENS, QWEN_7B.kv_heads, QWEN_7B.head_dim)
    k, v = torch.randn(shape, device="cuda", dtype=torch.bfloat16).unbind()
    write = partial(write_rows, k, v, case.kv, (case.sequence,))
    write()
    if not torch.equal(case.dense_kv().transpose(1, 2), torch.stack((k, v))):
        sys.exit("write_rows is wrong: the pool does not hold the rows")
    add_share(results, "write_rows_24k", time_ms(write), 4 * k.nbytes)


def measure(results: Results) -> None:
    """Add all rows."""
    measure_few_rows(results, measure_dense(results))
    measure_write(results)


# Rows whose attention is summed, over SPARSE_TOKENS.
MASS_ROWS = 64
HIDDEN, INNER = 3584, 18944
# Attention is summed over the upper half of the layers.
LAYERS_SHARE, FORWARD_GOAL = 0.5, 0.10


def layer_ms(case: Case) -> float:
    """Return milliseconds of one decoder layer over the case's rows, without norms."""
    qkv = HIDDEN + 2 * QWEN_7B.kv_heads * QWEN_7B.head_dim
    sizes = [(HIDDEN, qkv), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN)]
    weights = [torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in sizes]
    inputs = [torch.randn(MASS_ROWS, size[0], dtype=torch.bfloat16, device="cuda") for size in sizes]

    def forward() -> None:
        for values, weight in zip(inputs, weights, strict=True):
            torch.mm(values, weight)
        silu(inputs[-1])
        case.run()

    return time_ms(forward)


def measure_mass(results: Results) -> None:
    """Add all rows."""
    case = Case(torch.arange(SPARSE_TOKENS - MASS_ROWS, SPARSE_TOKENS))
    lse, plain = torch.empty(2, MASS_ROWS, HEADS, device="cuda")
    asked = Queries(case.q, case.kv, (case.sequence,), SCALE, lse=lse)
    into = torch.zeros(QWEN_7B.kv_heads, SPARSE_TOKENS, device="cuda")
    attend = partial(sparse_prefill, asked)
    mass, in_torch = partial(triton_mass.attention_mass, asked, lse), partial(attention_mass_by_torch, asked, plain)
    case.check(attend())
    sparse_prefill_by_torch(asked._replace(lse=plain))
    error = check_close("lse", lse, plain, MAX_ERROR)
    error = max(error, check_close("attention_mass", mass(into.clone()), in_torch(into.clone()), MAX_ERROR))
    of_mass, of_torch = (time_ms(partial(run, into)) for run in (mass, in_torch))
    without, of_rows = time_ms(case.run), time_ms(attend)
    flops = 2.0 * case.attended * HEADS * QWEN_7B.head_dim
    against = f"{flops / of_mass / 1e9:.0f} TFLOP/s; copy {copy_gbps():.0f} GB/s; error {error:.1e}"
    results.add("attention_mass_64_rows_24k_ms", of_mass, "ms", against)
    results.add("attention_mass_lse_ms", of_rows - without, "ms", f"sparse_prefill without lse: {without:.3f} ms")
    num_bytes = SPARSE_TOKENS * QWEN_7B.bytes_per_token(torch.bfloat16) / QWEN_7B.num_layers / 2
    add_share(results, "attention_mass", of_mass, num_bytes)
    results.add("attention_mass_over_torch", of_mass / of_torch, "ratio", f"torch: {of_torch:.3f} ms")
    whole, price = layer_ms(case), of_mass + of_rows - without
    against = f"mass and lse in {LAYERS_SHARE:.0%} of the layers; one layer of the rows takes {whole:.3f} ms"
    results.add("attention_mass_share_of_forward", price * LAYERS_SHARE / whole, "ratio", against, FORWARD_GOAL)


if __name__ == "__main__":
    run_on_card(__doc__, sparse_prefill=measure, attention_mass=measure_mass)
