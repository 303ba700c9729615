"""Agents whose history shifts, played turn by turn in vLLM: stock prefix caching beside reuse."""
