"""Semantic neighbours, the extra `semantic`: donors with texts like a request's. They are reported, never reused."""
