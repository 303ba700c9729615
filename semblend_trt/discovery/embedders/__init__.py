"""Ways to turn text into a unit vector; see `semblend_trt.discovery.embedder` for what they share."""
