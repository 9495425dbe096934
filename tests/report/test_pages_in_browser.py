"""Every page in Chromium without network: it draws, is accessible, prints, and logs no errors."""

import shutil

import pytest

from answers import CANVASES, PAGES

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_playwright_python.sync_playwright")
CHROMIUM = shutil.which("chromium")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium")]

COLOURS = """canvas => {
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, seen = new Set();
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) seen.add(data[i] << 16 | data[i + 1] << 8 | data[i + 2]);
  return seen.size;
}"""


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, make in PAGES.items():
        (folder / f"{name}.html").write_text(make(), encoding="utf-8")
    return folder


@pytest.fixture
def opened(browser, files):
    """Open a page offline. Afterwards, fail if the console has errors or anything was requested from the network."""
    complaints, contexts = [], []

    def open_page(name, **options):
        context = browser.new_context(offline=True, **options)
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda m: complaints.append(m.text) if m.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda e: complaints.append(str(e)))
        page.on(
            "request", lambda r: complaints.append(r.url) if not r.url.startswith("file:") else None
        )
        page.goto((files / f"{name}.html").as_uri())
        page.wait_for_function(
            "n => document.querySelectorAll('.plot canvas').length === n", arg=CANVASES.get(name, 0)
        )
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_page_draws_and_passes_accessibility_check(opened, name, scheme):
    page = opened(name, color_scheme=scheme)
    assert page.title() != "broken"
    for canvas in page.query_selector_all(".plot canvas"):
        assert canvas.evaluate(COLOURS) >= 4  # the grid, the axes' text, and what is shown
        assert canvas.get_attribute("role") == "img"
        assert len(canvas.get_attribute("aria-label")) > 20
    found = axe.Axe().run(page).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"][:200]) for v in found] == []


@pytest.mark.parametrize("name", PAGES)
def test_page_fits_phone_width(opened, name):
    page = opened(name, viewport={"width": 390, "height": 844})
    page.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # Wide content scrolls on its own, and no text column is so narrow that its rows fill a screen.
    heights = page.evaluate(
        "[...document.querySelectorAll('tr')].map(r => r.getBoundingClientRect().height)"
    )
    assert max(heights, default=0) < 400


def test_arrow_keys_announce_chart_values(opened):
    page = opened("forecast")
    plot = page.locator(".plot").first
    plot.focus()
    page.keyboard.press("Home")
    assert "micro-batch size 1" in plot.locator(".said").inner_text()
    page.keyboard.press("ArrowRight")
    assert "micro-batch size 2" in plot.locator(".said").inner_text()
    assert plot.locator(".tip").is_visible()
    page.keyboard.press("End")
    assert "micro-batch size 40" in plot.locator(".said").inner_text()
    page.keyboard.press("Escape")
    assert not plot.locator(".tip").is_visible()


@pytest.mark.parametrize("name", PAGES)
def test_keyboard_reaches_every_control(opened, name):
    page = opened(name)
    wanted = page.evaluate(
        "[...document.querySelectorAll('summary, a, button, [tabindex]')].filter(e => e.checkVisibility()).length"
    )
    reached = set()
    for _ in range(wanted + 1):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate("[...document.querySelectorAll('*')].indexOf(document.activeElement)")
        )
    assert (
        len(reached - {page.evaluate("[...document.querySelectorAll('*')].indexOf(document.body)")})
        >= wanted
    )
    if page.locator("summary").count():
        page.locator("summary").first.focus()
        page.keyboard.press("Enter")
        assert page.locator("details").first.get_attribute("open") is not None


def test_pointing_at_an_offer_shows_its_tooltip(opened):
    page = opened("match")
    plot = page.locator(".plot .u-over").first
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    texts = set()
    for i in range(1, 40):
        page.mouse.move(box["x"] + box["width"] * i / 40, box["y"] + box["height"] * i / 40)
        if page.locator(".tip").first.is_visible():
            texts.add(page.locator(".tip").first.inner_text())
    assert any("cost of the whole job: $" in text and "<b>" in text for text in texts), texts


def test_charts_redraw_on_resize_and_color_scheme_change(opened):
    page = opened("sweep", color_scheme="light")
    canvas = page.locator(".plot canvas").first
    wide, light = canvas.bounding_box()["width"], canvas.evaluate("c => c.toDataURL()")
    page.set_viewport_size({"width": 420, "height": 800})
    page.wait_for_function(
        "() => document.querySelector('.plot canvas').getBoundingClientRect().width < 400"
    )
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.set_viewport_size({"width": 1280, "height": 720})
    page.wait_for_function(
        "w => document.querySelector('.plot canvas').getBoundingClientRect().width === w", arg=wide
    )
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(
        "a => document.querySelector('.plot canvas').toDataURL() !== a", arg=light
    )


def test_changed_and_added_charts_are_drawn(opened):
    page = opened("sweep")
    page.evaluate("""() => {
      const figure = document.querySelector("figure.chart"), copy = figure.cloneNode(true);
      copy.querySelectorAll(".uplot").forEach(e => e.remove());
      document.querySelector("main").append(copy);
      const chart = JSON.parse(figure.querySelector("script").textContent);
      trainpaceCharts.draw(figure, { ...chart, finding: "another finding", series: chart.series.slice(-1), marks: [] });
    }""")
    page.wait_for_function("() => document.querySelectorAll('.plot canvas').length === 3")
    assert page.locator(".plot canvas").first.get_attribute("aria-label") == "another finding"
    page.evaluate("document.querySelector('main').lastChild.remove()")


AT_PRINT = """() => addEventListener("beforeprint", () => { globalThis.printed =
  [...document.querySelectorAll(".plot canvas")].map(c => [c.width, c.getContext("2d").getImageData(0, 0, c.width, c.height)
    .data.reduce((sum, v, i) => sum + (i % 4 === 3 && v > 0), 0), getComputedStyle(document.body).color]); })"""


@pytest.mark.parametrize("name", ["forecast", "sweep", "match", "plan", "ladder", "diagnosis"])
def test_page_prints_in_light_colors(opened, name):
    page = opened(name, color_scheme="dark")
    page.evaluate(AT_PRINT)
    document = page.pdf(format="A4")
    assert document.startswith(b"%PDF")
    printed = page.evaluate("printed")
    assert len(printed) == CANVASES.get(name, 0)
    for width, painted, ink in printed:
        assert width == 3 * 680
        assert painted > 10_000
        assert ink == "rgb(27, 37, 48)"
    assert not page.evaluate("document.documentElement.classList.contains('paper')")


def test_tables_are_available_without_javascript(browser, files):
    context = browser.new_context(offline=True, java_script_enabled=False)
    page = context.new_page()
    page.goto((files / "forecast.html").as_uri())
    assert page.locator("noscript").count() == 1
    page.locator("summary").first.click()
    assert page.locator("details table").first.is_visible()
    context.close()
