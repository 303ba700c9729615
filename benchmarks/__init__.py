"""Measures speed, room and evidence from a checkout, and writes the rows of `results/`. The wheel has none of it."""

import semblend_trt  # noqa: F401 - has `kernels` found in a checkout beside another distribution of that name
