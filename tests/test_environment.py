"""What is installed: declared needs, locks, and what make does on machines with a card and without."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("semblend_trt", "engine_wrapper", "kernels", "validation")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    arguments = [str(part) for part in command]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("target", "extra"), [("validate", "validation"), ("test", "dev")])
def test_a_machine_without_a_gpu_is_kept_free_of_cuda(tmp_path: Path, target: str, extra: str) -> None:
    dry = ("make", "-C", ROOT, "--dry-run", f"VENV={tmp_path}/venv", target)
    without, with_gpu = run(*dry, "GPU=", cwd=tmp_path).stdout, run(*dry, "GPU=1", cwd=tmp_path).stdout
    assert f" -c constraints-cpu.txt -e '.[{extra}]'" in without
    assert "-e '.[gpu," in with_gpu
    assert "constraints-cpu.txt" not in with_gpu
    pins = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    assert {"torch==2.13.0", "cuda-toolkit<0"} <= set(pins)


def needs_of(extra: str | None, **environment: str) -> dict[str, Requirement]:
    """What an extra, or None, brings beyond our own packages, by name, where markers see `environment`."""
    found: dict[str, Requirement] = {}
    for need in map(Requirement, PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]):
        if need.name == "semblend-trt":
            for other in need.extras:
                found |= needs_of(other, **environment)
        elif need.marker is None or need.marker.evaluate(environment or None):
            found[canonicalize_name(need.name)] = need
    return found


def imports(folders: list[Path]) -> set[str]:
    """Packages of others that modules import, at the top or later; benchmarks, which run from a checkout, aside."""
    paths = {path for folder in folders for path in folder.rglob("*.py") if "benchmarks" not in path.parts}
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, *PACKAGES}


def test_what_is_imported_is_declared_and_what_is_declared_is_used() -> None:
    sold_as = packages_distributions()
    used = {
        canonicalize_name(sold_as.get(name, [name])[0]) for name in imports([ROOT / package for package in PACKAGES])
    }
    lists = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    declared = {canonicalize_name(Requirement(line).name) for lines in lists for line in lines}
    # Pydantic brings the one; type checkers alone read the other.
    assert used - declared == {"pydantic-core", "typing-extensions"}
    # Transformers reads chat templates with Jinja.
    assert set(needs_of(None)) - used == {"jinja2"}


def locked(name: str) -> dict[str, str]:
    """A lock's version of every package."""
    found = {}
    for line in (ROOT / name).read_text().splitlines():
        if not line.startswith("#"):
            pin, digest = line.split(" --hash=sha256:")
            assert len(bytes.fromhex(digest)) == 32
            package, version = pin.split("==")
            found[canonicalize_name(package)] = version
    return found


@pytest.mark.parametrize(
    ("name", "extras"), [("requirements-ci.txt", ["dev"]), ("requirements-vllm.txt", ["router", "validation"])]
)
def test_a_lock_holds_what_is_needed(name: str, extras: list[str]) -> None:
    platform = {"python_version": "3.11", "platform_system": "Linux", "platform_machine": "x86_64"}
    needs = {need: each for extra in [None, *extras] for need, each in needs_of(extra, **platform).items()}
    pins = locked(name)
    assert {name: str(need) for name, need in needs.items() if not need.specifier.contains(pins.get(name, "0"))} == {}
    bounds = [Requirement(line) for line in (ROOT / "constraints-cpu.txt").read_text().splitlines() if line[0] != "#"]
    assert [str(each) for each in bounds if each.name in pins and not each.specifier.contains(pins[each.name])] == []
    assert "cuda-toolkit" not in pins


def test_the_lock_is_used_on_its_platform_alone(tmp_path: Path) -> None:
    def installed(target: str, *variables: str) -> bool:
        dry = run("make", "-C", ROOT, "--dry-run", f"VENV={tmp_path}/venv", target, *variables, cwd=tmp_path)
        assert dry.returncode == 0, dry.stderr
        return "--require-hashes -r requirements-ci.txt" in dry.stdout

    ours = "PLATFORM=3-11-glibc-x86_64"
    assert installed("env", "GPU=", ours)
    assert not installed("env", "GPU=", ours, "LOCK=")
    assert not installed("env", "GPU=", "PLATFORM=3-12-glibc-x86_64")
    assert not installed("env", "GPU=1", ours)
    assert not installed("validate", "GPU=", ours)


def test_vllm_is_installed_from_its_lock_alone_and_on_its_platform(tmp_path: Path) -> None:
    steps = run("make", "-C", ROOT, "--dry-run", f"VENV={tmp_path}/venv", "vllm-test", "GPU=", cwd=tmp_path).stdout
    assert f"-m venv {tmp_path}/venv-vllm" in steps
    assert "--no-deps --require-hashes -r requirements-vllm.txt" in steps
    assert "-n 0 tests/engine_wrapper/vllm" in steps
    assert f"--require-hashes --target {tmp_path}/venv-vllm/next -r requirements-vllm-next.txt" in steps
    (second,) = (line for line in steps.splitlines() if line.startswith(f"PYTHONPATH={tmp_path}/venv-vllm/next "))
    assert "-m every_version" in second
    elsewhere = [f"VENV={tmp_path}/venv", "LOCK_PLATFORM=3-11-glibc-other", "vllm-env"]
    refused = run("make", "-C", ROOT, *elsewhere, cwd=tmp_path)
    assert refused.returncode != 0
    assert refused.stderr.startswith("requirements-vllm.txt holds files for Python 3.11 on Linux, x86_64.")


def test_a_package_bounds_what_is_locked_beside_it() -> None:
    needs = ["one<2,>=1", "two[some]==3; python_version > '3'", 'three; extra == "more"']
    report = {"install": [{"metadata": {"requires_dist": needs}}]}
    command = [sys.executable, str(ROOT / ".ci/lock.py"), "bounds"]
    made = subprocess.run(command, input=json.dumps(report), capture_output=True, text=True, check=True).stdout
    assert made.splitlines() == ["one<2,>=1", "two==3; python_version > '3'"]


def test_a_lock_names_no_place_of_files() -> None:
    def item(name: str, **info: object) -> dict[str, object]:
        return {"metadata": {"name": name, "version": "1.0"}, "download_info": {"url": "https://index/x", **info}}

    hashed = {"hashes": {"sha256": "a" * 64}}
    report = {"install": [item("Some_Thing", archive_info=hashed), item("ours", dir_info={})]}
    command = [sys.executable, str(ROOT / ".ci/lock.py")]
    made = subprocess.run(command, input=json.dumps(report), capture_output=True, text=True, check=True).stdout
    assert [line for line in made.splitlines() if not line.startswith("#")] == [
        f"some-thing==1.0 --hash=sha256:{'a' * 64}"
    ]
    assert "index" not in made


def test_the_newest_packages_are_tried_in_an_environment_of_their_own(tmp_path: Path) -> None:
    steps = run("make", "-C", ROOT, "--dry-run", f"VENV={tmp_path}/venv", "newest", "GPU=", cwd=tmp_path).stdout
    assert f"-m venv {tmp_path}/venv-newest" in steps
    assert f"-c {tmp_path}/venv-newest/constraints.txt -e '.[dev]'" in steps
    assert "requirements-ci.txt" not in steps
    assert "-m pytest" in steps


@pytest.mark.parametrize("target", ["gpu-test", "bench"])
def test_a_target_that_needs_a_card_refuses_without_one(tmp_path: Path, target: str) -> None:
    refused = run("make", "-C", ROOT, "GPU=", f"VENV={tmp_path}/venv", target, cwd=tmp_path)
    assert refused.returncode != 0
    assert refused.stderr.splitlines()[0] == "This needs an NVIDIA card, and this machine shows none."
    assert not (tmp_path / "venv").exists()
    assert f"make {target} " in run("make", "-C", ROOT, "help", cwd=tmp_path).stdout
