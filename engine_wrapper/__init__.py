"""Makes an engine run a reuse plan: layer schedules, the forward that follows them, and the guard on publication."""

import semblend_trt  # noqa: F401 - has `kernels` found in a checkout beside another distribution of that name
