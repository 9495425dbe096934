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
    "lazy",
    "errors",
    "intake",
    "records",
    "units",
    "execution",
    "software",
    "optimizers",
    "schedule",
    "kinds",
    "workload",
    "documents",
    "hardware",
    "outcome",
    "trend",
    "job",  # 1
    "forecast",
    "plan",  # 2
    "process",
    "installed",
    "user_file",
    "medians",
    "tasks",
    "trace",
    "accelerator",
    "machine",
    "measure",
    "shards",
    "loader",
    "watch",
    "diagnose",
    "profilers",
    "doctor",  # 3
    "configs",
    "validation",
    "evidence",
    "journal",
    "offers",
    "launch",
    "verify",
    "ladder",  # 4
    "verbs",  # 5
    "report",  # 6
    "callbacks",
    "web",
    "cli",
    "api",
    "__main__",  # 7
]
FACES = set(ROOMS[ROOMS.index("callbacks") :])
SHOWS = FACES | {"report"}
LOWER_FLOORS = set(ROOMS[: ROOMS.index("plan") + 1])
FORBIDDEN_BELOW = {
    "torch",
    "click",
    "rich",
    "yaml",
    "socket",
    "urllib",
    "http",
    "requests",
    "subprocess",
    "time",
    "datetime",
    "random",
}
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
        assert name != "trainpace", (
            f"{path.name} imports the whole package, and with it the rooms above"
        )
        parts = name.split(".")
        if parts[0] == "trainpace" and len(parts) > 1:
            assert ROOMS.index(parts[1]) <= ROOMS.index(room), (
                f"{path.name} in {room} imports upward: {name}"
            )


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if room_of(p) in LOWER_FLOORS],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_lower_floors_are_pure(path):
    assert not {name.split(".")[0] for name in imports_of(path)} & FORBIDDEN_BELOW


def faces_imported_by(path: Path, room: str) -> set[str]:
    rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("trainpace.")}
    return (rooms & FACES) - {room, "cli" if room == "__main__" else room}


@pytest.mark.parametrize(
    "path", [p for p in MODULES if room_of(p) in FACES], ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_no_face_imports_a_face(path):
    assert not faces_imported_by(path, room_of(path))


def shows_something(path: Path) -> set[str]:
    """What only a face or the report may do: use click or rich, print, read the command line."""
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return ({name.split(".")[0] for name in imports_of(path)} & {"click", "rich"}) | (
        calls & {"print", "input"}
    )


@pytest.mark.parametrize(
    "path",
    [p for p in MODULES if room_of(p) not in SHOWS],
    ids=lambda p: str(p.relative_to(PACKAGE)),
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
    "path",
    [p for p in MODULES if p.name != "__main__.py"],
    ids=lambda p: str(p.relative_to(PACKAGE)),
)
def test_rooms_are_used_through_their_faces(path):
    assert not inner_imports(path)


@pytest.mark.parametrize("room", sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")))
def test_what_a_face_names_is_there(room):
    face = importlib.import_module(f"trainpace.{room}")
    for name in getattr(face, "__all__", ()):
        assert not isinstance(getattr(face, name), ModuleType), (
            f"a module of trainpace.{room} hides {name}"
        )


OWN_READERS = {
    "intake.py": "the door itself",
    "accelerator/memory.py": "/proc",
    "loader/timing.py": "/proc",
    "machine/detection.py": "/proc and /sys",
    "process/child.py": "/proc and /sys",
    "process/guard.py": "/proc",
    "process/limits.py": "/proc and /sys",
    "shards/opened_files.py": "/proc, and files that user code reads",
    "evidence/fingerprint.py": "packaged",
    "hardware/catalogue_reader.py": "packaged",
    "hardware/hosts.py": "packaged",
    "configs/settings.py": "packaged",
    "offers/offer.py": "packaged",
    "report/pages.py": "packaged",
    "web/render.py": "packaged",
    "lazy.py": "packaged",
    "trace/workloads.py": "packaged",
    "trace/cache.py": "the cache: compressed, and thrown away where damaged",
    "watch/trails.py": "trails: mapped, of any size, read in a guard of their own",
    "watch/command.py": "writes what a command prints",
    "watch/timeline.py": "writes a trace, compressed",
    "shards/reader.py": "shards: a reader of their own, with checksums",
    "shards/files.py": "shards, as they are written",
    "shards/computing.py": "locks",
    "verbs/run.py": "a lock",
    "configs/files.py": "writes backups",
    "journal/exchange.py": "writes exports",
    "process/worker.py": "a worker's own request, and its streams",
    "verbs/suite.py": "a worker's own request",
    "launch/job.py": "logs, shown as text",
    "launch/script.py": "what its own script wrote",
    "user_file.py": "code that the user names",
    "shards/user_dataset.py": "code that the user names",
    "ladder/script.py": "hashes of code",
    "validation/rows.py": "hashes of code",
    "report/streams.py": "standard streams",
    "cli/program.py": "standard streams",
    "watch/inside": "runs within the script, with the standard library alone",
}
"""Modules that open files past `trainpace.intake`, and what they read."""


def test_files_of_tests_have_names_of_their_own():
    """pytest takes two files of one name in folders without __init__.py for one module; which comes first hangs on the machine."""
    files = [
        path
        for path in Path(__file__).parent.rglob("test_*.py")
        if not (path.parent / "__init__.py").exists()
    ]
    assert [path for path in files if sum(other.name == path.name for other in files) > 1] == []


OPEN_NO_FILE = ("Journal", "webbrowser")


def opens_files(path: Path) -> bool:
    """Whether a module calls `open`, or a path's methods that read."""
    called = [
        node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
    ]
    methods = [
        f
        for f in called
        if isinstance(f, ast.Attribute) and f.attr in ("open", "read_bytes", "read_text")
    ]
    others = [
        f for f in methods if not (isinstance(f.value, ast.Name) and f.value.id in OPEN_NO_FILE)
    ]
    return bool(others) or any(isinstance(f, ast.Name) and f.id == "open" for f in called)


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_files_from_outside_pass_through_one_door(path):
    name = str(path.relative_to(PACKAGE))
    known = any(name == own or name.startswith(f"{own}/") for own in OWN_READERS)
    assert known or not opens_files(path), (
        "read it by trainpace.intake, or say in OWN_READERS what it reads"
    )


def test_no_reader_is_excused_that_reads_nothing():
    assert [
        own for own in OWN_READERS if own.endswith(".py") and not opens_files(PACKAGE / own)
    ] == []


def test_these_tests_see_what_they_forbid(tmp_path):
    module = tmp_path / "bad.py"
    module.write_text(
        "import click\nfrom rich.table import Table\nfrom trainpace.cli import main\nprint('hello')\n"
    )
    assert shows_something(module) == {"click", "rich", "print"}
    assert faces_imported_by(module, "api") == {"cli"}
    module.write_text(
        "from trainpace.forecast import Forecaster\nfrom trainpace.forecast.memory import fits\n"
    )
    assert inner_imports(module) == {"trainpace.forecast.memory"}


def test_this_test_sees_an_upward_import(tmp_path):
    module = tmp_path / "bad.py"
    module.write_text(
        "from trainpace.cli import main\nfrom trainpace import report, web\nimport trainpace\nimport torch\n"
    )
    assert imports_of(module) == {
        "trainpace.cli",
        "trainpace.report",
        "trainpace.web",
        "trainpace",
        "torch",
    }


def imported_by(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    return set(
        subprocess.run(command, capture_output=True, text=True, check=True)
        .stdout.split("\n")[-2]
        .split()
    )


def test_lower_floors_load_without_torch():
    rooms = ", ".join(f"trainpace.{room}" for room in ROOMS if room in LOWER_FLOORS)
    assert not imported_by(f"import {rooms}") & {"torch", "click", "rich", "yaml", "requests"}


def test_help_is_light():
    loaded = imported_by(
        "from trainpace.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    )
    assert not loaded & {"torch", "rich", "numpy", "yaml", "msgspec"}


@pytest.mark.parametrize(
    "verb",
    [
        "schedule",
        "gpus",
        "forecast",
        "measure",
        "precompute",
        "journal",
        "match",
        "offers",
        "plan",
        "verify",
    ],
)
def test_a_verbs_help_needs_no_torch(verb):
    loaded = imported_by(
        f"from trainpace.cli import main\ntry: main(['{verb}', '--help'])\nexcept SystemExit: pass"
    )
    assert "torch" not in loaded


def test_kinds_of_accelerators_are_named_in_one_room():
    # torch.backends.cuda and a Triton kernel's own device are no use of a device of this machine
    said = {
        str(p.relative_to(PACKAGE))
        for p in MODULES
        for kind in ("cuda", "xpu", "mps")
        if f"torch.{kind}" in p.read_text()
    }
    assert {name.split("/")[0] for name in said} <= {"accelerator"}


def test_no_module_is_longer_than_700_lines():
    assert {p.name: n for p in MODULES if (n := len(p.read_text().splitlines())) > 700} == {}
