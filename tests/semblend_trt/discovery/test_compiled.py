"""Compiled code that is kept on disk must be made again when any source of it changes."""

from pathlib import Path

from semblend_trt.discovery import compiled


def test_every_module_with_compiled_functions_is_part_of_the_stamp() -> None:
    folder = Path(compiled.__file__).parent
    decorated = {
        path.stem
        for path in folder.glob("*.py")
        if any(line.strip() in ("@inner", "@entry", "@intrinsic") for line in path.read_text("utf-8").splitlines())
    }
    assert decorated
    assert decorated | {"compiled"} == set(compiled.COMPILED_MODULES)
