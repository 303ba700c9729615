"""Replays request telemetry through the eviction policies; every time is predicted by a model, none is measured."""
