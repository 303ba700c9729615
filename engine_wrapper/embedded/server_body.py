"""What a request to the OpenAI API asks of the embedded engine: its fields, checked, as sampling parameters."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine_wrapper.embedded.sampling import SamplingParams
from semblend_trt.errors import ConfigurationError
from semblend_trt.fleet.router.refusals import RequestRefusedError

DEFAULT_MAX_TOKENS = 16
MAX_STOPS = 16
# Fields that would change the answer and that this engine does not know, with the values that ask for nothing.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "early_stopping": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "lora_request": (),
    "min_p": (0,),
    "min_tokens": (0,),
    "n": (1,),
    "no_repeat_ngram_size": (0,),
    "presence_penalty": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "suffix": ("",),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}

StopText = Annotated[str, Field(min_length=1, max_length=1024)]


class StreamOptions(BaseModel):
    """What a stream ends with."""

    include_usage: bool = False


class CompletionBody(BaseModel):
    """The fields that are read of either kind of request; None stands for the default, as clients send it."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: list[int] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None

    @property
    def stop_texts(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, default_max_tokens: int) -> SamplingParams:
        """Where nothing is said the OpenAI API samples at temperature 1. Raises RequestRefusedError."""
        given = {
            "max_tokens": self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "stop_token_ids": self.stop_token_ids,
        }
        fields: dict[str, Any] = {"max_tokens": default_max_tokens}
        fields |= {name: value for name, value in given.items() if value is not None}
        try:
            return SamplingParams(**fields)
        except ConfigurationError as error:
            raise RequestRefusedError(400, "bad_field", str(error)) from None


def read_body(body: dict[str, Any]) -> CompletionBody:
    """Checks a body's fields. Raises RequestRefusedError for wrong values, and for what this engine cannot do."""
    for name, neutral in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(_is_same(value, each) for each in neutral):
            raise RequestRefusedError(400, "unsupported_field", f"{name} is not supported by this engine; leave it out")
    try:
        return CompletionBody.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise RequestRefusedError(400, "bad_field", f"{place}: {first['msg']}") from None


def _is_same(value: Any, neutral: Any) -> bool:
    """Equal, and a truth value where that is one: `logprobs` 0 asks for the tokens' own, and false for none."""
    return bool(value == neutral) and isinstance(value, bool) is isinstance(neutral, bool)
