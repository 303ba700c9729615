"""Holds donors: who has which (catalog), which go first (eviction), and their KV (tiers)."""
