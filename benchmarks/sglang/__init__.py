"""SGLang with SemBlend, on a CPU: what its tests record, and times to the first token beside stock SGLang."""
