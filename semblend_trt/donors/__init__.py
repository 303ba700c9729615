"""Holds donors: who has which and which go first (catalog), and their KV (tiers)."""
