"""The command line of the trainer and what the log says about a run."""

from __future__ import annotations

import argparse
import platform
from pathlib import Path

import torch
import transformers

from . import corpus


def parse(values: list[str] | None = None) -> argparse.Namespace:
    """Return the checked arguments of the command line."""
    parser = argparse.ArgumentParser(prog="validation.assets.recipe.train", description="Train the shipped model.")
    parser.add_argument("--text", type=Path, required=True, help="books in UTF-8, separated by <|endoftext|>, or a .gz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8.0, help="training time without compilation")
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of --minutes")
    parser.add_argument("--resume", type=Path, help="a model directory to go on from, with a new warm-up")
    parser.add_argument("--rate", type=float, default=1.6e-3, help="highest learning rate")
    parser.add_argument("--batch-tokens", type=int, default=131_072)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--mlp", type=int, default=416)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--probe-layers", type=int, default=2, help="layers after which a row must know its place")
    parser.add_argument("--probe-weight", type=float, default=0.3, help="0 switches the auxiliary task off")
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--questions", type=int, default=200, help="questions a suite in the final evaluation")
    parser.add_argument("--log-every", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args(values)
    if arguments.batch_tokens < 8_192:
        parser.error("--batch-tokens must be at least 8192, one row of the last stage.")
    if arguments.minutes <= 0 or arguments.steps < 0:
        parser.error("--minutes must be above 0 and --steps not below 0.")
    if not 1 <= arguments.probe_layers <= arguments.layers:
        parser.error(f"--probe-layers must be between 1 and {arguments.layers}, the number of layers.")
    return arguments


def heading(arguments: argparse.Namespace) -> dict[str, object]:
    """Return the first line of the log: what a reader needs to repeat the run."""
    plain = {name: value.name if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    device = torch.cuda.get_device_name() if arguments.device == "cuda" else platform.processor() or "cpu"
    return {
        "seed": arguments.seed,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": device,
        "arguments": plain,
        "text_sha256": corpus.sha256(arguments.text),
    }
