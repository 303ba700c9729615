"""The iterator that streams one request's tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine_wrapper.embedded.outputs import RequestOutput, output_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from engine_wrapper.embedded.llm import LLM
    from engine_wrapper.embedded.request import LlmRequest


class RequestStream:
    """Iterator over one request's outputs. `request_id` may be given to `LLM.abort`."""

    def __init__(self, llm: LLM, request: LlmRequest, prompt: str | None, streaming: bool) -> None:
        self._llm = llm
        self._request = request
        self._prompt = prompt
        self._streaming = streaming
        self._given = 0
        self._ended = False

    @property
    def request_id(self) -> int:
        return self._request.request_id

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        if self._ended:
            raise StopIteration
        request = self._request
        self._llm.run_until(self.has_news)
        if self._streaming and request.num_generated > self._given:
            self._given += 1
            output = output_of(request, self._llm.tokenizer, self._prompt, self._given)
        else:
            output = output_of(request, self._llm.tokenizer, self._prompt)
        if output.finished:
            self.close()
        return output

    def close(self) -> None:
        """Ends the iteration, and the request where it still runs."""
        if not self._ended:
            self._ended = True
            self._llm.forget(self._request)

    def __del__(self) -> None:
        self.close()

    def has_news(self) -> bool:
        """True when the next output is there and taking it runs nothing."""
        return self._request.is_finished or (self._streaming and self._request.num_generated > self._given)
