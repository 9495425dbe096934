"""Expected content of the dashboard pages, and helpers that find faults of a page."""

import urllib.error
import urllib.request


def get(address):
    """Return the status of an address."""
    try:
        with urllib.request.urlopen(address) as response:
            response.read()
            return response.status
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def PATHS(sweeps, run):
    """Return {path: selectors that its page must contain}."""
    return {
        "/runs": ["#answer tbody tr", "#next"],
        "/runs?model=no+such": [".verdict.empty"],
        f"/run?id={run.id}": [".verdict", "figure.chart canvas", ".bars", ".facts"],
        "/compare": ["form"],
        f"/compare?a={sweeps[0].id}&b={sweeps[1].id}": [".verdict", "figure.chart canvas", "table"],
        "/sweeps": ["tbody tr"],
        f"/sweep?id={sweeps[0].id}": [".verdict", "figure.chart canvas", "tr.hit"],
        "/score": [".verdict", "figure.chart canvas", "tbody tr"],
        "/public": ["#answer tbody tr", "#next", ".switch a[aria-current]"],
        "/public?model=no+such": [".verdict.empty"],
        "/accuracy": [".verdict", "figure.chart canvas", "tbody tr"],
        "/whatif?model=little+transformer&precision=bf16": [
            ".cards",
            "figure.chart canvas",
            ".bars",
        ],
    }


def watched(page):
    """Return a list that collects every error and warning of the page."""
    faults = []
    page.on("console", lambda m: faults.append(m.text) if m.type in ("error", "warning") else None)
    page.on("pageerror", lambda e: faults.append(str(e)))
    return faults


def problems(page):
    """Return the serious and critical violations that axe-core finds."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        (v["id"], [n["html"][:120] for n in v["nodes"]][:3])
        for v in found
        if v["impact"] in ("serious", "critical")
    ]


def until(page, expression, argument=None):
    """Wait for a condition. Playwright's own wait evaluates text in the page, which the pages' policy forbids."""
    for _ in range(300):
        if page.evaluate(expression, argument):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"never true: {expression}")
