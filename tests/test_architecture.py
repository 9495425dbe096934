"""Imports point one way, and the lower packages use neither torch nor the outside world."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "trainpace"

ORDER = [
    *["core", "workload", "job", "forecast", "plan", "offers", "configs", "shards", "measure"],
    *["watch", "diagnose", "journal", "run", "verbs", "report"],
    *["callbacks", "web", "cli", "api", "__main__"],
]
"""Packages, lowest first. A package may import those before it, and itself."""
FACES = set(ORDER[ORDER.index("callbacks") :])
MODULES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")
OUTSIDE = "torch click rich yaml socket urllib http requests subprocess time datetime random"
TOUCH_THE_HOST = {"core/child.py", "core/guard.py", "core/worker.py"}
"""Modules of core that start processes."""
WITHOUT_FACE = {"core", "verbs", "callbacks"}
"""Packages whose modules are imported by name."""
READ_FILES = {
    "core/intake.py": "the safe reader itself",
    "core/guard.py": "/proc and /sys",
    "core/host.py": "/proc and /sys",
    "core/worker.py": "a worker's request and streams, code that the user names",
    "core/hardware.py": "packaged",
    "core/__init__.py": "packaged",
    "forecast/published.py": "packaged",
    "forecast/validation.py": "hashes of code",
    "workload/workloads.py": "packaged; and the cache, whose damaged files are thrown away",
    "offers/offer.py": "packaged",
    "configs/settings.py": "packaged",
    "measure/device.py": "/proc",
    "shards/opened_files.py": "/proc, and files that user code reads",
    "shards/dataset.py": "shards, with checksums",
    "shards/files.py": "shards, as they are written",
    "shards/computing.py": "locks",
    "shards/user_dataset.py": "code that the user names",
    "watch/event_logs.py": "mapped recordings, read in a process of their own",
    "watch/command.py": "writes what a command prints",
    "watch/timeline.py": "writes a compressed trace",
    "watch/inside": "runs inside the user's script with the standard library alone",
    "journal/exporting.py": "writes exports",
    "run/job.py": "logs, shown as text",
    "run/script.py": "hashes of code, and results that its own batch script wrote",
    "verbs/run.py": "a lock",
    "report/pages.py": "packaged",
    "report/streams.py": "standard streams",
    "web/app.py": "packaged",
    "cli/program.py": "standard streams",
}
"""Modules that open files without `core.intake`, and what they read."""


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def package_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def is_pure(path: Path) -> bool:
    """Return True for modules that must not import torch or touch network, clock or processes."""
    if package_of(path) == "workload":
        return path.name in ("workload.py", "kinds.py", "documents.py")
    lower = ORDER[: ORDER.index("plan") + 1]
    return package_of(path) in lower and name_of(path) not in TOUCH_THE_HOST


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


def packages_imported_by(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports_of(path) if name.startswith("trainpace.")}


def inner_imports(path: Path) -> set[str]:
    """Return the modules inside other packages that a module imports from."""
    own = package_of(path) if path.is_relative_to(PACKAGE) else ""
    parts = [name.split(".") for name in imports_of(path) if name.startswith("trainpace.")]
    inner = [p for p in parts if len(p) > 2 and p[1] != own and p[1] not in WITHOUT_FACE]
    return {".".join(p) for p in inner}


def uses_terminal(path: Path) -> set[str]:
    """Return the names by which a module prints, reads arguments or formats for a terminal."""
    tree = ast.walk(ast.parse(path.read_text()))
    calls = {n.func.id for n in tree if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    libraries = {name.split(".")[0] for name in imports_of(path)}
    return (libraries & {"click", "rich"}) | (calls & {"print", "input"})


def opens_files(path: Path) -> bool:
    """Return True if a module calls `open`, or the reading methods of a path."""
    called = [n.func for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    methods = [
        f.value
        for f in called
        if isinstance(f, ast.Attribute) and f.attr in ("open", "read_bytes", "read_text")
    ]
    others = ("Journal", "webbrowser")
    paths = [v for v in methods if not (isinstance(v, ast.Name) and v.id in others)]
    return bool(paths) or any(isinstance(f, ast.Name) and f.id == "open" for f in called)


def test_packages_import_only_lower_packages():
    upward = []
    for path in MODULES:
        own = package_of(path)
        assert own in ORDER, f"{own} is a new package: give it a place in ORDER"
        for name in packages_imported_by(path):
            if ORDER.index(name) > ORDER.index(own):
                upward.append(f"{name_of(path)} imports {name}")
        assert "trainpace" not in imports_of(path), f"{name_of(path)} imports the whole package"
    assert upward == []


def test_lower_packages_do_not_import_outside_libraries():
    used = {name_of(p): imports_of(p) for p in MODULES if is_pure(p)}
    tops = {name: {i.split(".")[0] for i in imports} for name, imports in used.items()}
    assert {n: t & set(OUTSIDE.split()) for n, t in tops.items() if t & set(OUTSIDE.split())} == {}


def test_interface_packages_do_not_import_each_other():
    for path in MODULES:
        own = package_of(path)
        if own in FACES:
            allowed = {own, "cli"} if own == "__main__" else {own}
            assert packages_imported_by(path) & FACES <= allowed, name_of(path)


def test_only_interfaces_and_report_use_the_terminal():
    others = [p for p in MODULES if package_of(p) not in FACES | {"report"}]
    assert {name_of(p): uses_terminal(p) for p in others if uses_terminal(p)} == {}


def test_packages_are_imported_through_their_public_modules():
    paths = [p for p in MODULES if p.name != "__main__.py"]
    assert {name_of(p): inner_imports(p) for p in paths if inner_imports(p)} == {}


@pytest.mark.parametrize("package", sorted(p.parent.name for p in PACKAGE.glob("*/__init__.py")))
def test_every_exported_name_exists(package):
    face = importlib.import_module(f"trainpace.{package}")
    for name in getattr(face, "__all__", ()):
        assert not isinstance(getattr(face, name), ModuleType), f"a module hides {name}"


def test_only_listed_modules_open_files():
    def known(name: str) -> bool:
        return any(name == own or name.startswith(f"{own}/") for own in READ_FILES)

    assert [name_of(p) for p in MODULES if opens_files(p) and not known(name_of(p))] == []


def test_every_listed_file_reader_reads_files():
    listed = [own for own in READ_FILES if own.endswith(".py")]
    assert [own for own in listed if not opens_files(PACKAGE / own)] == []


def test_architecture_checks_detect_violations(tmp_path):
    module = tmp_path / "bad.py"
    module.write_text(
        "import click\nfrom rich.table import Table\nfrom trainpace.cli import main\nprint(1)\n"
    )
    assert uses_terminal(module) == {"click", "rich", "print"}
    assert packages_imported_by(module) == {"cli"}
    module.write_text("from trainpace.forecast.memory import fits\nfrom trainpace import web\n")
    assert inner_imports(module) == {"trainpace.forecast.memory"}
    assert packages_imported_by(module) == {"forecast", "web"}


def test_test_files_have_unique_names():
    """pytest confuses two files of the same name in folders without __init__.py."""
    folder = Path(__file__).parent
    files = [p for p in folder.rglob("test_*.py") if not (p.parent / "__init__.py").exists()]
    names = [p.name for p in files]
    assert [name for name in names if names.count(name) > 1] == []


def imported_by(code: str) -> set[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(answer.stdout.split("\n")[-2].split())


def test_lower_packages_load_without_torch():
    lower = ", ".join(f"trainpace.{name}" for name in ORDER[: ORDER.index("plan") + 1])
    assert not imported_by(f"import {lower}") & {"torch", "click", "rich", "yaml", "requests"}


def test_help_imports_no_heavy_package():
    code = "from trainpace.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert not imported_by(code) & {"torch", "rich", "numpy", "yaml", "msgspec"}


@pytest.mark.parametrize("verb", ["schedule", "forecast", "measure", "journal", "plan", "verify"])
def test_help_of_a_command_does_not_import_torch(verb):
    code = (
        f"from trainpace.cli import main\ntry: main(['{verb}', '--help'])\nexcept SystemExit: pass"
    )
    assert "torch" not in imported_by(code)


def test_only_measure_uses_torch_accelerator_modules():
    """torch.backends.cuda does not use a device of this machine."""
    users = {
        package_of(p)
        for p in MODULES
        for kind in ("cuda", "xpu", "mps")
        if f"torch.{kind}" in p.read_text()
    }
    assert users <= {"measure"}


def test_no_module_is_longer_than_1000_lines():
    lines = {name_of(p): len(p.read_text().splitlines()) for p in MODULES}
    assert {name: count for name, count in lines.items() if count > 1000} == {}
