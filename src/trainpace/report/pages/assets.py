"""The scripts and styles of every page: `report/vendor/` as released by others, `report/assets/` and the palette our own.

A page file holds them inline; a server hands out `SCRIPTS` and `STYLES` by name, so that its pages need no inline script.
"""

import functools
from importlib.resources import files

from trainpace.report.charts.palette import css_variables

SCRIPTS = ("uPlot.iife.min.js", "charts.js")
"""In the order in which a page with charts loads them."""
STYLES = ("uPlot.min.css", "page.css")
_VENDORED = ("uPlot.iife.min.js", "uPlot.min.css")


@functools.cache
def asset(name: str) -> str:
    """The text of one of `SCRIPTS` or `STYLES`; page.css with the palette's variables before it."""
    folder = "vendor" if name in _VENDORED else "assets"
    text = (files("trainpace.report") / folder / name).read_text(encoding="utf-8")
    return css_variables() + text if name == "page.css" else text
