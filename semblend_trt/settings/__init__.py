"""Settings by theme, and the machinery that reads, checks and lists them; `semblend_trt.config` joins them."""
