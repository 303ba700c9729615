"""Answers at scale: many prompts of every family, served in batches under every arm, without times."""
