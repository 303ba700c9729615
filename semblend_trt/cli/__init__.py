"""The command `semblend-trt`: one module here for each subcommand, see main.py."""
