"""A tiny model over a pool of its own, for tests of forwards with and without plans."""

from dataclasses import replace

import torch
from transformers import AutoModelForCausalLM

from engine_wrapper.batch import EngineForward, LastSamples
from engine_wrapper.sparse_forward import SparseForward
from engine_wrapper.token_schedule import SequenceSlice, works_of
from kernels.layout import KvGeometry, pool_view
from semblend_trt.ranks import Ranks
from tests.builders.shards import keep_shard

BLOCK_SIZE, BLOCKS_A_REQUEST, NUM_LAYERS = 8, 12, 3
TOLERANCE = 1e-4
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Bench:
    """One tiny model, or a rank's part of it, over a pool whose unwritten KV is NaN."""

    def __init__(self, model, ranks=None, kv_dtype=None):
        self.model = model
        keep_shard(model, ranks or Ranks())
        config = model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.geometry = KvGeometry(NUM_LAYERS, config.num_key_value_heads, head_dim, BLOCK_SIZE)
        if getattr(config, "kv_lora_rank", None):
            self.geometry = KvGeometry(
                NUM_LAYERS, 1, config.kv_lora_rank + config.qk_rope_head_dim, BLOCK_SIZE, kv_factor=1
            )
        shape = (4 * BLOCKS_A_REQUEST, NUM_LAYERS, self.geometry.kv_factor, self.geometry.row_elements)
        self.pool = torch.empty(shape, device=DEVICE, dtype=kv_dtype or model.dtype)
        self.forward = SparseForward(model, self.pool, self.geometry, ranks)
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(5)).tolist()
        self._blocks = [tuple(order[i::4]) for i in range(4)]
        self.ranks = ranks or Ranks()
        self.evidence, self.lowest, self.weighed, self.forwards = [], [], 0, 0
        self.clear()

    def clear(self):
        self.pool.fill_(float("nan"))
        self.last_samples = LastSamples()
        return self

    def slice(self, request_id, tokens, begin=0, end=None):
        return SequenceSlice(request_id, begin, tokens[begin:end], self._blocks[request_id - 1])

    def planned(self, plan, end=None):
        tokens = tuple(plan.prompt_token_ids.tolist())
        return replace(self.slice(plan.request_id, tokens, plan.prefix_end, end), plan=plan)

    def run(self, *slices, max_rows=None, keys_per_row=0, few_rows=0):
        """Logits of each slice; in forwards of at most `max_rows` rows."""
        self.evidence, self.lowest, self.weighed, self.forwards = [], [], 0, 0
        works = works_of(slices, NUM_LAYERS, keys_per_row)
        hidden = self.engine(max_rows, few_rows).hidden(works, torch.device(DEVICE), self.evidence.append)
        return list(self.forward.logits(hidden).split([len(slice_.token_ids) for slice_ in slices]))

    def engine(self, max_rows=None, few_rows=0):
        """The forwards of an engine, which count themselves."""

        def run(schedule, sink):
            self.forwards, self.weighed = self.forwards + (sink is not None), self.weighed + (sink is None)
            return self.forward(schedule, evidence_sink=sink)

        def lowest(schedule):
            self.lowest += schedule.check.works
            return self.forward.lowest(schedule)

        return EngineForward(self.geometry, self.ranks, run, lowest, max_rows, 0, few_rows, self.last_samples)

    @torch.inference_mode()
    def reference(self, tokens):
        return self.model(torch.tensor([tokens], device=DEVICE)).logits[0].float()

    def kv(self, request_id, end=None):
        """A copy of a request's KV: [layers, 2, kv_heads, positions, head_dim]."""
        blocks = pool_view(self.pool, self.geometry)[list(self._blocks[request_id - 1])]
        return blocks.permute(1, 2, 3, 0, 4, 5).flatten(3, 4)[:, :, :, :end].clone()

    def place(self, request_id, kv, *spans):
        """Writes the positions of `kv` in these spans, (start, end), into the request's blocks."""
        view = pool_view(self.pool, self.geometry)
        for position in (each for span in spans for each in range(*span)):
            block = self._blocks[request_id - 1][position // BLOCK_SIZE]
            view[block, :, :, :, position % BLOCK_SIZE] = kv[:, :, :, position]

    def cold(self, tokens, request_id=1):
        """Logits and KV of a run that reuses nothing; the pool is NaN again afterwards."""
        logits = self.run(self.slice(request_id, tokens))[0]
        kv = self.kv(request_id)
        self.clear()
        return logits, kv


def load(path, dtype=torch.float32):
    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).to(DEVICE)


def tokens_of(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 256, (length,), generator=generator).tolist())


def close(actual, expected):
    """NaN is not close."""
    return actual.shape == expected.shape and (actual - expected).abs().max().item() <= TOLERANCE
