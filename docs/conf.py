"""Sphinx builds this folder into out/docs (`make docs`): Markdown by MyST, warnings are errors,
nothing from outside.

Results of the benchmarks lie beside their scripts, outside of this folder; each build copies them
into docs/results.
"""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
RESULTS = HERE / "results"

_about = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
project = "Trainpace"
author = "The Trainpace authors"
version = release = _about["version"]
html_title = f"Trainpace {version}"

extensions = ["myst_parser"]
myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3
exclude_patterns = ["log.md"]
suppress_warnings = ["myst.header"]  # results begin where their scripts begin

smartquotes = False  # "--option" is two hyphens
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["trainpace.css"]
html_favicon = "_static/icon.svg"
html_copy_source = html_show_sourcelink = False
html_show_copyright = html_show_sphinx = False
pygments_style, pygments_dark_style = "a11y-high-contrast-light", "a11y-high-contrast-dark"
html_theme_options = {"navigation_with_keys": True}


def _copy_results() -> None:
    """benchmarks/results/*.md, and fitting/residuals.md, as pages."""
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir()
    names = []
    for path in [
        *sorted((ROOT / "benchmarks/results").glob("*.md")),
        ROOT / "fitting/residuals.md",
    ]:
        shutil.copy(path, RESULTS / path.name)
        names.append(path.stem)
    listed = "\n".join(names)
    (RESULTS / "index.md").write_text(
        "# Results of the benchmarks\n\nEach page is what its script in `benchmarks/` last wrote, with date and machine."
        f" `make help` lists the targets that write them again.\n\n```{{toctree}}\n:maxdepth: 1\n\n{listed}\n```\n"
    )


def _relink(app: object, name: str, source: list[str]) -> None:
    """In the checkout links lead to benchmarks/results; here to the copies."""
    source[0] = re.sub(
        r"\]\((?:\.\./)+(?:benchmarks/results|fitting)/(\w+\.md)", r"](/results/\1", source[0]
    )


def _for_keyboards_and_readers(
    app: object, page: str, template: str, context: dict, doctree: object
) -> None:
    """What scrolls sideways can be reached by keyboard; captions of the sidebar have a level."""
    if "body" in context:
        body = context["body"].replace("<pre>", '<pre tabindex="0">')
        context["body"] = body.replace(
            '<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'
        )
    if "furo_navigation_tree" in context:
        context["furo_navigation_tree"] = context["furo_navigation_tree"].replace(
            'role="heading"', 'role="heading" aria-level="2"'
        )


def _dates() -> dict[str, str]:
    """When each file was last changed, and in which commit, by its path below ROOT. Empty outside
    of a checkout.

    The tests run what a page shows and compare, so that the version of its last change is the one
    that made its output.
    """
    command = [
        "git",
        "log",
        "--format=%x00%cs, by Trainpace %h",
        "--name-only",
        "--",
        "docs",
        "benchmarks/results",
        "fitting",
    ]
    try:
        logged = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    dates: dict[str, str] = {}
    for entry in logged.split("\0")[1:]:
        date, *paths = entry.split("\n")
        for path in filter(None, paths):
            dates.setdefault(path, date.replace("Trainpace", f"Trainpace {version}, commit"))
    return dates


DATES = _dates()


def _dated(app: object, page: str, template: str, context: dict, doctree: object) -> None:
    """The foot of each page says which version made the output that it shows."""
    folders = ("benchmarks/results/", "fitting/") if page.startswith("results/") else ("docs/",)
    found = (DATES.get(f"{folder}{page.removeprefix('results/')}.md") for folder in folders)
    context["last_updated"] = next(filter(None, found), None)


def setup(app) -> None:
    """Called by Sphinx."""
    _copy_results()
    app.connect("source-read", _relink)
    app.connect("html-page-context", _dated)
    app.connect(
        "html-page-context", _for_keyboards_and_readers, priority=900
    )  # after the theme's own
