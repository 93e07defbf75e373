"""The rooms of the package: which may import which, and that no modules import each other in a circle."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = ("nsys_analyzer", "profiling_targets")

#: A module imports its own room and those in the lines above it, never another room of its line. `package` is
#: nsys_analyzer/__init__.py.
LAYERS = (
    ("errors",),
    ("text",),
    ("system",),
    ("configuration",),
    ("trace",),
    ("analysis",),
    ("inputs", "share"),
    ("report",),
    ("questions", "export", "capture"),
    ("experiments",),
    ("verify",),
    ("api",),
    ("package",),
    ("cli", "profiling_targets"),
    ("__main__",),
)

#: The rooms inside `analysis`, in the same order: each imports only rooms before it.
ANALYSIS = (
    "facts",
    "statistics",
    "intervals",
    "memory",
    "attribution",
    "kernels",
    "ranges",
    "transformer",
    "steps",
    "operators",
    "counters",
    "findings",
    "summary",
    "ranks",
    "comparison",
    "what_if",
    "what_if_memory",
)


def modules() -> dict[str, Path]:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


MODULES = modules()


def imported(path: Path) -> Iterator[str]:
    """Every module that a file imports, where the line stands in a function or under TYPE_CHECKING, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # The hooks run in programs that do not have this package.
            assert node.level == 0 or path.parent.name == "hooks", f"{path}: imports are absolute"
            module = str(node.module)
            yield from (name if (name := f"{module}.{alias.name}") in MODULES else module for alias in node.names)


def room(module: str) -> str:
    package, _, inside = module.partition(".")
    if package == "profiling_targets":
        return package
    return inside.partition(".")[0] or "package"


IMPORTS = {module: set(imported(path)) for module, path in MODULES.items()}
OURS = {module: {name for name in names if name in MODULES} for module, names in IMPORTS.items()}


def test_every_room_has_its_layer() -> None:
    assert {room(module) for module in MODULES} == {name for layer in LAYERS for name in layer}


def test_imports_go_one_way() -> None:
    layer_of = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    upward = {
        (module, room(name))
        for module, names in OURS.items()
        for name in names
        if room(name) != room(module) and layer_of[room(name)] >= layer_of[room(module)]
    }
    assert upward == set()


def room_of_analysis(module: str) -> str:
    """Returns the room inside `analysis` that a module is in; empty for any other module."""
    _, inside, rest = module.partition("nsys_analyzer.analysis.")
    return rest.partition(".")[0] if inside else ""


def test_imports_inside_the_analysis_go_one_way() -> None:
    rooms = {name: room_of_analysis(name) for name in MODULES if room_of_analysis(name)}
    assert set(rooms.values()) == set(ANALYSIS)
    upward = {
        (module, rooms[name])
        for module, own_room in rooms.items()
        for name in OURS[module] & rooms.keys()
        if ANALYSIS.index(rooms[name]) > ANALYSIS.index(own_room)
    }
    assert upward == set()


def test_no_modules_import_each_other() -> None:
    list(TopologicalSorter(OURS).static_order())  # a CycleError names the modules


def test_nothing_is_sent_anywhere() -> None:
    """The promise of SECURITY.md: no module speaks to the network, but with a scheduler of Dask and between ranks.

    Programs that take turns hold the two ends of a socket that leads nowhere else.
    """
    speaking = ("urllib.request", "http", "requests", "httpx", "aiohttp", "smtplib", "ftplib", "socket")
    users = {
        module
        for module, names in IMPORTS.items()
        if any(f"{name}.".startswith(f"{one}.") for name in names for one in speaking)
    }
    ours = ("system.cluster", "capture.launcher", "verify.side_by_side")
    assert users == {f"nsys_analyzer.{name}" for name in ours}


def test_torch_is_imported_by_targets_and_recorder_alone() -> None:
    users = defaultdict(set)
    for module, names in IMPORTS.items():
        for library in {name.partition(".")[0] for name in names}:
            users[library].add(module)
    allowed = ("profiling_targets.", "nsys_analyzer.capture.recorder", "nsys_analyzer.capture.hooks")
    assert [module for module in users["torch"] | users["triton"] if not module.startswith(allowed)] == []
