"""The wheel as a user gets it, alone and beside Hugging Face's distribution that is also imported as `kernels`."""

import email
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.pages import README, ROOT
from tests.server_process import ended
from tests.test_environment import PACKAGES

pytestmark = pytest.mark.last_step
IMPORT_OURS = "from kernels.kv_move import kv_move; from semblend_trt.transfer.load import PlanLoader"
IMPORT_THEIRS = "from kernels import get_kernel; assert get_kernel.__module__ == 'kernels.load'"


def succeeds(*command, cwd, **variables):
    """What a command prints that finds no checkout of ours, unless `variables` name one."""
    done = ended(*command, cwd=cwd, **{"PYTHONPATH": ""} | variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    target = tmp_path_factory.mktemp("dist")
    succeeds(sys.executable, "-m", "build", "--no-isolation", "--outdir", target, ROOT, cwd=target)
    return target


@pytest.fixture(scope="module")
def wheel(built):
    return next(built.glob("semblend_trt-*.whl"))


class Environment:
    """A virtual environment of its own that finds torch and the like where the tests' interpreter has them."""

    def __init__(self, root):
        self.root = root
        self.python = root / "bin" / "python"
        succeeds(sys.executable, "-m", "venv", "--without-pip", root, cwd=root.parent)
        [site_packages] = root.glob("lib/python3*/site-packages")
        (site_packages / "base.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def pip(self, *arguments):
        succeeds(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.root)

    def install(self, wheel):
        self.pip("install", "--no-deps", "--ignore-installed", wheel)

    def uninstall(self, *names):
        self.pip("uninstall", "--yes", *names)

    def check(self, code, **variables):
        return succeeds(self.python, "-c", code, cwd=self.root, **variables)


@pytest.fixture(scope="module")
def hub_kernels(tmp_path_factory):
    target = tmp_path_factory.mktemp("hub")
    words = ("download", "--no-deps", "--retries", "1", "kernels", "-d", target)
    if ended(sys.executable, "-m", "pip", *words, cwd=target).returncode:
        pytest.skip("skipped: no package index within reach offers Hugging Face's kernels")
    return next(target.glob("kernels-*.whl"))


@pytest.fixture(scope="module")
def shared_environment(tmp_path_factory, hub_kernels):
    """An environment with everything that Hugging Face's `kernels` needs, but not itself."""
    environment = Environment(tmp_path_factory.mktemp("shared") / "venv")
    environment.pip("install", hub_kernels)
    environment.check(IMPORT_THEIRS)
    environment.uninstall("kernels")
    return environment


@pytest.fixture
def environment(shared_environment):
    shared_environment.uninstall("kernels", "semblend-trt")
    return shared_environment


@pytest.mark.promise(
    "commands", "The wheel ships the four packages alone; Hugging Face's `kernels` works beside ours, in either order"
)
def test_wheel_ships_the_four_packages_their_assets_and_nothing_else(wheel):
    wheel_files = {*zipfile.ZipFile(wheel).namelist()}
    tops = {name.split("/")[0] for name in wheel_files if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert not [name for name in wheel_files if "test" in Path(name).name or "__pycache__" in name]
    modules = {path.relative_to(ROOT).as_posix() for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    assert modules - wheel_files == {"kernels/naive.py"}
    # kernels is a namespace package.
    assert "kernels/__init__.py" not in modules | wheel_files
    assets = {Path(name).name for name in wheel_files if name.startswith("validation/assets/")}
    assert {"excerpt.txt", "config.json", "model.safetensors", "tokenizer.json"} <= assets


def test_wheel_carries_the_licence_and_the_extras(wheel):
    with zipfile.ZipFile(wheel) as archive:
        [info] = {name.split("/")[0] for name in archive.namelist() if ".dist-info/" in name}
        assert "Apache License" in archive.read(f"{info}/licenses/LICENSE").decode()
        headers = email.message_from_string(archive.read(f"{info}/METADATA").decode())
    assert headers["Requires-Python"] == ">=3.10"
    extras = "trtllm vllm sglang gpu embedded semantic embedder onnx onnx-gpu nats litellm validation metrics dev"
    assert set(headers.get_all("Provides-Extra", [])) == set(extras.split())


def test_sdist_can_be_built_and_tested(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[-1] for name in archive.getnames()}
    locks = {path.name for path in ROOT.glob("requirements-*.txt")}
    assert {"Makefile", "constraints-cpu.txt", *locks, ".ci/lock.py", "LICENSE", "tests/test_packaging.py"} <= names


@pytest.mark.promise("commands", "`semblend-trt try` is the README's first...")
def test_the_quick_start_runs_from_the_wheel(wheel, tmp_path):
    environment = Environment(tmp_path / "venv")
    environment.install(wheel)
    environment.check(f"import validation; assert not validation.__file__.startswith({str(ROOT)!r})")
    printed = succeeds(environment.root / "bin" / "semblend-trt", "try", cwd=tmp_path)
    assert printed.startswith(README.blocks("text")[0])


@pytest.mark.promise("commands", "The wheel ships the four packages...")
@pytest.mark.parametrize("ours_first", [True, False])
def test_both_kernels_work_in_one_environment_and_either_goes_alone(environment, wheel, hub_kernels, ours_first):
    for distribution in (wheel, hub_kernels) if ours_first else (hub_kernels, wheel):
        environment.install(distribution)
    environment.check(f"{IMPORT_OURS}; {IMPORT_THEIRS}")
    environment.check(f"{IMPORT_THEIRS}; {IMPORT_OURS}")
    environment.uninstall("semblend-trt" if ours_first else "kernels")
    environment.check(IMPORT_THEIRS if ours_first else IMPORT_OURS)


def test_transformers_never_takes_ours_for_theirs(environment, wheel, hub_kernels):
    """Transformers asks for the version of any package that is importable as `kernels`."""
    question = "from transformers.utils.import_utils import is_kernels_available; print(is_kernels_available())"
    environment.install(wheel)
    assert environment.check(question).strip() == "False"
    environment.install(hub_kernels)
    with_both = environment.check(question)
    environment.uninstall("semblend-trt")
    assert environment.check(question) == with_both


@pytest.mark.promise("commands", "A source checkout works beside Hugging Face's `kernels`")
@pytest.mark.parametrize("is_installed", [True, False])
def test_a_checkout_works_beside_hugging_face_kernels(environment, hub_kernels, is_installed):
    """A regular package wins over a namespace portion: theirs is found, and ours once one of our packages is."""
    environment.install(hub_kernels)
    variables = {} if is_installed else {"PYTHONPATH": str(ROOT)}
    if is_installed:
        environment.pip("install", "--no-deps", "--no-build-isolation", "--editable", ROOT)
    environment.check(IMPORT_THEIRS, **variables)
    for package in ("semblend_trt", "engine_wrapper", "validation"):
        environment.check(f"import {package}; {IMPORT_OURS}; {IMPORT_THEIRS}", **variables)
        environment.check(f"{IMPORT_THEIRS}; import {package}; {IMPORT_OURS}", **variables)
