"""Train the shipped model: text, then tasks at 4,096 tokens, then tasks at 8,192.

`python -m benchmarks.yardstick_model.train --text FILE --out DIR --seed N [--minutes M]`. Then
`python -m validation quality --model DIR/model --arms cold` says how often it answers exactly.
"""

import argparse
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import transformers
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks.yardstick_model.tasks import (
    END_ID,
    END_OF_TEXT_ID,
    SEPARATOR,
    SPECIAL_TOKENS,
    TEXT_WEIGHT,
    TaskWriter,
    encode_books,
    read_books,
    train_tokenizer,
)
from semblend_trt.errors import ConfigurationError
from validation import prompts

# What the shipped model was trained with.
RATE = 1.6e-3
BATCH_TOKENS = 131_072
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS = 8, 256, 416, 4, 2
# Layers after which a row must know its place, and the weight of that auxiliary task.
PROBE_LAYERS, PROBE_WEIGHT = 2, 0.3
WORKERS = 14
LOG_EVERY = 20


def parse(values: list[str] | None = None) -> argparse.Namespace:
    """Return the checked arguments of the command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.yardstick_model.train", description="Train the shipped model.")
    parser.add_argument("--text", type=Path, required=True, help="books in UTF-8, separated by <|endoftext|>, or a .gz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=8.0, help="training time without compilation")
    parser.add_argument("--steps", type=int, default=0, help="train for this many steps instead of --minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="compiled on cuda")
    arguments = parser.parse_args(values)
    if arguments.minutes <= 0 or arguments.steps < 0:
        parser.error("--minutes must be above 0 and --steps not below 0.")
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
        "text_sha256": hashlib.sha256(arguments.text.read_bytes()).hexdigest(),
    }


_DOCUMENT_ID = SPECIAL_TOKENS.index(prompts.DOCUMENT_MARK)
# Offsets from the document mark: `Stock list of` fills 1 to 3, the place is at 4 to 6 and a little beyond.
_PLACE_OFFSETS = (4, 5, 6)
_FIRST_ROW_OFFSET = 8
_STRIDE = 4


class PlaceProbe(nn.Module):
    """Linear heads that are thrown away after training."""

    def __init__(self, width: int, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._first_id: int = tokenizer.encode("Stock list of").ids[0]
        self.heads = nn.ModuleList(nn.Linear(width, tokenizer.get_vocab_size()) for _ in _PLACE_OFFSETS)

    def labels(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return place tokens, shape (offsets, rows, length), and which tokens are in rows of a stock list."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device).expand_as(ids)
        marks = torch.where(ids < len(SPECIAL_TOKENS), positions, 0).cummax(dim=1).values
        opening = ids.gather(1, marks) == _DOCUMENT_ID
        stock = ids.gather(1, (marks + 1).clamp(max=length - 1)) == self._first_id
        places = [ids.gather(1, (marks + offset).clamp(max=length - 1)) for offset in _PLACE_OFFSETS]
        return torch.stack(places), opening & stock & (positions - marks >= _FIRST_ROW_OFFSET)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss over a fourth of the tokens; hidden: (rows, length, width), ids: (rows, length)."""
        places, inside = self.labels(ids)
        scale = inside[:, ::_STRIDE].flatten().float()
        total = scale.new_zeros(())
        for head, place in zip(self.heads, places, strict=True):
            logits = head(hidden[:, ::_STRIDE]).float().flatten(0, 1)
            each = functional.cross_entropy(logits, place[:, ::_STRIDE].flatten(), reduction="none")
            total = total + (each * scale).sum() / scale.sum().clamp(min=1.0)
        return total / len(self.heads)


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of the run: it lasts until `until` of the run's time, on rows of `length` tokens."""

    until: float
    length: int
    text_share: float
    worker_share: float


STAGES = (Stage(0.15, 2_048, 1.0, 0.15), Stage(0.80, 4_096, 1 / 6, 0.55), Stage(1.0, 8_192, 1 / 6, 0.30))
WARM_UP_STEPS = 150


def build_model(vocabulary: int) -> PreTrainedModel:
    """Return a fresh float32 model."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=8_192,
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT_ID,
        eos_token_id=END_OF_TEXT_ID,
        pad_token_id=END_OF_TEXT_ID,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
    )
    return Qwen2ForCausalLM(config)


def losses(hidden: torch.Tensor, embedding: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [weighted loss, mean loss of answer tokens, share of answer tokens that are the likeliest]. hidden: (rows,
    length, width); embedding: (vocabulary, width); ids and weights: (rows, length)."""
    logits = functional.linear(hidden[:, :-1], embedding).float().flatten(0, 1)
    targets, scale = ids[:, 1:].flatten(), weights[:, 1:].flatten().float()
    each = functional.cross_entropy(logits, targets, reduction="none")
    answers = (scale > TEXT_WEIGHT).float()
    count = answers.sum().clamp(min=1.0)
    hits = ((logits.argmax(-1) == targets).float() * answers).sum() / count
    return torch.stack([(each * scale).sum() / scale.sum(), (each * answers).sum() / count, hits])


class Trainer:
    """Runs the stages by the share of minutes or steps gone, and writes the log."""

    def __init__(self, arguments: argparse.Namespace, model: PreTrainedModel, probe: PlaceProbe, log: IO[str]) -> None:
        self._arguments = arguments
        self._device, self._is_compiled = arguments.device, arguments.device == "cuda"
        self._model = model.to(self._device).train()
        self._probe = probe.to(self._device)
        self._parameters = [*model.parameters(), *probe.parameters()]
        # Only matrices decay.
        decays = {0.1: [each for each in self._parameters if each.dim() > 1]}
        decays[0.0] = [each for each in self._parameters if each.dim() <= 1]
        groups = [{"params": each, "weight_decay": decay} for decay, each in decays.items()]
        self._optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=self._is_compiled)
        self._losses = losses
        self._log = log
        self.step = 0
        if self._is_compiled:
            # Layer by layer: the layers share their code, so one compilation serves all of them.
            for layer in model.model.layers:
                layer.compile(dynamic=False)
            self._probe.compile(dynamic=False)
            self._losses = torch.compile(losses, dynamic=False)

    def run(self, streams: Sequence[Iterator[Any]]) -> None:
        """Train on the stages' batches until the minutes or steps are used up."""
        # Every shape is compiled before the clock starts.
        for stream in streams if self._is_compiled else []:
            self._update(next(stream), rate=0.0)
        started, tokens = (marked := time.monotonic()), 0
        while (progress := self._progress(started)) < 1.0:
            batch = next(next(stream for stream, stage in zip(streams, STAGES, strict=True) if progress < stage.until))
            cosine, warm_up = 0.5 * (1.0 + math.cos(math.pi * progress)), min(1.0, (self.step + 1) / WARM_UP_STEPS)
            values = self._update(batch, RATE * warm_up * (0.02 + 0.98 * cosine))
            self.step += 1
            tokens += batch[0].numel()
            if self.step % LOG_EVERY == 0:
                now, entry = time.monotonic(), {"step": self.step, "length": batch[0].shape[1]}
                names = ("loss", "answer_loss", "answer_hits", "probe_loss")
                entry |= {name: round(value, 4) for name, value in zip(names, values.tolist(), strict=True)}
                entry |= {"tokens_per_second": round(tokens / (now - marked)), "wall_seconds": round(now - started, 1)}
                print(json.dumps(entry), file=self._log, flush=True)
                print(json.dumps(entry), flush=True)
                tokens, marked = 0, now

    def _progress(self, started: float) -> float:
        """Return the share of the steps or minutes that is used up."""
        steps, minutes = self._arguments.steps, self._arguments.minutes
        return float(self.step / steps if steps else (time.monotonic() - started) / (60.0 * minutes))

    def _update(self, batch: tuple[torch.Tensor, torch.Tensor], rate: float) -> torch.Tensor:
        ids, weights = (each.to(self._device, non_blocking=True) for each in batch)
        ids = ids.long()
        with torch.autocast(self._device, torch.bfloat16, enabled=self._device == "cuda"):
            found = self._model.model(input_ids=ids, use_cache=False, output_hidden_states=True)
            values = self._losses(found.last_hidden_state, self._model.lm_head.weight, ids, weights)
            probe_loss = self._probe(found.hidden_states[PROBE_LAYERS], ids)
        torch.autograd.backward(values[0] + PROBE_WEIGHT * probe_loss)
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.cat([values.detach(), probe_loss.detach().reshape(1)])


def save(model: PreTrainedModel, tokenizer: Tokenizer, directory: Path) -> None:
    """Write weights in bfloat16, configuration and tokenizer: no token is added to a prompt, special ones are known."""
    model.config.dtype = torch.bfloat16
    model.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT_ID, eos_token_id=[END_ID, END_OF_TEXT_ID], pad_token_id=END_OF_TEXT_ID
    )
    model.to(torch.bfloat16).save_pretrained(directory)
    ends = dict.fromkeys(("bos_token", "eos_token", "pad_token"), SEPARATOR)
    more: dict[str, Any] = {"extra_special_tokens": list(prompts.MARKS), "clean_up_tokenization_spaces": False}
    packaged = PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8_192, **ends, **more)
    packaged.save_pretrained(directory)


def main(values: list[str] | None = None) -> None:
    """Train, log and save."""
    arguments = parse(values)
    try:
        books = read_books(arguments.text)
    except ConfigurationError as error:
        sys.exit(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(arguments.seed)
    tokenizer = train_tokenizer(books, arguments.seed)
    source = tokenizer, books, encode_books(tokenizer, books)
    # Forked workers share the books; the parent must not have touched the GPU yet.
    loaders: list[DataLoader[Any]] = [
        DataLoader(
            TaskWriter(*source, arguments.seed, (BATCH_TOKENS // stage.length, stage.length, stage.text_share)),
            batch_size=None,
            num_workers=max(1, round(WORKERS * stage.worker_share)),
            prefetch_factor=32,
            multiprocessing_context="fork",
        )
        for stage in STAGES
    ]
    streams = list(map(iter, loaders))
    torch.set_float32_matmul_precision("high")
    model = build_model(tokenizer.get_vocab_size())
    with (arguments.out / "training_log.jsonl").open("w", encoding="utf-8") as log:
        log.write(json.dumps(heading(arguments)) + "\n")
        probe = PlaceProbe(model.config.hidden_size, tokenizer)
        Trainer(arguments, model, probe, log).run(streams)
        save(model, tokenizer, arguments.out / "model")


if __name__ == "__main__":
    main()
