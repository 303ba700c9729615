"""Stands in for two modules that no wheel for a CPU has: SGLang's kernels, and torchvision's operators.

A process that has this folder on PYTHONPATH finds them, and so do its children. SGLang imports names of `sgl_kernel`,
and calls none of them for a dense model on a CPU without AMX."""

import importlib.machinery
import sys
import types

_KERNELS, _OPERATORS = "sgl_kernel", "torchvision._meta_registrations"


class _Missing:
    """A name of a module that is not there. So is each of its own names; a call raises."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "_Missing":
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")

    def __call__(self, *_: object, **__: object) -> None:
        raise NotImplementedError(f"{self._name} is a stand-in: this machine has no kernels of SGLang")


class _Kernels(types.ModuleType):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> object:
        return getattr(_Missing(self.__name__), name)


class _Finder:
    @staticmethod
    def find_spec(name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name == _OPERATORS or name.split(".")[0] == _KERNELS:
            return importlib.machinery.ModuleSpec(name, _Finder, is_package=name != _OPERATORS)
        return None

    @staticmethod
    def create_module(spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return (types.ModuleType if spec.name == _OPERATORS else _Kernels)(spec.name)

    @staticmethod
    def exec_module(module: types.ModuleType) -> None:
        """Do nothing: the module is whole."""


sys.meta_path.insert(0, _Finder)
