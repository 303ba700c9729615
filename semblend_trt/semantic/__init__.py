"""Semantic neighbours (extra `semantic`): donors with texts similar to a request's. They are reported, never reused."""
