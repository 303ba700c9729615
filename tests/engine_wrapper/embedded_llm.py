"""What tests do to an embedded engine: evict, wait, and have it find the donors on disk."""

from kernels.layout import KvGeometry
from validation.embedded_engine import ONE_TOKEN


def geometry_of(llm):
    """The sizes of the engine's pool."""
    runner, block = llm.executor.model_runner, llm.llm_args.kv_cache_config.tokens_per_block
    facts = runner.facts
    return KvGeometry(facts.num_layers, runner.kv_heads, facts.head_dim, block, facts.kv_factor)


def disk_tier(folder, size=1 << 30):
    return {"DISK_BYTES": str(size), "DISK_PATH": str(folder), "DISK_KEY_PATH": str(folder / "key")}


def evict_block(llm):
    block = llm.block_manager._tree.evict()
    if block is not None:
        llm.block_manager._free.append(block)
    return block is not None


def evict_prefixes(llm):
    while evict_block(llm):
        pass


def unfinished(executor):
    """The number of requests that wait or run."""
    return len(executor._waiting) + sum(not request.is_finished for request in executor._active.values())


def published_nodes(blocks):
    """Each node of a block manager's tree with the key of its root, parents first."""
    for key, root in blocks._tree._roots.items():
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            yield key, node
            stack.extend(node.children.values())


def drain(llm):
    llm.settle()
    for thread in filter(None, (llm.connector_worker.saver, llm.connector_worker.transfers)):
        thread.drain()


def find_donors(llm):
    drain(llm)
    llm.generate([[1]], ONE_TOKEN)
    while llm.connector_worker.transfers is not None and llm.connector_worker._runtime.disk.found:
        llm.generate([[1]], ONE_TOKEN)
