"""Hooks PyTorch when the program imports it, and changes nothing else in the program's process.

Python imports this module when it starts. If the program has its own ``sitecustomize``, that module runs as well.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

_THIS_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - importing pathlib takes 5 ms
_HOOKS = os.path.dirname(_THIS_FOLDER)  # noqa: PTH120
_PACKAGE = "_nsys_analyze_hooks"


class _HookingFinder(MetaPathFinder):
    """Uses the other import finders to find the modules that must be hooked, and gives each a loader that hooks it."""

    def __init__(self) -> None:
        generation = "transformers.generation"
        self._unhooked = {"torch", f"{generation}.utils", f"{generation}.continuous_batching.continuous_api"}

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Returns the spec of a module to hook, with a loader that hooks the module, or None for every other module."""
        if fullname not in self._unhooked:
            return None
        self._unhooked.remove(fullname)  # find_spec below asks this finder again, which then leaves it to the others
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _HookingLoader(spec.loader)
        return spec


class _PackageFinder(MetaPathFinder):
    """Finds the package ``nsys_analyzer`` if the program's Python lacks it: the recorder needs it there."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        """Returns the spec of the package ``nsys_analyzer``, or None for every other module."""
        if fullname != "nsys_analyzer":
            return None
        package = os.path.dirname(os.path.dirname(_HOOKS))  # noqa: PTH120
        file = f"{package}/__init__.py"
        return importlib.util.spec_from_file_location(fullname, file, submodule_search_locations=[package])


class _HookingLoader(Loader):
    """Loads a module with the module's own loader, and then hooks the module. Other attributes are the own loader's."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Creates the module with its own loader."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Runs the module's code, then hooks the module. An error of the hooks is printed, not raised."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        try:
            _hook_module(module.__name__)
        except Exception as error:  # noqa: BLE001 - an unknown PyTorch must not stop the program
            print(f"nsys-analyze: this program is not annotated: {type(error).__name__}: {error}", file=sys.stderr)


def _hook_module(name: str) -> None:
    """Hooks an imported module. The hooks are loaded from their folder under a name that no program uses."""
    if _PACKAGE not in sys.modules:
        file = f"{_HOOKS}/__init__.py"
        spec = importlib.util.spec_from_file_location(_PACKAGE, file, submodule_search_locations=[_HOOKS])
        if spec is None or spec.loader is None:
            raise ImportError(f"{_HOOKS} contains no hooks")
        package = sys.modules[_PACKAGE] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    sys.modules[_PACKAGE].hook_module(name)


def _run_own_sitecustomize() -> None:
    """Imports the program's own ``sitecustomize``, which this module hides, as the module ``sitecustomize``."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None or spec.origin == __file__:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.path[:] = [path for path in sys.path if os.path.abspath(path or ".") != _THIS_FOLDER]  # noqa: PTH100
if os.environ.get("NSYS_ANALYZE_ANNOTATION"):
    sys.meta_path.insert(0, _HookingFinder())
sys.meta_path.append(_PackageFinder())
_run_own_sitecustomize()
