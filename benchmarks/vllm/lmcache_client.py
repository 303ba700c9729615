"""A client of LMCache's blend server inside vLLM, as LMCache has none that registers RoPE (LMCache#5101).

The server finds chunks of 256 tokens anywhere in a prompt, moves their keys to the new positions and writes them to
vLLM's blocks; nothing is computed again. vLLM takes a connector's tokens only after those that it has computed itself:
so the beginning of a shifted prompt is asked for first. One request at a time, all in this process, on one card.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import zmq
from lmcache import torch_dev
from lmcache.integration.vllm.kv_cache_groups import create_engine_group_infos_from_vllm
from lmcache.integration.vllm.utils import vllm_layout_hints
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey
from lmcache.v1.multiprocess.group_view import expand_engine_block_ids
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.platform.base.event_ipc import get_event_ipc_backend
from lmcache.v1.platform.kv_wrap import wrap_kv_caches, wrap_one_kv_cache
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata

_URL, _MODEL, _INSTANCE = "tcp://127.0.0.1:5599", "model", 1
# Seconds in which an answer comes, and what was kept is indexed.
_TIMEOUT, _INDEXED = 60.0, 0.5
_HOST_GB = 8


class Client:
    """What the connector does in vLLM's next step: take `loads`, chunks that follow each other, or keep the prompt if
    `keeps`. `taken`: tokens that were loaded last."""

    def __init__(self) -> None:
        self.prompt, self.blocks, self.loads = list[int](), list[list[int]](), list[Any]()
        self.keeps, self.taken = False, 0
        self._rpc = RequestClientFactory.create(_URL, context=zmq.Context.instance())
        self.chunk, self._asked = int(self._rpc.get_chunk_size().result(timeout=_TIMEOUT)), 0

    def lookup(self) -> list[Any]:
        """Return the longest row of chunks of the prompt that follow each other and that the server holds, without
        those of an exact prefix. `cur_st` and `cur_ed` are a chunk's place in the prompt."""
        self._asked += 1
        while (found := self._rpc.cb_unified_lookup(self._key(None), 1).result(timeout=_TIMEOUT)) is None:
            pass
        rows: list[list[Any]] = [[]]
        for each in found.non_prefix_segments:
            if rows[-1] and rows[-1][-1].cur_ed != each.cur_st:
                rows.append([])
            rows[-1].append(each)
        return max(rows, key=len)

    def end(self) -> None:
        """Have the server forget the last request."""
        self._rpc.end_session(str(self._asked)).result(timeout=_TIMEOUT)

    def register(self, kv_caches: dict[str, torch.Tensor], cache_config: Any, config: Any) -> None:
        """Hand over vLLM's blocks; `cache_config` is vLLM's KVCacheConfig."""
        hints, self._block = vllm_layout_hints(config), int(config.cache_config.block_size)
        self._groups = create_engine_group_infos_from_vllm(cache_config, kv_caches, layout_hints=hints)
        self._device = next(iter(kv_caches.values())).device
        self._events = get_event_ipc_backend(self._device)
        wrapped = wrap_kv_caches(kv_caches)
        asked = self._rpc.register_kv_cache(_INSTANCE, wrapped, _MODEL, 1, EngineType.VLLM, hints, list(self._groups))
        asked.result(timeout=_TIMEOUT)

    def register_rope(self, model: Any) -> None:
        """Hand over the model's table of cosines and sines."""
        rope = next(each for each in model.modules() if hasattr(each, "cos_sin_cache"))
        table = wrap_one_kv_cache(rope.cos_sin_cache)
        asked = self._rpc.cb_register_rope(_INSTANCE, [table], rope.head_size, rope.is_neox_style, [], [], [])
        asked.result(timeout=_TIMEOUT)

    def load(self) -> None:
        """Have `loads` written before the step computes. Raises RuntimeError where the server has not."""
        if loads := self.loads:
            self.loads, self.taken = [], loads[-1].cur_ed - loads[0].cur_st
            blocks, event = expand_engine_block_ids(self._groups, self.blocks), self._event()
            self._finish(self._rpc.cb_retrieve_pre_computed(self._key(), loads, blocks, _INSTANCE, event))

    def keep(self) -> None:
        """Have the whole chunks of the prompt kept that the step has computed. Raises RuntimeError as `load`."""
        if self.keeps:
            self.keeps, self._asked = False, self._asked + 1
            key, event = self._key(), self._event()
            blocks = [each[: key.end // self._block] for each in self.blocks]
            self._finish(self._rpc.store(key, _INSTANCE, expand_engine_block_ids(self._groups, blocks), event))
            time.sleep(_INDEXED)
            self.end()

    def _key(self, worker: int | None = 0) -> Any:
        end = len(self.prompt) // self.chunk * self.chunk
        return IPCCacheServerKey(_MODEL, 1, worker, tuple(self.prompt), 0, end, str(self._asked), num_kv_readers=1)

    def _event(self) -> bytes:
        self._recorded = self._events.create_event(self._device)  # the server reads it later
        self._events.record_event(self._recorded, torch_dev.current_stream())
        return bytes(self._events.export_event(self._recorded, self._device))

    def _finish(self, asked: Any) -> None:
        if not asked.to_device_future(self._device, self._events).result(timeout=_TIMEOUT):
            raise RuntimeError("LMCache's server could not take or keep the prompt's chunks; its log says why")


class BlendConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Does in both of its roles what `client` says."""

    client: Client

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.client.register(kv_caches, self._kv_cache_config, self._vllm_config)

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        self.client.load()

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...

    def wait_for_save(self) -> None:
        self.client.keep()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        loads = self.client.loads
        if not loads or num_computed_tokens < loads[0].cur_st:
            self.client.loads = []
            return 0, False
        return max(min(loads[-1].cur_ed, request.num_tokens - 1) - num_computed_tokens, 0), False

    def update_state_after_alloc(self, _request: Any, blocks: Any, *_: Any) -> None:
        self.client.blocks = [list(each) for each in blocks.get_block_ids()]

    def build_connector_meta(self, _: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()


def start_server(chunk: int, log: Path) -> "subprocess.Popen[bytes]":
    """Start LMCache's server with its blend engine and chunks of `chunk` tokens; `log` gets what it says."""
    options = f"--engine-type blend --supported-transfer-mode lmcache_driven --eviction-policy LRU --chunk-size {chunk}"
    host, port = _URL.removeprefix("tcp://").split(":")
    sizes = f"--l1-size-gb {_HOST_GB} --l1-init-size-gb {_HOST_GB} --disable-observability --host {host} --port {port}"
    command = [sys.executable, "-m", "lmcache.v1.multiprocess.server", *options.split(), *sizes.split()]
    with log.open("wb") as file:
        variables = os.environ | {"LMCACHE_TRACK_USAGE": "false"}
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=variables)
