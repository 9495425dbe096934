"""The documentation site builds without warnings, works offline, and is accessible."""

import functools
import http.server
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPHINX = ROOT / ".tools"
CHROMIUM = shutil.which("chromium")
LOOKED_AT = (
    "index",
    "tour",
    "charts",
    "tutorial",
    "glossary",
    "how_forecasts_work",
    "extending",
    "verbs/index",
    "verbs/forecast",
    "recipes/old_pcs",
    "jumps",
    "results/cluster_accuracy",
    "search",
)
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (SPHINX / "installed").exists(), reason="make .tools/installed"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "-E",
        "-d",
        str(folder / "trees"),
        "docs",
        str(folder / "site"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(SPHINX)}
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_site_loads_no_external_resources(site):
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    for page in pages:
        text = page.read_text()
        assert not re.findall(
            r'(?:src|srcset)="(?:https?:)?//|<link[^>]+href="(?:https?:)?//', text
        ), page
    for style in site.rglob("*.css"):
        assert not re.findall(r"url\(['\"]?(?:https?:)?//|@import", style.read_text()), style


def test_site_excludes_the_log(site):
    assert not (site / "log.html").exists()


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_every_page_states_date_and_version(site):
    pages = [
        page
        for page in site.rglob("*.html")
        if page.stem not in ("search", "genindex") and page.parent.name != "_static"
    ]
    undated = [
        str(p.relative_to(site))
        for p in pages
        if not re.search(r"\d{4}-\d\d-\d\d, by Trainpace \S+, commit \w+", p.read_text())
    ]
    assert undated == ["results/index.html"]  # made by the build


@pytest.fixture(scope="module")
def address(site):
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *words):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
@pytest.mark.parametrize(
    ("scheme", "width"), [pytest.param("light", 1280, marks=pytest.mark.long), ("dark", 390)]
)
def test_pages_pass_accessibility_check_in_browser(scheme, width, site, address, browser):
    from axe_playwright_python.sync_playwright import Axe

    context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    for name in LOOKED_AT:
        page, wrong = context.new_page(), []
        page.on(
            "console",
            lambda message, wrong=wrong: (
                wrong.append(message.text) if message.type == "error" else None
            ),
        )
        page.on("pageerror", lambda error, wrong=wrong: wrong.append(str(error)))
        page.on(
            "request",
            lambda r, wrong=wrong: (
                None if r.url.startswith((address, "data:")) else wrong.append(r.url)
            ),
        )
        page.goto(f"{address}/{name}.html")
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        found = [
            v
            for v in Axe().run(page).response["violations"]
            if v["impact"] in ("serious", "critical")
        ]
        assert found == [], (name, [(v["id"], v["nodes"][0]["html"]) for v in found])
        assert wrong == [], name
        page.close()
    context.close()
