"""`vllm serve` with the shipped model in a process of its own."""

import contextlib
import os
import signal
import socket

from tests.builders.vllm import PLACE
from tests.server_process import MODEL, ServerProcess

# A session of its own: the engine is a process beside the server, and outlives it when that is killed.
SERVE = "import os, sys; os.setsid(); from vllm.entrypoints.cli.main import main; sys.exit(main())"
OPTIONS = "--dtype float32 --block-size 32 --enforce-eager --host 127.0.0.1"
WORDS = [word for name, value in PLACE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
# vLLM writes its address into the log.
VARIABLES = {"VLLM_LOGGING_LEVEL": "INFO", "VLLM_LOGGING_STREAM": "ext://sys.stderr", "HF_HUB_OFFLINE": "1"}


class ServeProcess(ServerProcess):
    """A server at a free port, with these options and variables."""

    def __init__(self, *options, **variables):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        given = [*OPTIONS.split(), *WORDS, "--port", str(port), *options]
        super().__init__("-c", SERVE, "serve", str(MODEL), *given, **VARIABLES, **variables)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        super().kill()
