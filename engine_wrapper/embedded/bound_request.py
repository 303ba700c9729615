"""A request as V1's C++ cache manager hands it to the connector's query: the bound attributes, on another object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine_wrapper.embedded.request import LlmRequest


class BoundRequest:
    """A view of `request` that has only `attributes`, and raises AttributeError for any other."""

    __slots__ = ("_attributes", "_request")

    def __init__(self, request: LlmRequest, attributes: frozenset[str]) -> None:
        self._request = request
        self._attributes = attributes

    @property
    def is_generation_only_request(self) -> bool:
        """A property here, and a method of the Python class."""
        return self._request.is_generation_only_request()

    def __getattr__(self, name: str) -> Any:
        if name not in self._attributes:
            raise AttributeError(f"the bound LlmRequest has no attribute {name}")
        return getattr(self._request, name)
