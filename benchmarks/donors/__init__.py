"""Measures what keeping donors costs: disk, room in the store, and the watch over the model's weights."""
