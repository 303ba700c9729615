"""Tiny random models that several test folders share. Weights are seeded, so every run sees the same ones."""

import logging
import os
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

# Triton decides at its import whether its own functions can be interpreted, and transformers imports it.
if not torch.cuda.is_available() and find_spec("triton"):
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        import triton  # noqa: F401

# Without a network a name that is looked up at the hub is tried for 23 seconds; read at the hub's import.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedTokenizerFast

from engine_wrapper.embedded.model_runner import SUPPORTED_MODEL_TYPES
from semblend_trt import model_files
from semblend_trt.background import OnceAMinute
from semblend_trt.connector import lookup
from semblend_trt.discovery.planner import Deadline
from tests.random_models import random_model

# A shell that starts the tests in the background has interrupts ignored, in every process that they start too.
signal.signal(signal.SIGINT, signal.default_int_handler)

# The same examples in every run; how long they take on a busy machine says nothing about the code.
settings.register_profile("seeded", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("seeded")

END_OF_TEXT = "<|endoftext|>"
VOCAB_SIZE = 257  # one token a byte, and the end of text
EOS_TOKEN_ID = 256

FAMILIES = SUPPORTED_MODEL_TYPES
# Mixtures of experts.
MIXTURES = ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss")


def byte_tokenizer():
    """One token a byte: no text is out of its vocabulary and no two texts share their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {END_OF_TEXT: EOS_TOKEN_ID}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END_OF_TEXT)


def save_tiny_model(family, folder, *, seed=0, **changes):
    """Writes a random model of `family`, one of FAMILIES, and its tokenizer; `changes` go to config."""
    own = {"vocab_size": VOCAB_SIZE, "eos_token_id": EOS_TOKEN_ID}
    random_model(family, seed=seed, **(own | changes)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def save_with_images(text_folder, folder):
    """Writes a Gemma 3 or a Llama 4 that takes images, whose text is read by the model in `text_folder`."""
    text = AutoModelForCausalLM.from_pretrained(text_folder)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    if is_llama4 := text.config.model_type == "llama4_text":
        vision |= {"intermediate_size": 64, "vision_output_dim": 32}
        vision |= {"projector_input_dim": 32, "projector_output_dim": 32}
    whole = {"text_config": text.config.to_dict(), "vision_config": vision, "tie_word_embeddings": False}
    config = CONFIG_MAPPING["llama4" if is_llama4 else "gemma3"](**whole)
    model = AutoModelForImageTextToText.from_config(config)
    model.get_decoder().load_state_dict((text if is_llama4 else text.model).state_dict())
    model.get_output_embeddings().load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def pytest_collection_modifyitems(items):
    """Begin with the longest files, each of which would run alone at the end."""
    longest = ("test_first_hour.py", "test_trtllm_check.py", "test_bounded.py", "test_quality.py")
    items.sort(key=lambda item: item.path.name not in longest)


@pytest.fixture(scope="session", autouse=True)
def _surroundings(tmp_path_factory):
    """What the product keeps for its user is kept in folders of the tests, and tiny prompts are reused however busy
    the machine is, though computing them takes no longer."""
    digests = tmp_path_factory.mktemp("digests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        patch.setenv("SEMBLEND_MIN_SAVING", "0")
        patch.setenv("SEMBLEND_LOOKUP_DEADLINE_MS", "2000")
        patch.setattr(model_files, "user_folder", lambda: digests)
        # Look-ups of this process have ten seconds, unless a test sets less than a millisecond.
        patch.setattr(
            lookup, "Deadline", lambda limit, tokens, least: Deadline(limit if limit < 1 else 10_000, tokens, least)
        )
        yield


@pytest.fixture(autouse=True)
def _minutes_of_tests():
    """A warning that an earlier test has seen is said again."""
    for each in logging.Logger.manager.loggerDict.values():
        for quiet in getattr(each, "filters", ()):
            if isinstance(quiet, OnceAMinute):
                quiet._kinds.clear()


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(size): a folder on a file system of so many bytes."""
    folder = tmp_path / "small"
    folder.mkdir()

    def mounted(size):
        asked = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "small", str(folder)]
        if subprocess.run(asked, check=False, capture_output=True).returncode:
            pytest.skip("skipped: this user may mount no file system")
        return folder

    yield mounted
    subprocess.run(["umount", "-l", str(folder)], check=False, capture_output=True)


@pytest.fixture(scope="session")
def tiny_model_paths(tmp_path_factory):
    """One model folder of each supported family."""
    return {family: save_tiny_model(family, tmp_path_factory.mktemp(f"tiny-{family}")) for family in FAMILIES}


@pytest.fixture(scope="session")
def tiny_qwen2_path(tiny_model_paths):
    return tiny_model_paths["qwen2"]


@pytest.fixture(scope="session")
def tiny_llama_path(tiny_model_paths):
    return tiny_model_paths["llama"]


@pytest.fixture
def installed_subcommands(tmp_path_factory, monkeypatch):
    """The subcommands that `pyproject.toml` names, as this checkout installs them: the environment may be older."""
    folder = tmp_path_factory.mktemp("site") / "semblend_trt-9.9.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: semblend-trt\nVersion: 9.9\n")
    project = Path(__file__).resolve().parents[1] / "pyproject.toml"
    groups = (part.partition("\n\n")[0] for part in project.read_text().split('[project.entry-points."')[1:])
    (folder / "entry_points.txt").write_text("\n".join("[" + each.replace('"', "") + "\n" for each in groups))
    monkeypatch.syspath_prepend(folder.parent)
