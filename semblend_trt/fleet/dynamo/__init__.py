"""A component of NVIDIA Dynamo that places requests by text; `python -m semblend_trt.fleet.dynamo` runs it."""
