"""One rank of an engine that several processes share: it serves what its test asks for, and writes down what it saw."""

import json
from contextlib import nullcontext
from datetime import timedelta
from unittest import mock

import torch
from torch import distributed

from engine_wrapper.embedded.llm import SamplingParams
from engine_wrapper.embedded.model_runner import ModelRunner
from semblend_trt.ranks import joined_ranks
from semblend_trt.reuse_profile import ReuseProfile
from semblend_trt.runtime import runtime_for
from tests.builders.engine import DOCUMENT, DONOR, SHIFTED, SOME_KEPT, Engines, geometry_of, serve, text
from tests.semblend_trt.held_donors import held_kv, whole

ANSWER = SamplingParams(max_tokens=6, ignore_eos=True)
PATIENCE = timedelta(seconds=60)
FAILURE = RuntimeError("this rank fails in its test")
OTHER = text(7, 260)


class Life:
    """One rank's engines, all over the same part of the model."""

    def __init__(self, model, folder, ranks):
        self._folder, self._ranks = folder, ranks
        self._runner = ModelRunner(model, "float32", "cpu", ranks=ranks)
        self._engines = Engines(folder / f"audit-{ranks.rank}.jsonl", model=model, runner=self._runner)

    def run(self):
        """Everything that one rank, alone or with others, serves when nothing goes wrong."""
        return self._run("cold", "shifted", "verified", "evicted")

    def run_faults(self):
        """What the last rank breaks, and all of them answer."""
        return self._run("save_fails", "load_fails", "disk", "refusal")

    def _run(self, *scenarios):
        return {name: getattr(self, f"_{name}")() for name in scenarios}

    def _engine(self, module="engine_wrapper.connector", **settings):
        # Seconds of a lookup, because these processes crowd the machine.
        settings = {"EMBEDDER": "off", "LOOKUP_DEADLINE_MS": 5000, **settings}
        return self._engines(module, cache={"max_tokens": 1024}, tensor_parallel_size=self._ranks.size, **settings)

    def _is_breaking(self):
        return self._ranks.size > 1 and self._ranks.rank == self._ranks.size - 1

    def _cold(self):
        with self._engine(ENABLED=0) as llm:
            together = llm.generate([DONOR, SHIFTED, OTHER], ANSWER)
        return {"tokens": [each.outputs[0].token_ids for each in together]}

    def _shifted(self):
        with self._engine(POLICY="position_fix") as llm:
            donor = served(llm, DONOR)
            return {"donor": donor, "shifted": served(llm, SHIFTED), "held": self._heads(llm)}

    def _heads(self, llm):
        """For each donor and KV head, a sum that no other head is likely to have, in the order of the whole model."""
        host = llm.connector_worker.store.host
        own = [whole(held_kv(host, donor)).double().abs().sum((0, 1, 3, 4)).tolist() for donor in sorted(host._slots)]
        # Donors' names differ from run to run, up to the dash.
        gathered = self._ranks.gather(own)
        return [[head for part in parts for head in part] for parts in zip(*gathered, strict=True)]

    def _verified(self):
        path = self._folder / f"profile-{self._ranks.size}-{self._ranks.rank}.json"
        # Only rank 0 has a namespace; the profile is one file for all of them.
        with self._engine() as llm:
            if self._ranks.rank == 0:
                namespace, geometry = llm.connector_scheduler.namespace, geometry_of(llm)
                ReuseProfile.made_for(namespace, geometry, policy="verified", check=SOME_KEPT).write(path)
        with self._engine(PROFILE=path, PROFILE_TRIAL=1) as llm:
            found = []
            sink = llm.executor.model_runner.evidence_sink

            def keep(evidence):
                found.append(evidence)
                sink(evidence)

            llm.executor.model_runner.evidence_sink = keep
            told = [served(llm, DONOR), served(llm, SHIFTED)]
            unread = self._unread(llm)
        evidence = [[e.request_id, e.checked_tokens, e.reused_tokens, e.is_dropped] for e in found]
        return {"told": told, "evidence": evidence, "kept": [e.largest_kept for e in found], "unread": unread}

    def _unread(self, llm):
        """Events that wait on each rank but the first, whose scheduler reads them."""
        runtime = runtime_for(llm.llm_args)
        unread = len(runtime.saved) + len(runtime.evidence) + len(runtime.failed_loads)
        return self._ranks.gather(unread)[1:]

    def _evicted(self):
        facts = self._runner.facts
        token = facts.num_layers * 2 * self._runner.kv_heads * facts.head_dim * 4
        with self._engine(POLICY="position_fix", HOST_BYTES=300 * token) as llm:
            served(llm, DONOR)
            served(llm, OTHER)
            held = [len(host_of(llm)._slots)]
            told = [served(llm, text(9, 30) + OTHER[20:] + text(6, 9)), served(llm, SHIFTED)]
            held.append(len(host_of(llm)._slots))
        return {"told": told, "held": self._ranks.gather(held)}

    def _save_fails(self):
        with self._engine(POLICY="position_fix") as llm:
            free = llm.block_manager.num_free_blocks
            with self._breaking(host_of(llm), "writing"):
                first = served(llm, DONOR)
            held = self._ranks.gather(len(host_of(llm)._slots))
            # No request finds the donor; this one becomes a donor, and the next finds it.
            told = {"second": served(llm, SHIFTED), "third": served(llm, text(5, 50) + DOCUMENT + text(6, 9))}
            leaked = free - llm.block_manager.num_free_blocks
            return told | {"first": first, "held": held, "leaked": leaked}

    def _load_fails(self):
        with self._engine(POLICY="position_fix") as llm:
            served(llm, DONOR)
            (donor,) = host_of(llm)._slots
            with self._breaking(llm.connector_worker.loader, "_prepare"):
                failed = served(llm, SHIFTED)
            return {"failed": failed, "keeps": self._ranks.gather(donor in host_of(llm)), "unread": self._unread(llm)}

    def _disk(self):
        disk = self._folder / "disk"
        with self._engine(POLICY="position_fix", DISK_BYTES=1 << 20, DISK_PATH=disk) as llm:
            events = [each.kind.value for each in runtime_for(llm.llm_args).offload_events]
            served(llm, DONOR)
            return {"events": events, "shifted": served(llm, SHIFTED)}

    def _refusal(self):
        """The last rank alone cannot read its pool."""
        shape = "semblend_trt.connector.worker.geometry_of"
        with mock.patch(shape, return_value=None) if self._is_breaking() else mock.MagicMock(), self._engine() as llm:
            return {"told": served(llm, DONOR), "refusal": runtime_for(llm.llm_args).refusal}

    def _breaking(self, owner, name):
        return mock.patch.object(owner, name, side_effect=FAILURE) if self._is_breaking() else nullcontext()


def host_of(llm):
    return llm.connector_worker.store.host


def served(llm, prompt):
    output = serve(llm, prompt, ANSWER)
    return {
        "tokens": output.outputs[0].token_ids,
        "reused": output.reused_tokens,
        "computed": output.computed_tokens,
        "outcome": output.reuse_outcome,
        "reason": output.reuse_reason,
    }


def live(rank, size, model, folder):
    """The process of one rank: joins the others and writes `rank-N.json` into `folder`."""
    torch.set_num_threads(1)
    meeting = f"file://{folder / 'meeting'}"
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=PATIENCE)
    ranks = joined_ranks(size)
    life = Life(model, folder, ranks)
    told = life.run() | life.run_faults()
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    distributed.destroy_process_group()
