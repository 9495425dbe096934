"""Tests of the public journal and the accuracy page in a real browser."""

import json
import urllib.error
import urllib.request

import pytest

from trainpace.forecast import public_runs
from web_pages import until, watched


@pytest.fixture
def page(chromium, server):
    context = chromium.new_context(base_url=server.base, viewport={"width": 1280, "height": 900})
    opened = context.new_page()
    opened.faults = watched(opened)
    yield opened
    assert opened.faults == []
    context.close()


def data(server, address):
    with urllib.request.urlopen(f"{server.base}{address}") as response:
        return json.load(response)


def test_switching_journals_keeps_the_filters(page):
    page.goto("/runs?model=resnet&precision=amp_bf16")
    page.get_by_role("link", name="Public journal", exact=True).click()
    page.wait_for_url("**/public?model=resnet&precision=amp_bf16")
    assert page.locator("#f-model").input_value() == "resnet"
    page.get_by_role("link", name="Own runs").click()
    page.wait_for_url("**/runs?model=resnet&precision=amp_bf16")
    assert page.locator("#answer tbody tr").count() == 25


def test_public_runs_are_filtered_while_typing_and_paged(page):
    page.goto("/public")
    page.locator("#f-device").fill("3090")
    until(page, "location.search.includes('device=3090')")
    until(
        page,
        "[...document.querySelectorAll('#answer tbody tr')].every(r => r.cells[4].textContent.includes('3090'))",
    )
    page.get_by_role("link", name="Next page").click()
    page.wait_for_url("**page=2")
    assert page.locator("#answer tbody tr").count() == 25


def test_public_run_links_to_its_source_and_accuracy(page):
    run = next(r for r in public_runs() if r.forecast_ms and r.url.startswith("https://"))
    page.goto(f"/public_run?id={run.id}")
    facts = page.locator(".facts").inner_text()
    assert run.source in facts
    assert run.licence in facts
    assert page.locator(f".facts a[href='{run.url}']").get_attribute("rel") == "noreferrer noopener"
    page.get_by_role("link", name="Accuracy for this card and kind").click()
    page.wait_for_url("**/accuracy?card=**")
    assert page.locator("#f-card").input_value() == run.device


def test_two_public_runs_can_be_compared(page):
    page.goto("/public?mode=train")
    page.get_by_role("button", name="Compare A with B").click()
    page.wait_for_url("**/compare?a=public*")
    assert "time a step than A" in page.locator(".verdict").inner_text()


def test_accuracy_is_filtered_by_card_and_kind(page):
    page.goto("/accuracy")
    whole = page.locator(".verdict").inner_text()
    page.locator("#f-card").select_option("RTX 3090")
    until(page, "whole => document.querySelector('.verdict').innerText !== whole", whole)
    assert page.url.endswith("/accuracy?card=RTX+3090")
    assert page.locator("[aria-label='By card'] tbody tr").first.inner_text().startswith("RTX 3090")
    until(page, "document.querySelectorAll('figure.chart canvas').length === 1")
    page.locator("#f-kind").select_option("transformers")
    until(page, "location.search.includes('kind=transformers')")


def test_accuracy_figures_match_the_packaged_runs(server):
    answer = data(server, "/accuracy.json?card=RTX+3090&fit=not_in_fit")
    chosen = [r for r in public_runs() if r.device == "RTX 3090" and not r.in_fit and r.forecast_ms]
    assert answer["score"]["not_in_fit"]["n"] == len(chosen)
    assert answer["score"]["in_fit"]["n"] == 0
    mean = sum(abs(r.forecast_ms / r.step_time_ms - 1) for r in chosen) / len(chosen)
    assert answer["score"]["not_in_fit"]["mape"] == pytest.approx(100 * mean)
    points = [x for s in answer["chart"]["series"] if s["kind"] == "points" for x in s["x"]]
    assert sorted(points) == sorted(r.step_time_ms for r in chosen)
    assert data(server, "/public.json?device=K80")["count"] == sum(
        "K80" in r.device for r in public_runs()
    )


def test_accuracy_of_an_unmeasured_card_returns_404(server):
    with pytest.raises(urllib.error.HTTPError) as error:
        data(server, "/accuracy.json?card=Warp+Drive")
    assert error.value.code == 404
    error.value.close()
