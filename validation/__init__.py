"""Measures reuse against cold prefill: is it faster, and are the answers still right?"""

import semblend_trt  # noqa: F401 - has `kernels` found in a checkout beside another distribution of that name
