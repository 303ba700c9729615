"""Donors that are held: in a catalog, in the host tier as a save puts them there, and in files."""

import threading

import numpy as np
import torch

from kernels.layout import ContiguousKv, KvGeometry
from semblend_trt.config import Eviction
from semblend_trt.donors.catalog import Capacities, DonorCatalog
from semblend_trt.donors.disk_tier import KvForm
from semblend_trt.donors.offload import DonorText
from semblend_trt.donors.store import HostKv

BYTES_PER_TOKEN = 10
FORM = KvForm(KvGeometry(num_layers=3, kv_heads=2, head_dim=8, block_size=1), torch.float32)


def catalog_of(host_tokens=100, max_donors=10, eviction=Eviction.LRU, **limits):
    """A catalog of donors with BYTES_PER_TOKEN a token; `limits` are the other `Capacities`."""
    form = KvForm(KvGeometry(1, 1, BYTES_PER_TOKEN, 1, kv_factor=1), torch.float8_e4m3fn)
    sizes = {"bytes_per_token": form.token_bytes, "file_bytes": form.file_bytes}
    limited = Capacities(host_tokens * BYTES_PER_TOKEN, max_donors=max_donors, **sizes, **limits)
    return DonorCatalog(limited, eviction)


def keep(catalog, donor_id, tokens):
    """Has the catalog hold a ready donor; returns what made room for it."""
    moves = catalog.reserve(donor_id, tokens)
    catalog.commit(donor_id, tokens)
    return moves


def held_kv(tier, donor_id):
    """The donor's KV, valid until it is dropped."""
    with tier.reading(donor_id) as held:
        return held


def whole(kv):
    """All parts of KV of the host, as [layers, kv_factor, kv_heads, tokens, head_dim]."""
    return torch.cat([part.tensor for part in kv.parts], dim=3)


def held_in(store):
    """Donors that either tier holds or is being given."""
    return {*store.host._donors, *(() if store.device is None else store.device._donors)}


def used_blocks(tier):
    """Blocks of the arena that are not free."""
    return tier._arena.shape[0] - len(tier._free)


def save(tier, donor_id, tensor):
    """Copies `tensor`, [layers, 2, kv_heads, tokens, head_dim] on any device and of any strides, into the tier."""
    with tier.writing(donor_id, tensor.shape[3]) as held:
        fill(held, tensor)


def fill(held, tensor):
    """Copies `tensor`, of as many tokens as `held` has, into its parts."""
    first = 0
    for part in held.parts:
        part.tensor.copy_(tensor[:, :, :, first : first + part.capacity])
        first += part.capacity


def host_kv(*sizes, form=FORM, fill=None):
    """KV in parts of so many tokens as the host tier holds it, random unless it is filled."""
    generator = torch.Generator().manual_seed(sum(sizes))
    parts = []
    for size in sizes:
        in_memory = form.in_file(size)
        rows = torch.randn(in_memory, generator=generator) if fill is None else torch.full(in_memory, fill)
        parts.append(ContiguousKv(rows.to(form.dtype).permute(0, 2, 3, 1, 4)))
    return HostKv(tuple(parts))


def saved(worker, request_id):
    """Polls until the request's save has ended, as the executor's idle iterations do."""
    done, _ = worker.get_finished([request_id], [])
    while request_id not in done:
        done, _ = worker.get_finished([], [])
    return done


class SaverGate:
    """Has the thread that saves wait from `close` to `open`, or within it; then waits for what is saved."""

    def __init__(self, worker):
        self._worker = worker
        self._opened = None

    def __enter__(self):
        self.close()

    def __exit__(self, *_):
        self.open()

    def close(self):
        if self._opened is None:
            self._opened = threading.Event()
            self._worker.saver._thread.submit(self._opened.wait)

    def open(self):
        if self._opened is not None:
            self._opened.set()
            self._opened = None
            self._worker.saver.drain()


def text_of(tokens, donor_id="donor", generation=0):
    return DonorText(donor_id, "key", np.arange(7, 7 + tokens, dtype=np.int32), generation)


def at_once(call):
    """What the call gives or raises; one that waits for another side fails here and keeps no process from ending."""
    ended = []

    def run():
        try:
            ended.append((call(), None))
        except Exception as error:
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert ended, "the call waits"
    given, error = ended[0]
    if error is not None:
        raise error
    return given
