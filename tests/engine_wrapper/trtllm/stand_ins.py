"""Stand-ins for TensorRT-LLM's cache managers, decoder and executors; each names its file in NVIDIA/TensorRT-LLM.

`executor_of` runs one request after the other. `engine_of` is 1.4 as it starts by default: the embedded engine's loops
over this decoder and V2 manager. The wrapper attaches to either as to TensorRT-LLM's executor."""

import copy
import math
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

import engine_wrapper
import semblend_trt
from engine_wrapper import embedded
from engine_wrapper.embedded.block_manager import BlockManager, PrefixMatch, RootKey, cache_layout
from engine_wrapper.embedded.executor import Executor
from engine_wrapper.embedded.llm import LLM
from engine_wrapper.embedded.llm_args import KvCacheConfig, KvCacheConnectorConfig
from engine_wrapper.embedded.model_runner import ModelRunner
from kernels.layout import KvGeometry, indexable, pool_view
from semblend_trt.runtime import runtime_for

BLOCK = 8
KV_SCALE = 0.5


@dataclass
class LlmRequest:
    """`_torch/pyexecutor/llm_request.py`, LlmRequest (1.2 @3277953), over `nanobind/batch_manager/bindings.cpp`."""

    py_request_id: int
    tokens: list[int]
    context_current_position: int = 0
    max_new_tokens: int = 4
    cache_salt: str | None = None
    blocks: list[int] = field(default_factory=list)
    _is_dummy: bool = field(default=False, init=False)
    is_dummy_request = property(lambda self: self._is_dummy, lambda self, value: setattr(self, "_is_dummy", value))
    request_id = property(lambda self: self.py_request_id)
    prompt_len = property(lambda self: len(self.tokens))
    context_remaining_length = property(lambda self: len(self.tokens) - self.context_current_position)

    def get_tokens(self, beam):
        return self.tokens


class CppManager:
    """`cpp/tensorrt_llm/batch_manager/kvCacheManager.cpp` as bound by nanobind (1.2 @b35ac1b6)."""

    __slots__ = ("free", "held", "pinned", "tree")

    def __init__(self, blocks):
        self.free = list(range(blocks))
        self.held, self.tree, self.pinned = {}, set(), []

    def store_context_blocks(self, request):
        self._store(request, min(request.context_current_position, len(request.tokens) - 1))

    def remove_sequence(self, request_id, request, pin_on_release):
        if not isinstance(request, LlmRequest):
            raise TypeError("remove_sequence(): incompatible function arguments")
        self._store(request, len(request.tokens))
        self.free += self.held.pop(request_id)

    def store_blocks_for_reuse(self, request_id, request, pin_blocks):
        self._store(request, len(request.tokens))
        self.pinned.append(request_id)
        return self.held[request_id][-1]

    def unpin_blocks_by_id(self, block_id):
        if not isinstance(block_id, int):
            raise TypeError("unpin_blocks_by_id(): incompatible function arguments")
        self.pinned.pop()

    def _store(self, request, tokens):
        if request.is_dummy_request:
            return
        self.tree.update(tuple(request.tokens[:end]) for end in range(BLOCK, tokens + 1, BLOCK))


class KVCacheManager:
    """`_torch/pyexecutor/resource_manager.py`, KVCacheManager (1.2 @3277953): the V1 manager."""

    is_vswa = False

    def __init__(self, pool, geometry):
        self.impl = CppManager(pool.shape[0])
        self.layer_offsets = {index: index for index in range(geometry.num_layers)}
        self.pool, self.geometry = pool, geometry
        self.rewound = []

    def reset_reuse_state(self):
        self.impl.tree.clear()

    def get_unique_primary_pool(self):
        return self.pool

    def add_sequence(self, request):
        needed = self.geometry.blocks_for(len(request.tokens) + request.max_new_tokens)
        request.blocks = [self.impl.free.pop() for _ in range(needed)]
        self.impl.held[request.py_request_id] = request.blocks

    def get_batch_cache_indices(self, request_ids, layer_idx=None):
        return [list(self.impl.held[request_id]) for request_id in request_ids]

    rows_of = get_batch_cache_indices

    def update_resources(self, scheduled_batch, attn_metadata=None, kv_cache_dtype_byte_size=None):
        for request in scheduled_batch.generation_requests:
            self.rewound.append(request.py_request_id)
        for request in scheduled_batch.context_requests:
            self.impl.store_context_blocks(request)

    def free_resources(self, request, pin_on_release=False):
        return self.impl.remove_sequence(request.py_request_id, request, pin_on_release)

    def store_blocks_for_reuse(self, request, pin_blocks=False):
        return self.impl.store_blocks_for_reuse(request.py_request_id, request, pin_blocks)

    def unpin_blocks_by_id(self, kv_cache_block_id):
        self.impl.unpin_blocks_by_id(kv_cache_block_id)


class KvCacheOfRequest:
    """`tensorrt_llm/runtime/kv_cache_manager_v2`, _KVCache (main @035ab91c), over blocks of the embedded engine."""

    def __init__(self, commit, close, committed):
        self._commit, self._close, self.committed = commit, close, list(committed)
        self.history, self.is_committing, self.is_open = 0, True, True

    num_committed_tokens = property(lambda self: len(self.committed))

    def commit(self, tokens):
        if not self.is_committing:
            raise RuntimeError("Cannot commit tokens after stop_committing()")
        self.committed += tokens
        self._commit(self.committed)

    def stop_committing(self):
        self.is_committing = False

    def resize(self, capacity, history_length=None):
        self.history = self.history if history_length is None else history_length
        return True

    def close(self):
        self.is_open = False
        self._close()


class KVCacheManagerV2:
    """`_torch/pyexecutor/kv_cache/kv_cache_manager_v2.py`, KVCacheManagerV2 (main @035ab91c, later @d8783e5e)."""

    is_vswa = False

    def __init__(self, pool, geometry, blocks=None):
        """`blocks`: those of an embedded engine that has this manager."""
        config = KvCacheConfig(tokens_per_block=geometry.block_size)
        self.blocks = blocks or BlockManager(len(pool), config, pool, is_v2=True)
        self.publish, self.release = self.blocks.publish, self.blocks.release
        self.kv_cache_map, self.conversation_manager = {}, None
        self.layer_offsets = {index: index for index in range(geometry.num_layers)}
        self.pool, self.geometry = pool, geometry

    def reset_reuse_state(self):
        self.blocks.reset_reuse_state()

    def add(self, request_id, committed=()):
        commit, close = partial(self.publish, request_id), partial(self.release, request_id)
        self.kv_cache_map[request_id] = KvCacheOfRequest(commit, close, committed)
        return self.kv_cache_map[request_id]

    def add_sequence(self, request):
        total = len(request.tokens) + request.max_new_tokens
        self.blocks.add_sequence(request.py_request_id, RootKey(), PrefixMatch(), total)
        request.blocks = self.blocks.allocate(request.py_request_id, total)
        return self.add(request.py_request_id)

    def rows_of(self, request_ids):
        return [self.blocks.block_ids(request_id) for request_id in request_ids]

    def get_batch_cache_indices(self, request_ids, layer_idx=None):
        return [[row * self.geometry.num_layers for row in rows] for rows in self.rows_of(request_ids)]

    def get_page_indices_by_layer_group(self, request):
        held = request.py_request_id in self.kv_cache_map
        return [self.blocks.block_ids(request.py_request_id) if held else []]

    def try_commit_blocks(self, request):
        kv_cache = self.kv_cache_map.get(request.py_request_id)
        if kv_cache is None:
            return
        if request.context_current_position > kv_cache.num_committed_tokens:
            tokens = request.get_tokens(0)
            kv_cache.commit(tokens[kv_cache.num_committed_tokens : request.context_current_position])
        if request.context_remaining_length == 0:
            kv_cache.stop_committing()

    def update_context_resources(self, scheduled_batch):
        for request in scheduled_batch.context_requests:
            self.try_commit_blocks(request)

    def update_resources(self, scheduled_batch, attn_metadata=None, size=None):
        for request in scheduled_batch.generation_requests:
            self.kv_cache_map[request.py_request_id].resize(None, len(request.tokens))

    def free_resources(self, request, pin_on_release=False):
        kv_cache = self.kv_cache_map.pop(request.py_request_id, None)
        if kv_cache is not None:
            kv_cache.close()


MANAGERS = {"1.2": KVCacheManager, "main": KVCacheManagerV2}


class AttentionMetadata:
    """`_torch/attention_backend/interface.py`, AttentionMetadata (1.2 @3277953), as the engine fills it in."""

    def __init__(self, manager, sequences, num_contexts):
        """`sequences`: (request id, cached tokens, tokens to compute) of each."""
        self.kv_cache_manager, self.num_contexts, self.all_rank_num_tokens = manager, num_contexts, None
        self.request_ids = [request_id for request_id, _, _ in sequences]
        self.kv_cache_params = SimpleNamespace(num_cached_tokens_per_seq=[cached for _, cached, _ in sequences])
        self.seq_lens = torch.tensor([length for _, _, length in sequences], dtype=torch.int)

    num_tokens = property(lambda self: int(self.seq_lens.sum()))


class TrtllmAttention:
    """`_torch/attention_backend/trtllm.py`, TrtllmAttention (1.2; main moves the options into `forward_args`)."""

    def __init__(self, layer_idx, rotate, q_scaling=1.0):
        self.layer_idx, self._rotate, self._q_scaling = layer_idx, rotate, q_scaling
        self.kv_scale_quant_orig = torch.full((1,), KV_SCALE)
        self.kv_scale_orig_quant = 1.0 / self.kv_scale_quant_orig

    def forward(self, q, k, v, metadata, **options):
        manager = metadata.kv_cache_manager
        geometry = manager.geometry
        view = pool_view(manager.pool, geometry)[:, self.layer_idx]
        if k is None:
            kv_size = geometry.kv_heads * geometry.head_dim
            q, k, v = q.split([q.shape[-1] - 2 * kv_size, kv_size, kv_size], dim=-1)
        asked = options.get("forward_args") or SimpleNamespace(**options)
        window, scale = asked.attention_window_size or math.inf, geometry.head_dim**-0.5 / self._q_scaling
        outputs, row = [], 0
        for index, blocks in enumerate(manager.rows_of(metadata.request_ids)):
            begin, length = metadata.kv_cache_params.num_cached_tokens_per_seq[index], int(metadata.seq_lens[index])
            positions = torch.arange(begin, begin + length)
            part = [each[row : row + length].unflatten(-1, (-1, geometry.head_dim)) for each in (q, k, v)]
            if self._rotate is not None:
                part[:2] = self._rotate(positions, *part[:2])
            places = torch.tensor(blocks)[positions // BLOCK], positions % BLOCK
            is_scaled = view.dtype == torch.float8_e4m3fn
            for kind in (0, 1):
                new = part[1 + kind] * self.kv_scale_orig_quant if is_scaled else part[1 + kind]
                indexable(view)[places[0], kind, :, places[1]] = indexable(new.to(view.dtype))
            held = indexable(view)[blocks].view(view.dtype).float()
            held = held * self.kv_scale_quant_orig if is_scaled else held
            stored = held.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, : begin + length]
            back = positions[:, None] - torch.arange(begin + length)
            mask = (back >= 0) & (back < window)
            query, key, value = part[0].transpose(0, 1)[None], stored[0][None], stored[1][None]
            attended = nn.functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=scale, enable_gqa=True
            )
            outputs.append(attended[0].transpose(0, 1))
            row += length
        return torch.cat(outputs).flatten(1)


class Attention(nn.Module):
    """`_torch/modules/attention.py`, Attention (1.2 @3277953; `style` "main" @00547a25), `qk_norm_attention.py`."""

    def __init__(self, source, layer_idx, rotate, *, fused, style):
        super().__init__()
        self.layer_idx, self.rope_fusion, self.head_dim, self.style = layer_idx, fused, source.head_dim, style
        self.projections = nn.ModuleList([source.q_proj, source.k_proj, source.v_proj])
        self.q_size, self.kv_size = source.q_proj.out_features, source.k_proj.out_features
        self.o_proj, self.rotate = source.o_proj, rotate
        self.norms = nn.ModuleList([source.q_norm, source.k_norm] if hasattr(source, "q_norm") else [])
        self.q_scaling, self.attn_output_gate = source.head_dim**-0.5 / source.scaling, None
        self.has_quant_scale, self.attention_window_size = False, getattr(source, "sliding_window", None)
        self.attn = TrtllmAttention(layer_idx, rotate if fused else None, self.q_scaling)
        self.asks = {}

    def do_not_rotate(self):
        self.rotate = lambda positions, *parts: parts
        self.attn = TrtllmAttention(self.layer_idx, None)

    def forward(self, hidden_states, position_ids, attn_metadata, **kwargs):
        """As Transformers' layers call it."""
        parts = [each(hidden_states[0]) for each in self.projections]
        for index, norm in enumerate(self.norms):
            parts[index] = norm(parts[index].unflatten(-1, (-1, self.head_dim))).flatten(1)
        if not self.rope_fusion:
            heads = [each.unflatten(-1, (-1, self.head_dim)) for each in parts[:2]]
            parts[:2] = (each.flatten(1) for each in self.rotate(position_ids[0], *heads))
        qkv = torch.cat(parts, dim=-1)[: attn_metadata.num_tokens]
        options = {"attention_mask": "causal", "out_scale": None, "attention_window_size": self.attention_window_size}
        options |= self.asks
        if self.style == "main":
            options = {"forward_args": SimpleNamespace(**options, output=None)}
        return self.o_proj(self.attn.forward(qkv, None, None, attn_metadata, **options))[None], None


class DecoderLayer(nn.Module):
    """`_torch/models/modeling_qwen.py`, QwenDecoderLayer (1.2 @3277953), over Transformers' own layer."""

    def __init__(self, source, attention):
        super().__init__()
        self.layer_idx, self.self_attn = attention.layer_idx, attention
        self.source = copy.copy(source)
        self.source._modules = {**source._modules, "self_attn": attention}

    def run(self, total, position_ids, attn_metadata, **_):
        rows = {"position_ids": position_ids, "attn_metadata": attn_metadata}
        return self.source(total[None], position_embeddings=None, attention_mask=None, **rows)[0]

    def forward(self, *, hidden_states, residual, **rows):
        total = hidden_states if residual is None else hidden_states + residual
        return self.run(total, **rows) - total, total


class FusedNormLayer(DecoderLayer):
    """`_torch/models/modeling_llama.py`, LlamaDecoderLayer (1.2): a layer ends with the next one's first norm."""

    def forward(self, *, hidden_states, residual, **rows):
        total = self.run(hidden_states if residual is None else residual, **rows)
        return self.next_layer_layernorm(total), total


class Gemma3Layer(DecoderLayer):
    """`_torch/models/modeling_gemma3.py`, Gemma3DecoderLayer (main @00e7d103): adds its own residuals."""

    def forward(self, *, hidden_states, residual=None, **rows):
        return self.run(hidden_states, **rows)


LAYERS = {"llama": FusedNormLayer, "gemma3_text": Gemma3Layer}


class DecoderModel(nn.Module):
    """`_torch/models/modeling_qwen.py`, QwenModel (1.2 @3277953); also LlamaModel, Gemma3TextModel (main @00e7d103)."""

    def __init__(self, source, *, fused, style):
        super().__init__()
        apply = sys.modules[type(source).__module__].apply_rotary_pos_emb

        def rotate(kinds, positions, q, k):
            cos, sin = (each[0] for each in source.rotary_emb(q, positions[None], *kinds))
            return apply(q, k, cos, sin, unsqueeze_dim=1)

        self.embed_tokens, self.norm = source.embed_tokens, source.norm
        self.model_type = source.config.model_type
        kind, own = LAYERS.get(self.model_type, DecoderLayer), [partial(rotate, ())] * len(source.layers)
        if self.model_type == "gemma3_text":
            own = [partial(rotate, (each,)) for each in source.config.layer_types]
        self.layers = nn.ModuleList(
            kind(each, Attention(each.self_attn, index, own[index], fused=fused, style=style))
            for index, each in enumerate(source.layers)
        )
        for layer, each in zip(self.layers, source.layers, strict=True):
            if not getattr(each.self_attn, "use_rope", True):
                layer.self_attn.do_not_rotate()
        norms = [*(each.input_layernorm for each in list(source.layers)[1:]), self.norm]
        for layer, norm in zip(self.layers, norms, strict=True):
            layer.next_layer_layernorm = norm

    def forward(
        self, attn_metadata, input_ids = None, position_ids = None, inputs_embeds = None,
        spec_metadata = None, **kwargs,
    ):  # fmt: skip
        hidden_states, residual = self.embed_tokens(input_ids), None
        rows = {"position_ids": position_ids, "attn_metadata": attn_metadata}
        if self.model_type == "gemma3_text":
            for layer in self.layers:
                hidden_states = layer(hidden_states=hidden_states, attention_mask_data=None, **rows)
            return self.norm(hidden_states)
        for layer in self.layers:
            hidden_states, residual = layer(hidden_states=hidden_states, residual=residual, **rows)
        return hidden_states if self.model_type == "llama" else self.norm(hidden_states + residual)


class CausalModel(nn.Module):
    """`_torch/models/modeling_utils.py`, DecoderModelForCausalLM (1.2 @3277953)."""

    def __init__(self, source, *, fused, style):
        super().__init__()
        self.model, self.lm_head = DecoderModel(source.model, fused=fused, style=style), source.lm_head

    def load_weights(self, weights):
        """As `copy_weight` in `_torch/modules/linear.py` writes: through `data`, which torch does not count."""
        for name, parameter in self.named_parameters():
            if name in weights:
                parameter.data.copy_(weights[name])

    def forward(self, attn_metadata, input_ids=None, position_ids=None, **kwargs):
        hidden = self.model(input_ids=input_ids, attn_metadata=attn_metadata, position_ids=position_ids, **kwargs)
        return self.lm_head(hidden[attn_metadata.seq_lens.cumsum(0) - 1])


class LlmArgs:
    """`llmapi/llm_args.py`, TorchLlmArgs (1.2 @3277953), with decode graphs on, as by default."""

    def __init__(self, model, **changes):
        self.model, self.tokenizer, self.dtype, self.attn_backend = str(model), None, "float32", "TRTLLM"
        self.kv_cache_config = SimpleNamespace(dtype="auto", host_cache_size=None, max_attention_window=None)
        self.tensor_parallel_size = self.pipeline_parallel_size = self.context_parallel_size = 1
        self.torch_compile_config = self.lora_config = self.speculative_config = None
        self.cuda_graph_config = SimpleNamespace(enable_padding=False)
        self.sparse_attention_config, self.enable_lora, self.enable_attention_dp = None, False, False
        vars(self).update(changes)


class PyTorchModelEngine:
    """`_torch/pyexecutor/model_engine.py`, PyTorchModelEngine (1.2 @3277953); with `is_main` as on main (@0ea8c1de)."""

    def __init__(self, model, *, is_main=False):
        self.model, self._torch_compile_enabled = model, False
        graphs = SimpleNamespace(enabled=True)
        if is_main:
            self.decoder_runner = SimpleNamespace(
                cuda_graph_runner=graphs, breakable_cuda_graph_runner=None, _torch_compile_backend=None
            )
        else:
            self.cuda_graph_runner = graphs

    @torch.inference_mode()
    def run(self, manager, sequences, tokens, num_contexts):
        """`sequences` as in AttentionMetadata; returns the logits of each sequence's last token."""
        positions = [range(cached, cached + length) for _, cached, length in sequences]
        return self.model.forward(
            attn_metadata=AttentionMetadata(manager, sequences, num_contexts),
            input_ids=torch.tensor(tokens, dtype=torch.int),
            position_ids=torch.tensor([[each for part in positions for each in part]], dtype=torch.int),
            inputs_embeds=None,
        )


class PyExecutor:
    """`_torch/pyexecutor/py_executor.py`, PyExecutor (1.2 @3277953): an executor of one request after the other."""

    def __init__(self, manager, model_engine, worker, scheduler=None):
        self.kv_cache_manager, self.model_engine = manager, model_engine
        self.kv_cache_transceiver = self.drafter = None
        self.kv_connector_manager = SimpleNamespace(worker=worker, scheduler=scheduler)

    def _maybe_init_kv_connector_manager(self):
        manager, worker = self.kv_cache_manager, self.kv_connector_manager.worker
        if isinstance(manager, KVCacheManagerV2):
            worker.register_kv_cache_layout(cache_layout(manager.pool, BLOCK))
        else:
            worker.register_kv_caches(manager.get_unique_primary_pool())

    def forward(self, sequences, tokens, num_contexts):
        return self.model_engine.run(self.kv_cache_manager, sequences, tokens, num_contexts)

    def prefill(self, request):
        """One context step, from where the request stands to its end; publishes as the executor does."""
        begin = request.context_current_position
        logits = self.forward([(request.py_request_id, begin, len(request.tokens) - begin)], request.tokens[begin:], 1)
        request.context_current_position = len(request.tokens)
        manager = self.kv_cache_manager
        publish = getattr(manager, "update_context_resources", manager.update_resources)
        publish(SimpleNamespace(context_requests=[request], generation_requests=[]))
        return logits[0]


def executor_of(
    path, worker, scheduler = None, *, fused = True, style = "1.2", blocks = 96,
    source = None, kv_dtype = torch.float32,
):  # fmt: skip
    """An executor over the tiny model of a folder, or over one rank's part of it (`source`). Unwritten KV is NaN."""
    if source is None:
        source = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    config = source.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    geometry = KvGeometry(config.num_hidden_layers, config.num_key_value_heads, head_dim, BLOCK)
    shape = (geometry.num_layers, 2, geometry.row_elements)
    # A slot of V2 may hold other buffers too: its pool is a strided view.
    slots = torch.full((blocks, math.prod(shape) + 64 * (style == "main")), float("nan")).to(kv_dtype)
    pool = slots[:, : math.prod(shape)].view(blocks, *shape)
    engine = PyTorchModelEngine(CausalModel(source, fused=fused, style=style), is_main=style == "main")
    return PyExecutor(MANAGERS[style](pool, geometry), engine, worker, scheduler)


OURS = tuple(str(package.__path__[0]) for package in (engine_wrapper, semblend_trt))
ENGINE = str(embedded.__path__[0])
# All that may run of us in a decode step: the replaced method, and one look at the pending plans.
SILENT = {"call", "_forward", "__len__"}
RECORDED_SIZES = (1, 2, 4)


class Operations(TorchDispatchMode):
    """Names of the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func) not in ("aten.slice.Tensor", "aten.alias.default"):  # a slice of all is an alias
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class TrtllmRunner(ModelRunner):
    """Runs slices in TensorRT-LLM's decoder, and decode steps as replays of those that were recorded at the start.

    Steps of other sizes run eagerly. `hook_calls` counts our functions that run in decode steps, beyond SILENT."""

    hook_calls, kinds, watches = 0, Counter(), True

    def attach_pool(self, pool, geometry, max_rows=None):
        self.engine = PyTorchModelEngine(CausalModel(self.model, fused=True, style="main"), is_main=True)
        self.manager, self.geometry, self.recorded = None, geometry, {}

    @torch.inference_mode()
    def record(self, largest):
        self.manager.rows_of = lambda ids: [[0]] * len(ids)
        for size in range(1, largest + 1) if self.watches else ():
            slices = [SimpleNamespace(request_id=each, begin=1, token_ids=(0,)) for each in range(size)]
            with Operations() as operations:
                self._run(slices, 0)
            self.recorded[size] = operations.names
        del self.manager.rows_of
        self.manager.pool[0] = 0

    def forward(self, slices, all_rows=False):
        contexts = sum(not self.is_generating(each.request_id) for each in slices)
        if contexts:
            self.kinds["eager contexts"] += 1
            return self._run(slices, contexts)
        self.kinds["eager decode"] += 1
        return self._decode(slices)

    def replay(self, slices):
        if len(slices) not in RECORDED_SIZES:
            return self.forward(slices)
        self.kinds["replayed"] += 1
        decoder = self.engine.model.model
        hooked = vars(decoder).pop("forward", None)
        try:
            return self._decode(slices)
        finally:
            if hooked is not None:
                decoder.forward = hooked

    def _decode(self, slices):
        if not self.watches:
            return self._run(slices, 0)

        def watch(frame, event, _):
            code = frame.f_code
            is_ours = code.co_filename.startswith(OURS) and not code.co_filename.startswith(ENGINE)
            self.hook_calls += event == "call" and is_ours and code.co_name not in SILENT

        with Operations() as operations:
            sys.setprofile(watch)
            try:
                logits = self._run(slices, 0)
            finally:
                sys.setprofile(None)
        if operations.names != self.recorded[len(slices)]:
            raise RuntimeError("something ran in a decode step that was not recorded")
        return logits

    def _run(self, slices, contexts):
        sequences = [(each.request_id, each.begin, len(each.token_ids)) for each in slices]
        return self.engine.run(
            self.manager, sequences, [token for each in slices for token in each.token_ids], contexts
        )


class DefaultExecutor(Executor):
    """`_torch/pyexecutor/py_executor.py`, PyExecutor (main @0b892cbf): what a connector's worker finds of it."""

    kv_cache_transceiver = drafter = None
    active_requests = property(lambda self: list(self._active.values()))

    def _register(self, connector):
        blocks, runner = self.block_manager, self.model_runner
        manager = runner.manager = KVCacheManagerV2(self.pool, runner.geometry, blocks)
        runner.is_generating = lambda request_id: not self._active[request_id].is_in_context
        runner.record(self.llm_args.max_batch_size)
        self.kv_connector_manager, self.kv_cache_manager, self.model_engine = connector, manager, runner.engine
        add = blocks.add_sequence

        def add_sequence(request_id, key, match, total_tokens):
            manager.add(request_id, [token for node in match.nodes for token in node.tokens])
            return add(request_id, key, match, total_tokens)

        def publish(request_id, _tokens):
            manager.update_context_resources(SimpleNamespace(context_requests=[self._active[request_id]]))

        blocks.add_sequence, blocks.publish = add_sequence, publish
        blocks.release = lambda request_id: manager.free_resources(SimpleNamespace(py_request_id=request_id))
        runtime_for(self.llm_args).engine = None  # as in TensorRT-LLM
        super()._register(connector)

    def _handle_errors(self, error_msg=None, *, requests=None):
        for request in requests:
            request.error = error_msg
            self._finish(request, "error")


class TrtllmLLM(LLM):
    executor_type = DefaultExecutor


@contextmanager
def engine_of(path, runner, *, connector="engine_wrapper.connector", overlap=True, cache=None, **options):
    """An engine with our connector."""
    fields = {"tokens_per_block": BLOCK, "max_tokens": 1200} | (cache or {})
    with TrtllmLLM(
        path,
        runner=runner,
        contract="1.4",
        max_seq_len=512,
        disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(**fields),
        kv_connector_config=KvCacheConnectorConfig.ours(connector),
        **options,
    ) as llm:
        yield llm
