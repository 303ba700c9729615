"""Serves two prompts with the shipped model: the second reuses what the first computed, at other positions.

No model is downloaded, and no GPU needed. The program is the README's first one.
"""

from __future__ import annotations

import argparse
import inspect
import sys
import textwrap

SUMMARY = "serve two prompts with a small model that ships, the second with reuse"
_NEXT = """
Both prompts hold the same six documents; in the second they are in reverse order, after another instruction.

  semblend-trt try --source    prints this program, to be changed and run
  semblend-trt estimate FILE   says what reuse would save on the prompts of your own log
  semblend-trt doctor          says what would be refused on this machine

vLLM and TensorRT-LLM are attached by a few lines of their configuration, which the README has.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", action="store_true", help="print the program, and do not run it")


def run(arguments: argparse.Namespace) -> int:
    """Run the program, or print it. Raises ConfigurationError where the extra `embedded` is missing."""
    if arguments.source:
        # The lines of the function, without its first.
        sys.stdout.write(textwrap.dedent(inspect.getsource(_program).partition("\n")[2]))
        return 0
    _program()
    sys.stdout.write(_NEXT)
    return 0


# The README shows these lines; a test compares them.
def _program() -> None:
    import os
    import random
    from importlib.resources import files

    from engine_wrapper.embedded.llm import LLM, KvCacheConnectorConfig, SamplingParams
    from validation.documents import stock_list
    from validation.prompts import render

    model = str(files("validation") / "assets" / "model")
    os.environ["SEMBLEND_PROFILE"] = f"{model}/reuse-profile.json"  # what a calibration found safe for this model
    os.environ["SEMBLEND_MIN_SAVING"] = "0"  # so short a prompt is reused though it saves little time
    connector = KvCacheConnectorConfig(
        connector_module="engine_wrapper.connector",
        connector_scheduler_class="SemBlendKvConnectorScheduler",
        connector_worker_class="SemBlendKvConnectorWorker",
    )

    rng = random.Random(0)
    lists = [stock_list(rng, rows=12) for _ in range(6)]
    first, second = lists[1].questions[0], lists[4].questions[7]
    prompts = [
        render("Answer briefly.", [each.text for each in lists], first.text),
        render("Look up what is asked for.", [each.text for each in reversed(lists)], second.text),
    ]
    with LLM(model=model, dtype="float32", kv_connector_config=connector) as llm:
        for prompt, question in zip(prompts, (first, second), strict=True):
            (output,) = llm.generate(prompt, SamplingParams(max_tokens=8))
            answer = output.outputs[0].text
            llm.settle()  # waits until the request's KV is kept as a donor
            print(question.text, answer, "right" if answer == question.answer else "wrong")
            print(f"  {output.reused_tokens} prompt tokens reused, {output.computed_tokens} computed")
