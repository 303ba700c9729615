"""Dynamo's own workers of vLLM, with our connector, asked by the component."""

import pytest

from semblend_trt.fleet.dynamo.relay import SALT_PREFIX

pytestmark = pytest.mark.dynamo


@pytest.mark.promise("fleet", "Through Dynamo a text goes to...")
async def test_vllm_reuses_a_text_behind_another_beginning_and_is_continued_when_killed(
    vllm_fleet, client, some, make_reader
):
    text, reader = some(1000), make_reader(vllm_fleet.nats.url)
    first = await vllm_fleet.ask(client, some(40) + text, 4, salt="mine")
    assert reader.wait_for(lambda reader: reader.directory.holders(text, tenant_salt=f"{SALT_PREFIX}mine"))
    await vllm_fleet.ask(client, some(20), 1)  # the component has read what came before this request
    again = await vllm_fleet.ask(client, some(70) + text, 4, salt="mine")
    receipt = again.told["kv_transfer_params"]["semblend.receipt"]
    assert receipt["worker"] == again.placed["worker"] == first.placed["worker"]
    assert receipt["reused_tokens"] > len(text) / 2
    name, most = f"worker-{receipt['worker'][0]}", 200

    def kill():
        if name in vllm_fleet.processes:
            vllm_fleet.end(name)

    answer = await vllm_fleet.ask(client, some(30) + text, most, salt="mine", ignore_eos=True, on_event=kill)
    assert (answer.error, answer.usage["completion_tokens"], answer.placed["attempts"]) == (None, most, 2)
