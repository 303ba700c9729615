"""A server in a process of its own: a worker with the shipped model, or the router."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from importlib.resources import files

MODEL = files("validation") / "assets" / "model"
_ROUTER = "import sys; from semblend_trt.cli.main import main; sys.exit(main())"


class ServerProcess:
    """Runs Python with `command`, one thread for torch, which prints its address on standard error when it listens."""

    def __init__(self, *command, **variables):
        inherited = {name: value for name, value in os.environ.items() if "SEMBLEND_" not in name}
        environment = inherited | {"OMP_NUM_THREADS": "1"} | variables
        self._process = subprocess.Popen(
            [sys.executable, *command], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment
        )
        self._said = []
        self._listens = threading.Event()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def address(self):
        """Waits for the address. Raises RuntimeError with the log when the process ends before."""
        self._listens.wait()
        found = [line for line in self._said if " on http://" in line]
        if not found:
            raise RuntimeError("".join(self._said))
        return found[0].split(" on ")[1].strip()

    @property
    def pid(self):
        return self._process.pid

    @property
    def log(self):
        return "".join(self._said)

    def freeze(self):
        """Stops it; its connections stay open."""
        self._process.send_signal(signal.SIGSTOP)

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._listener.join()

    def _listen(self):
        for line in self._process.stderr:
            self._said.append(line)
            if " on http://" in line:
                self._listens.set()
        self._listens.set()


def worker(**variables):
    """An embedded engine with the shipped model, at a free port."""
    command = ["-m", "engine_wrapper.embedded.server", "--model", str(MODEL), "--dtype", "float32", "--port", "0"]
    return ServerProcess(*command, **variables)


def router(config, **variables):
    return ServerProcess("-c", _ROUTER, "router", "--config", str(config), **variables)


@contextmanager
def fleet(folder, workers, tenants, *, variables=None, **fields):
    """A router, configured in `folder` with more `fields`, over running workers, which are numbered from 1 on."""
    with ExitStack() as ending:
        for each in workers:
            ending.callback(each.kill)
        given = {"port": 0, "model": str(MODEL), "secret_env": "ROUTER_SECRET", **fields}
        text = "".join(f"{name} = {json.dumps(value)}\n" for name, value in given.items())
        for number, each in enumerate(workers, 1):
            text += f'[[replicas]]\nurl = "{each.address()}"\nworker_id = {number}\n'
        for tenant in tenants:
            digest = hashlib.sha256(key_of(tenant).encode()).hexdigest()
            text += f'[[keys]]\nsha256 = "{digest}"\ntenants = ["{tenant}"]\n'
        config = folder / "router.toml"
        config.write_text(text)
        front = router(config, ROUTER_SECRET="a secret of the router", **(variables or {}))
        ending.callback(front.kill)
        yield front


def key_of(tenant):
    return f"key of {tenant}"
