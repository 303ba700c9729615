"""Chats are read as a real `vllm serve` reads them: the same token ids, or a refusal with a name."""

import json
import urllib.error
import urllib.request
from importlib.metadata import version

import pytest
from packaging.version import Version

from semblend_trt.model_tokenizer import load_tokenizer
from semblend_trt.prompts import ChatError, PromptReader
from tests.engine_wrapper.vllm.serve_process import ServeProcess
from tests.semblend_trt.chat_bodies import READ, TEMPLATES
from tests.server_process import MODEL, wait_for

pytestmark = pytest.mark.every_version
# Each body brings its template. vLLM refuses tools without a parser of answers.
OPTIONS = "--trust-request-chat-template --enable-auto-tool-choice --tool-call-parser hermes --max-model-len 8192"
RENDER, TOKENIZE = "/v1/chat/completions/render", "/tokenize"
# /tokenize leaves other fields of a chat out, and `reasoning_content` of a message.
TOKENIZED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"}
TOKENIZED |= {"chat_template_kwargs", "tool_choice"}
# 0.32 drops the line and takes such arguments for an empty object; 0.28 keeps the line, gives a list to the template
# and refuses a text that is cut. We read as the newer one does.
NEWER = {"a line of Claude Code", "arguments that are a list", "arguments that are cut"}
IS_NEWER = Version(version("vllm")) >= Version("0.32")


@pytest.fixture(scope="module")
def server():
    # The newer one keeps the path that renders a chat closed otherwise.
    process = ServeProcess(*OPTIONS.split(), *["--enable-scale-out"] * IS_NEWER, "--served-model-name", "m")
    try:
        process.address()
        wait_for(lambda: is_up(process))
        yield process
    finally:
        process.kill()


def is_up(server):
    """vLLM tells its address before it listens there."""
    try:
        with urllib.request.urlopen(f"{server.url}/health", timeout=60) as response:
            return response.status == 200
    except urllib.error.URLError:
        return False


def ids_of(server, path, body):
    """The token ids of a body; None where vLLM refuses it."""
    asked = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(asked, timeout=60) as response:
            answer = json.load(response)
    except urllib.error.HTTPError as error:
        if error.code != 400:
            raise
        return None
    return answer["token_ids"] if path == RENDER else answer["tokens"]


def read(reader, body):
    try:
        return reader.chat(body)
    except ChatError as error:
        return error.name


@pytest.mark.promise(
    "fleet",
    "Placement, the embedded server and the estimate read a chat into the tokens that vLLM gives it, or refuse it "
    "by name",
)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_chat_has_the_tokens_that_vllm_gives_it(server, kind):
    tokenizer = load_tokenizer(str(MODEL))
    tokenizer.chat_template = template = TEMPLATES[kind]
    reader, count = PromptReader(tokenizer), 0
    for name, body in READ.items():
        ours, asked = read(reader, body), {"model": "m", "chat_template": template, **body}
        paths = [RENDER, *[TOKENIZE] * (body.keys() <= TOKENIZED and "reasoning_content" not in json.dumps(body))]
        for path in paths if IS_NEWER or name not in NEWER else ():
            theirs = ids_of(server, path, asked)
            assert ours == ("template" if theirs is None else theirs), (name, path)
            count += theirs is not None
    assert count >= 60
