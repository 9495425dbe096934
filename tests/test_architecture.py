"""The house: imports run downward only, and the lower floors touch neither torch nor the world outside."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "trainpace"

# Ground floor first; a room may import rooms before it, and itself. The comment gives the floor of the design.
ROOMS = [
    "lazy", "errors", "records", "units", "execution", "software", "optimizers", "schedule", "kinds", "workload", "hardware", "outcome", "trend", "job",  # 1
    "forecast", "plan",  # 2
    "process", "user_file", "medians", "trace", "accelerator", "machine", "measure", "shards", "loader", "watch", "diagnose",  # 3
    "configs", "validation", "journal", "offers", "launch", "verify", "ladder",  # 4
    "verbs",  # 5
    "report",  # 6
    "callbacks", "web", "cli", "api", "__main__",  # 7
]  # fmt: skip
FACES = set(ROOMS[ROOMS.index("callbacks") :])
SHOWS = FACES | {"report"}
LOWER_FLOORS = set(ROOMS[: ROOMS.index("plan") + 1])
FORBIDDEN_BELOW = {
    "torch", "click", "rich", "yaml", "socket", "urllib", "http", "requests", "subprocess", "time", "datetime", "random",
}  # fmt: skip
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            if node.module == "trainpace":
                names |= {f"trainpace.{alias.name}" for alias in node.names}
            else:
                names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_downward(path):
    room = room_of(path)
    assert room in ROOMS, f"{room} is a new room: give it a place in ROOMS"
    for name in imports_of(path):
        assert name != "trainpace", f"{path.name} imports the whole package, and with it the rooms above"
        parts = name.split(".")
        if parts[0] == "trainpace" and len(parts) > 1:
            assert ROOMS.index(parts[1]) <= ROOMS.index(room), f"{path.name} in {room} imports upward: {name}"


@pytest.mark.parametrize(
    "path", [p for p in MODULES if room_of(p) in LOWER_FLOORS], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_lower_floors_are_pure(path):
    assert not {name.split(".")[0] for name in imports_of(path)} & FORBIDDEN_BELOW


def faces_imported_by(path: Path, room: str) -> set[str]:
    rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("trainpace.")}
    return (rooms & FACES) - {room, "cli" if room == "__main__" else room}


@pytest.mark.parametrize("path", [p for p in MODULES if room_of(p) in FACES], ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_face_imports_a_face(path):
    assert not faces_imported_by(path, room_of(path))


def shows_something(path: Path) -> set[str]:
    """What only a face or the report may do: use click or rich, print, read the command line."""
    calls = {node.func.id for node in ast.walk(ast.parse(path.read_text()))
             if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}  # fmt: skip
    return ({name.split(".")[0] for name in imports_of(path)} & {"click", "rich"}) | (calls & {"print", "input"})


@pytest.mark.parametrize(
    "path", [p for p in MODULES if room_of(p) not in SHOWS], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_nothing_below_the_faces_shows_anything(path):
    assert not shows_something(path)


# a verb's module is its face; users import their callbacks from the module of their framework
WITHOUT_A_FACE = {"verbs", "callbacks"}


def inner_imports(path: Path) -> set[str]:
    """Modules inside other rooms that a module imports from."""
    own = room_of(path) if path.is_relative_to(PACKAGE) else ""
    parts = [name.split(".") for name in imports_of(path) if name.startswith("trainpace.")]
    inner = [p for p in parts if len(p) > 2 and p[1] != own and p[1] not in WITHOUT_A_FACE]
    return {".".join(p) for p in inner if (PACKAGE / p[1]).is_dir()}


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.name != "__main__.py"], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_rooms_are_used_through_their_faces(path):
    assert not inner_imports(path)


@pytest.mark.parametrize("room", sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")))
def test_what_a_face_names_is_there(room):
    face = importlib.import_module(f"trainpace.{room}")
    for name in getattr(face, "__all__", ()):
        assert not isinstance(getattr(face, name), ModuleType), f"a module of trainpace.{room} hides {name}"


def test_these_tests_see_what_they_forbid(tmp_path):
    module = tmp_path / "bad.py"
    module.write_text("import click\nfrom rich.table import Table\nfrom trainpace.cli import main\nprint('hello')\n")
    assert shows_something(module) == {"click", "rich", "print"}
    assert faces_imported_by(module, "api") == {"cli"}
    module.write_text("from trainpace.forecast import Forecaster\nfrom trainpace.forecast.memory import fits\n")
    assert inner_imports(module) == {"trainpace.forecast.memory"}


def test_this_test_sees_an_upward_import(tmp_path):
    module = tmp_path / "bad.py"
    module.write_text(
        "from trainpace.cli import main\nfrom trainpace import report, web\nimport trainpace\nimport torch\n"
    )
    assert imports_of(module) == {"trainpace.cli", "trainpace.report", "trainpace.web", "trainpace", "torch"}


def imported_by(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    return set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[-2].split())


def test_lower_floors_load_without_torch():
    rooms = ", ".join(f"trainpace.{room}" for room in ROOMS if room in LOWER_FLOORS)
    assert not imported_by(f"import {rooms}") & {"torch", "click", "rich", "yaml", "requests"}


def test_help_is_light():
    loaded = imported_by("from trainpace.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass")
    assert not loaded & {"torch", "rich", "numpy", "yaml", "msgspec"}


@pytest.mark.parametrize(
    "verb", ["schedule", "gpus", "forecast", "measure", "precompute", "journal", "match", "offers", "plan", "verify"]
)
def test_a_verbs_help_needs_no_torch(verb):
    loaded = imported_by(f"from trainpace.cli import main\ntry: main(['{verb}', '--help'])\nexcept SystemExit: pass")
    assert "torch" not in loaded


def test_no_module_is_too_long():
    assert {p.name: n for p in MODULES if (n := len(p.read_text().splitlines())) > 450} == {}
