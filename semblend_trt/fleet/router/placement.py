"""Placer: reads a request's prompt off the event loop, asks the directory who holds it, and lets the policy choose."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from semblend_trt.fleet.router.prompts import PromptError, PromptTooLongError
from semblend_trt.fleet.router.refusals import RequestRefusedError
from semblend_trt.fleet.routing_policy import Choice, LeastLoaded, Replica, RoutingPolicy, RoutingRequest

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from semblend_trt.fleet.directory import Directory, Holder
    from semblend_trt.fleet.router.counters import RouterCounters
    from semblend_trt.fleet.router.prompts import PromptReader, ReadingThreads
    from semblend_trt.fleet.router.tenants import Caller

logger = logging.getLogger(__name__)

# What a text that could not be read is taken for, in bytes a token.
BYTES_PER_TOKEN = 4


@dataclass(frozen=True, slots=True, eq=False)
class ReadPrompt:
    """A prompt that can be placed: its token ids, int64 [n], None where they are unknown, their number, and holders."""

    token_ids: npt.NDArray[np.int64] | None
    tokens: int
    holders: tuple[Holder, ...] = ()


class Placer:
    """What cannot be read or looked up is placed by load alone, and counted; only what is too long is refused."""

    def __init__(
        self,
        prompts: ReadingThreads,
        directory: Directory | None,
        policy: RoutingPolicy,
        counters: RouterCounters,
        *,
        read_seconds: float,
    ) -> None:
        self._prompts, self._directory = prompts, directory
        self._policy, self._least_loaded = policy, LeastLoaded()
        self._counters, self._read_seconds = counters, read_seconds

    def close(self) -> None:
        self._prompts.close()

    async def read(self, body: Mapping[str, Any], body_bytes: int, caller: Caller) -> ReadPrompt:
        """Reads the prompt of a body that had so many bytes, and looks its holders up among the caller's own donors.

        Raises RequestRefusedError, 400 prompt_too_long.
        """
        unread = ReadPrompt(None, body_bytes // BYTES_PER_TOKEN)
        reading = self._prompts.read(body_bytes, lambda reader: self._read(reader, body, caller.salt))
        try:
            return await asyncio.wait_for(reading, self._read_seconds)
        except asyncio.TimeoutError:
            self._counters.fallbacks.labels("slow_reading").inc()
        except PromptTooLongError as error:
            raise RequestRefusedError(400, "prompt_too_long", str(error)) from None
        except (PromptError, ValueError, OverflowError):
            # Whether the prompt is bad is for the replica to say: its template may be another.
            self._counters.fallbacks.labels("unread_prompt").inc()
        except Exception:
            logger.exception("a prompt could not be read")
            self._counters.fallbacks.labels("unread_prompt").inc()
        return unread

    def choose(self, prompt: ReadPrompt, caller: Caller, replicas: Sequence[Replica]) -> Choice:
        """Raises NoReplicaError when none of `replicas` is healthy."""
        if prompt.token_ids is None:
            return self._least_loaded.choose(RoutingRequest(()), replicas)
        request = RoutingRequest(prompt.token_ids, caller.session, prompt.holders, caller.salt)
        return self._policy.choose(request, replicas)

    def _read(self, reader: PromptReader, body: Mapping[str, Any], salt: str | None) -> ReadPrompt:
        ids = reader.chat(body) if "messages" in body else reader.completion(body)
        token_ids = np.array(ids, dtype=np.int64)
        return ReadPrompt(token_ids, len(ids), self._holders(token_ids, salt))

    def _holders(self, token_ids: npt.NDArray[np.int64], salt: str | None) -> tuple[Holder, ...]:
        if self._directory is None:
            return ()
        try:
            return self._directory.holders(token_ids, tenant_salt=salt)
        except Exception:
            logger.exception("the directory could not be asked")
            self._counters.fallbacks.labels("directory_failed").inc()
            return ()
