"""What is installed: declared needs, locks, and what make does on machines with a card and without."""

import ast
import json
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import packages_distributions

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.pages import ROOT
from tests.server_process import ended

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = ("semblend_trt", "engine_wrapper", "kernels", "validation")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


@pytest.fixture
def make(tmp_path):
    """Runs make for an environment that is not there yet, without what was asked of the make that runs the tests."""
    return partial(ended, "make", f"VENV={tmp_path}/venv", cwd=ROOT, MAKEFLAGS="")


def lock(report, *arguments):
    """The lines of a lock that is made of pip's `report`, without comments."""
    command = [sys.executable, str(ROOT / ".ci/lock.py"), *arguments]
    made = subprocess.run(command, input=json.dumps(report), capture_output=True, text=True, check=True).stdout
    return [line for line in made.splitlines() if not line.startswith("#")]


@pytest.mark.promise("commands", "A machine without a GPU gets no CUDA package")
@pytest.mark.parametrize(("target", "extra"), [("validate", "validation"), ("test", "dev")])
def test_a_machine_without_a_gpu_is_kept_free_of_cuda(make, target, extra):
    without, with_gpu = (make("--dry-run", target, gpu).stdout for gpu in ("GPU=", "GPU=1"))
    assert f" -c constraints-cpu.txt -e '.[{extra}]'" in without
    assert "-e '.[gpu," in with_gpu
    assert "constraints-cpu.txt" not in with_gpu
    assert {"torch==2.13.0", "cuda-toolkit<0"} <= set((ROOT / "constraints-cpu.txt").read_text().splitlines())


def needs_of(extra, **environment):
    """What an extra, or None, brings beyond our own packages, by name, where markers see `environment`."""
    found = {}
    for need in map(Requirement, PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]):
        if need.name == "semblend-trt":
            for other in need.extras:
                found |= needs_of(other, **environment)
        elif need.marker is None or need.marker.evaluate(environment or None):
            found[canonicalize_name(need.name)] = need
    return found


def test_what_is_imported_is_declared_and_what_is_declared_is_used():
    """Whether it is imported at the top or later."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    others = {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, *PACKAGES}
    owners = packages_distributions()
    used = {canonicalize_name(owners.get(name, [name])[0]) for name in others}
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    declared = {canonicalize_name(Requirement(line).name) for lines in lists for line in lines}
    # Pydantic brings the one; type checkers alone read the other. `make dynamo-env` has what runs of Dynamo's needs.
    assert used - declared == {"pydantic-core", "typing-extensions", "dynamo", "uvloop"}
    assert set(needs_of(None)) <= used


@pytest.mark.parametrize(
    ("name", "extras"), [("requirements-ci.txt", ["dev"]), ("requirements-vllm.txt", ["embedded", "validation"])]
)
def test_a_lock_holds_what_is_needed(name, extras):
    platform = {"python_version": "3.11", "platform_system": "Linux", "platform_machine": "x86_64"}
    needs = {need: each for extra in [None, *extras] for need, each in needs_of(extra, **platform).items()}
    lines = [line for line in (ROOT / name).read_text().splitlines() if line[0] != "#"]
    locked = map(re.compile(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}").fullmatch, lines)
    pins = {canonicalize_name(found[1]): found[2] for found in locked}
    assert {name: str(need) for name, need in needs.items() if not need.specifier.contains(pins.get(name, "0"))} == {}
    bounds = [Requirement(line) for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if line[0] != "#"]
    assert [str(each) for each in bounds if each.name in pins and not each.specifier.contains(pins[each.name])] == []
    assert "cuda-toolkit" not in pins


@pytest.mark.parametrize(
    ("arguments", "locks", "tried"),
    [
        ("env", "ci", []),
        *((other, "", []) for other in ("env LOCK=", "env PLATFORM=3-12-glibc-x86_64", "env GPU=1", "validate")),
        ("vllm-test", "vllm vllm-next", ["-n 2 --dist loadfile tests/engine_wrapper/vllm", "-m every_version"]),
        ("sglang-test", "sglang", ["tests/engine_wrapper/sglang/standins"]),
        ("dynamo-test", "ci dynamo vllm dynamo-vllm", ["-m dynamo tests/semblend_trt/fleet/dynamo"]),
        ("litellm-test", "ci litellm vllm", ["-m litellm tests/semblend_trt/fleet", "tests/engine_wrapper/vllm -n 0"]),
        ("newest", "", ["venv-newest/constraints.txt -e '.[dev]'", "-m pytest"]),
    ],
)
def test_an_environment_is_installed_from_its_locks_alone_and_tried(make, arguments, locks, tried):
    """On the locks' platform alone."""
    dry = make("--dry-run", "GPU=", "PLATFORM=3-11-glibc-x86_64", *arguments.split())
    assert dry.returncode == 0, dry.stderr
    installs = [line for line in dry.stdout.splitlines() if "pip install" in line and "-r " in line]
    assert [line.partition("-r requirements-")[2].partition(".txt")[0] for line in installs] == locks.split()
    assert all("--require-hashes" in line for line in installs)
    assert [each for each in tried if each not in dry.stdout] == []


def test_a_package_bounds_what_is_locked_beside_it_and_a_lock_names_no_place_of_files():
    needs = ["one<2,>=1", "two[some]==3; python_version > '3'", 'three; extra == "more"']
    bounds = lock({"install": [{"metadata": {"requires_dist": needs}}]}, "bounds")
    assert bounds == ["one<2,>=1", "two==3; python_version > '3'"]

    def item(name, **info):
        return {"metadata": {"name": name, "version": "1.0"}, "download_info": {"url": "https://index/x", **info}}

    hashed = item("Some_Thing", archive_info={"hashes": {"sha256": "a" * 64}})
    assert lock({"install": [hashed, item("ours", dir_info={})]}) == [f"some-thing==1.0 --hash=sha256:{'a' * 64}"]


NO_CARD = "This needs an NVIDIA card, and this machine shows none.\n"
NO_LOCK = "requirements-vllm.txt holds files for Python 3.11 on Linux, x86_64."


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [("gpu-test GPU=", NO_CARD), ("bench GPU=", NO_CARD), ("vllm-env LOCK_PLATFORM=3-11-glibc-other", NO_LOCK)],
)
def test_a_target_refuses_a_machine_that_it_does_not_fit(make, tmp_path, arguments, sentence):
    target, _ = arguments.split()
    # An environment of vLLM with an interpreter, which takes seconds to make.
    (tmp_path / "venv-vllm" / "bin").mkdir(parents=True)
    (tmp_path / "venv-vllm" / "bin" / "python").symlink_to(sys.executable)
    refused = make(*arguments.split())
    assert refused.returncode != 0
    assert refused.stderr.startswith(sentence)
    assert not (tmp_path / "venv").exists()
    assert f"make {target} " in make("help").stdout
