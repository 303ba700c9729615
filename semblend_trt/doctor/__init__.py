"""What is installed here, what it fits, and what would be refused: the checks of `semblend-trt doctor`."""
