"""Every dashboard page works in a real browser, by keyboard and with a screen reader."""

import json
import re
import urllib.request

import pytest

from trainpace.journal import Journal
from web_pages import PATHS, problems, until, watched


@pytest.fixture(params=["light", pytest.param("dark", marks=pytest.mark.slow)])
def page(request, chromium, server):
    context = chromium.new_context(
        color_scheme=request.param, base_url=server.base, viewport={"width": 1280, "height": 900}
    )
    opened = context.new_page()
    opened.faults = watched(opened)
    yield opened
    assert opened.faults == []
    context.close()


def paths(data):
    with Journal.open(str(data / "trainpace" / "journal.db")) as journal:
        sweeps = [s for s in journal.sweeps() if "resnet" in s.model]
        run = journal.sweep_entries(sweeps[0].id)[0]
    return PATHS(sweeps, run)


def test_every_page_renders_and_is_accessible(page, data):
    for path, holds in paths(data).items():
        response = page.goto(path)
        assert response.status == 200, path
        assert page.locator("h1").count() == 1
        for selector in holds:
            assert page.locator(selector).count() >= 1, (path, selector)
        for canvas in page.locator("figure.chart canvas").all():
            drawn = canvas.evaluate(
                "c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
                " const seen = new Set(); for (let i = 0; i < d.length; i += 4) seen.add(d[i] << 16 | d[i+1] << 8 | d[i+2]);"
                " return seen.size; }"
            )
            assert drawn > 8, path
        assert problems(page) == [], path
        assert page.faults == [], path


def test_pages_request_no_other_server(page, data, server):
    asked = []
    page.on("request", lambda r: asked.append(r.url))
    for path in paths(data):
        page.goto(path)
    assert [url for url in asked if not url.startswith(server.base)] == []


def test_hostile_names_are_escaped(page):
    page.goto("/runs?text=script")
    assert page.locator("td", has_text="<script>alert(1)</script>").count() >= 1
    assert page.locator("main script:not([type='application/json'])").count() == 0
    assert page.locator("img").count() == 0


def test_keyboard_filter_keeps_focus_and_updates_status_and_url(page):
    page.goto("/runs")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    for _ in range(30):
        if page.evaluate("document.activeElement.id") == "f-model":
            break
        page.keyboard.press("Tab")
    page.keyboard.type("vgg")
    until(page, "document.querySelectorAll('#answer tbody tr').length === 1")
    assert page.evaluate("document.activeElement.id") == "f-model"
    until(page, "document.getElementById('status').textContent === 'One run'")
    assert page.url.endswith("/runs?model=vgg")
    assert page.locator("#twin").get_attribute("href").endswith("/runs.json?model=vgg")
    page.goto(page.url)
    assert page.locator("#f-model").input_value() == "vgg"
    assert page.locator("#answer tbody tr").count() == 1


def test_table_sorts_and_pages(page):
    page.goto("/runs?model=resnet")
    page.get_by_role("link", name="Step ms").press("Enter")
    page.wait_for_url("**order=fastest")
    assert page.locator("th[aria-sort=ascending]").inner_text().startswith("Step ms")
    steps = [
        float(t.replace(",", ""))
        for t in page.locator("tbody tr td:nth-child(9)").all_inner_texts()
    ]
    assert steps == sorted(steps)
    first = page.locator("tbody tr td:nth-child(3)").all_inner_texts()
    page.get_by_role("link", name="Next page").press("Enter")
    page.wait_for_url("**after=**")
    assert not set(first) & set(page.locator("tbody tr td:nth-child(3)").all_inner_texts())
    page.get_by_role("link", name="First page").press("Enter")
    page.wait_for_url(lambda url: "after" not in url)
    assert page.locator("tbody tr td:nth-child(3)").all_inner_texts() == first


def test_two_runs_can_be_compared_by_keyboard(page):
    page.goto("/runs?model=resnet")
    page.locator("input[name=b]").nth(3).focus()
    page.keyboard.press("Space")
    page.get_by_role("button", name="Compare A with B").focus()
    page.keyboard.press("Enter")
    page.wait_for_url("**/compare?a=*&b=*")
    assert "time a step than A" in page.locator(".verdict").inner_text()


def test_sliders_update_the_forecast_and_the_url(page):
    page.goto("/whatif?model=little+transformer&precision=bf16")
    before = page.locator(".cards").inner_text()
    slider = page.get_by_role("slider", name="Batch of one GPU, slider")
    slider.focus()
    page.keyboard.press("ArrowRight")
    until(page, "before => document.querySelector('.cards').innerText !== before", before)
    assert page.locator("#f-batch").input_value() == "38"
    assert slider.evaluate("e => e === document.activeElement")
    assert slider.get_attribute("aria-valuetext") == "38"
    until(page, "location.search.includes('batch=38')")
    until(page, "document.getElementById('status').textContent.startsWith('The training takes')")
    shared = page.locator(".cards").inner_text()
    page.goto(page.url)
    assert page.locator(".cards").inner_text() == shared
    page.locator("#f-zero").fill("3")
    page.locator("#f-nodes").fill("4")
    until(page, "location.search.includes('zero=3') && location.search.includes('nodes=4')")
    until(
        page,
        "document.querySelector('.cards').innerText.includes('4 GPUs') || document.querySelector('.cards').innerText.includes('scaling')",
    )
    assert page.locator("figure.chart canvas").count() == 1


def test_invalid_value_shows_an_error_in_place(page):
    page.goto("/whatif?model=little+transformer&precision=bf16")
    page.locator("#f-batch").fill("0")
    until(page, "document.querySelector('#answer .verdict.no') !== null")
    assert "Batch" in page.locator("#answer").inner_text()
    page.locator("#f-batch").fill("4")
    until(page, "document.querySelector('#answer .cards') !== null")
    page.faults[:] = [fault for fault in page.faults if "400" not in fault]


def test_pages_work_without_javascript(chromium, server):
    context = chromium.new_context(java_script_enabled=False, base_url=server.base)
    page = context.new_page()
    page.goto("/runs")
    page.locator("#f-model").fill("vgg")
    page.get_by_role("button", name="Show").click()
    assert page.locator("#answer tbody tr").count() == 1
    page.goto("/whatif?model=little+transformer&precision=bf16")
    page.locator("#f-batch").fill("7")
    page.get_by_role("button", name="Forecast").click()
    assert "batch=7" in page.url
    assert page.locator(".cards").count() == 1
    context.close()


def test_narrow_screen_does_not_scroll_the_page_sideways(chromium, server):
    context = chromium.new_context(base_url=server.base, viewport={"width": 380, "height": 800})
    page = context.new_page()
    for path in ("/runs", "/whatif?model=little+transformer&precision=bf16", "/score"):
        page.goto(path)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    context.close()


def test_every_page_has_a_documented_json_version(server, data):
    for path in paths(data):
        address, _, query = path.partition("?")
        with urllib.request.urlopen(f"{server.base}{address}.json?{query}") as response:
            assert response.headers["content-type"] == "application/json"
            found = json.load(response)
        assert found["schema_version"] == 1
        assert re.fullmatch(r"\w+(Page|Answer)", found["record"])


def test_token_unlocks_the_pages_in_a_browser(chromium, guarded):
    context = chromium.new_context(base_url=guarded.base)
    page = context.new_page()
    assert page.goto("/runs").status == 401
    page.goto(f"/runs?model=vgg&token={guarded.token}")
    page.wait_for_url(f"{guarded.base}/runs?model=vgg")
    assert page.locator("#answer tbody tr").count() == 1
    assert guarded.token not in page.content()
    assert page.goto("/whatif?model=little+transformer&precision=bf16").status == 200
    context.close()


def test_built_in_model_is_forecast_without_tracing(server):
    with urllib.request.urlopen(f"{server.base}/whatif.json?model=resnet18") as response:
        assert json.load(response)["forecast"]["step"]["forward_ms"] > 0
