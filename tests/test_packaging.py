"""The wheel as a user gets it, alone and beside Hugging Face's distribution that is also imported as `kernels`."""

from __future__ import annotations

import ast
import email
import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("semblend_trt", "engine_wrapper", "kernels", "validation")
IMPORT_OURS = "from kernels.kv_move import kv_move; from semblend_trt.loader import PlanLoader"
IMPORT_THEIRS = "from kernels import get_kernel; assert get_kernel.__module__ == 'kernels.load'"


def run(*command: str | Path, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    arguments = [str(part) for part in command]
    return subprocess.run(arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel built from it."""
    target = tmp_path_factory.mktemp("dist")
    build = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, ROOT, cwd=target)
    assert build.returncode == 0, build.stdout + build.stderr
    return target


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    return next(built.glob("semblend_trt-*.whl"))


@pytest.fixture(scope="module")
def wheel_files(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


@pytest.fixture(scope="module")
def requirements(wheel: Path) -> list[Requirement]:
    """What the wheel's metadata asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = email.message_from_string(archive.read(metadata).decode())
    return [Requirement(line) for line in headers.get_all("Requires-Dist", [])]


class Environment:
    """A virtual environment of its own that finds torch and the like where the tests' interpreter has them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.python = root / "bin" / "python"
        created = run(sys.executable, "-m", "venv", "--without-pip", root, cwd=root.parent)
        assert created.returncode == 0, created.stderr
        site_packages = next(root.glob("lib/python3*/site-packages"))
        (site_packages / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *arguments: str | Path) -> None:
        done = run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.root)
        assert done.returncode == 0, done.stdout + done.stderr

    def install(self, wheel: Path) -> None:
        self.pip("install", "--no-deps", "--ignore-installed", wheel)

    def uninstall(self, *names: str) -> None:
        self.pip("uninstall", "--yes", *names)

    def executes(self, code: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return run(self.python, "-c", code, cwd=self.root, **variables)

    def check(self, code: str, **variables: str) -> None:
        done = self.executes(code, **variables)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def hub_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of Hugging Face's `kernels`."""
    target = tmp_path_factory.mktemp("hub")
    got = run(
        sys.executable, "-m", "pip", "download", "--no-deps", "--retries", "1", "kernels", "-d", target, cwd=target
    )
    if got.returncode != 0:
        pytest.skip("skipped: no package index within reach offers Hugging Face's kernels")
    return next(target.glob("kernels-*.whl"))


@pytest.fixture(scope="module")
def shared_environment(tmp_path_factory: pytest.TempPathFactory, hub_kernels: Path) -> Environment:
    """An environment with everything that Hugging Face's `kernels` needs, but not itself."""
    environment = Environment(tmp_path_factory.mktemp("shared") / "venv")
    environment.pip("install", hub_kernels)
    environment.check(IMPORT_THEIRS)
    environment.uninstall("kernels")
    return environment


@pytest.fixture
def environment(shared_environment: Environment) -> Environment:
    shared_environment.uninstall("kernels", "semblend-trt")
    return shared_environment


def test_wheel_ships_the_four_packages_and_nothing_else(wheel_files: set[str]) -> None:
    tops = {name.split("/")[0] for name in wheel_files if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert not [name for name in wheel_files if "test" in Path(name).name or "__pycache__" in name]


def test_wheel_ships_every_module(wheel_files: set[str]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    benchmarks = ("kernels/benchmarks/", "semblend_trt/benchmarks/", "validation/benchmarks/")
    assert {name for name in modules if not name.startswith(benchmarks)} <= wheel_files
    assert not [name for name in wheel_files if name.startswith(benchmarks)]


def test_wheel_ships_the_model_and_the_excerpt(wheel_files: set[str]) -> None:
    assets = {Path(name).name for name in wheel_files if name.startswith("validation/assets/")}
    assert {"excerpt.txt", "config.json", "model.safetensors", "tokenizer.json"} <= assets


def test_shipped_model_is_at_most_10_mb() -> None:
    files = (path for path in (ROOT / "validation/assets/model").rglob("*") if path.is_file())
    assert sum(path.stat().st_size for path in files) <= 10_000_000


def test_wheel_carries_the_licence_and_the_extras(wheel: Path, wheel_files: set[str]) -> None:
    (licence,) = (name for name in wheel_files if name.endswith("/licenses/LICENSE"))
    (metadata,) = (name for name in wheel_files if name.endswith(".dist-info/METADATA"))
    with zipfile.ZipFile(wheel) as archive:
        assert "Apache License" in archive.read(licence).decode()
        headers = email.message_from_string(archive.read(metadata).decode())
    assert headers["Requires-Python"] == ">=3.10"
    extras = {
        "trtllm",
        "vllm",
        "gpu",
        "embedded",
        "semantic",
        "embedder",
        "onnx",
        "onnx-gpu",
        "nats",
        "router",
        "validation",
        "metrics",
        "dev",
    }
    assert set(headers.get_all("Provides-Extra", [])) == extras


def test_sdist_can_be_built_and_tested(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    locks = {f"requirements-{name}.txt" for name in ("ci", "vllm", "vllm-next")}
    assert {"Makefile", "constraints-cpu.txt", *locks, ".ci/lock.py", "LICENSE", "tests/test_packaging.py"} <= names


def test_kernels_is_a_namespace_package(wheel_files: set[str]) -> None:
    assert not (ROOT / "kernels/__init__.py").exists()
    assert "kernels/__init__.py" not in wheel_files


def test_no_module_is_shared_with_hugging_face_kernels(wheel_files: set[str], hub_kernels: Path) -> None:
    def modules(names: list[str]) -> set[str]:
        return {name.split("/")[1].split(".")[0] for name in names if name.startswith("kernels/")}

    assert modules(list(wheel_files)).isdisjoint(modules(zipfile.ZipFile(hub_kernels).namelist()))


@pytest.mark.parametrize("ours_first", [True, False])
def test_both_kernels_work_in_one_environment(
    environment: Environment, wheel: Path, hub_kernels: Path, ours_first: bool
) -> None:
    for distribution in (wheel, hub_kernels) if ours_first else (hub_kernels, wheel):
        environment.install(distribution)
    environment.check(f"{IMPORT_OURS}; {IMPORT_THEIRS}")
    environment.check(f"{IMPORT_THEIRS}; {IMPORT_OURS}")


def test_removing_either_leaves_the_other_working(environment: Environment, wheel: Path, hub_kernels: Path) -> None:
    environment.install(wheel)
    environment.install(hub_kernels)
    environment.uninstall("kernels")
    environment.check(IMPORT_OURS)
    environment.install(hub_kernels)
    environment.uninstall("semblend-trt")
    environment.check(IMPORT_THEIRS)


def test_transformers_never_takes_ours_for_theirs(environment: Environment, wheel: Path, hub_kernels: Path) -> None:
    """Transformers asks for the version of whatever is importable as `kernels`."""
    question = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"
    environment.install(wheel)
    assert environment.executes(question).stdout.strip() == "False"
    environment.install(hub_kernels)
    with_both = environment.executes(question).stdout
    environment.uninstall("semblend-trt")
    assert environment.executes(question).stdout == with_both


@pytest.mark.parametrize("is_installed", [True, False])
def test_a_checkout_works_beside_hugging_face_kernels(
    environment: Environment, hub_kernels: Path, is_installed: bool
) -> None:
    """A regular package wins over a namespace portion: theirs is found, and ours once one of our packages is."""
    environment.install(hub_kernels)
    variables = {} if is_installed else {"PYTHONPATH": str(ROOT)}
    if is_installed:
        environment.pip("install", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    environment.check(IMPORT_THEIRS, **variables)
    for package in ("semblend_trt", "engine_wrapper", "validation"):
        environment.check(f"import {package}; {IMPORT_OURS}; {IMPORT_THEIRS}", **variables)
        environment.check(f"{IMPORT_THEIRS}; import {package}; {IMPORT_OURS}", **variables)


@pytest.mark.parametrize("target", ["validate", "test"])
def test_a_machine_without_a_gpu_is_kept_free_of_cuda(tmp_path: Path, target: str) -> None:
    dry = ("make", "-C", ROOT, "--dry-run", f"VENV={tmp_path}/venv", target)
    without, with_gpu = run(*dry, "GPU=", cwd=tmp_path).stdout, run(*dry, "GPU=1", cwd=tmp_path).stdout
    assert re.search(r"pip install .*-c constraints-cpu\.txt -e '\.\[(validation|dev)\]'", without)
    assert "-e '.[gpu," in with_gpu
    assert "constraints-cpu.txt" not in with_gpu
    pins = (ROOT / "constraints-cpu.txt").read_text().splitlines()
    assert {"torch==2.13.0", "cuda-toolkit<0"} <= set(pins)


def needs_of(requirements: list[Requirement], extra: str, **environment: str) -> dict[str, Requirement]:
    """What an extra ("" for none) brings beyond our own packages, by name, where markers see `environment`."""
    found: dict[str, Requirement] = {}
    for need in requirements:
        asked = need.marker is None or need.marker.evaluate({**environment, "extra": extra})
        if asked and need.name == "semblend-trt":
            for other in need.extras:
                found |= needs_of(requirements, other, **environment)
        elif asked:
            found[canonicalize_name(need.name)] = need
    return found


def imports(folders: list[Path]) -> set[str]:
    """Packages of others that modules import, at the top or later; benchmarks, which run from a checkout, aside."""
    paths = {path for folder in folders for path in folder.rglob("*.py") if "benchmarks" not in path.parts}
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and node.level == 0}
    return {name.split(".")[0] for name in names} - {*sys.stdlib_module_names, *PACKAGES}


def test_what_is_imported_is_declared_and_what_is_declared_is_used(requirements: list[Requirement]) -> None:
    sold_as = packages_distributions()
    used = {
        canonicalize_name(sold_as.get(name, [name])[0]) for name in imports([ROOT / package for package in PACKAGES])
    }
    declared = {canonicalize_name(need.name) for need in requirements}
    # Pydantic brings the one; type checkers alone read the other.
    assert used - declared == {"pydantic-core", "typing-extensions"}
    # Transformers reads chat templates with Jinja.
    assert set(needs_of(requirements, "")) - used == {"jinja2"}


def locked(name: str) -> dict[str, str]:
    """A lock's version of every package."""
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found)
    assert found
    return {canonicalize_name(match[1]): match[2] for match in found if match is not None}


@pytest.mark.parametrize(
    ("name", "extras"), [("requirements-ci.txt", ["dev"]), ("requirements-vllm.txt", ["router", "validation"])]
)
def test_a_lock_holds_what_is_needed(requirements: list[Requirement], name: str, extras: list[str]) -> None:
    platform = {"python_version": "3.11", "platform_system": "Linux", "platform_machine": "x86_64"}
    needs = {need: each for extra in ["", *extras] for need, each in needs_of(requirements, extra, **platform).items()}
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
    assert re.search(rf"PYTHONPATH={tmp_path}/venv-vllm/next .* -m every_version", steps)
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
