"""Replay request telemetry through eviction policies, and through a fleet whose times are simulated."""
