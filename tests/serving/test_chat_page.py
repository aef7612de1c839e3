"""The chat page in a real browser: Debian's `chromium`, or another that CHROMIUM names."""

import os
import re
import shutil

import httpx
import pytest


@pytest.fixture(scope="module")
def page(server):
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page()
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: message.type == "error" and page.problems.append(message.text))
        page.on("request", lambda request: request.url.startswith(server.url) or page.problems.append(request.url))
        page.goto(server.url)
        yield page
        browser.close()


def test_the_page_loads_nothing_from_elsewhere(server):
    response = httpx.get(server.url)
    assert response.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert not re.search(r'(?:src|href)="(?:https?:)?//', response.text)


def test_an_answer_streams_in(page, server):
    page.locator("#model", has_text="tiny").wait_for()
    page.fill("#max-tokens", "20")
    page.fill("#prompt", "Hello <b>you</b>")
    page.press("#prompt", "Enter")
    page.locator("#stop:disabled").wait_for()
    assert page.inner_text(".user") == "Hello <b>you</b>"  # text, not markup
    assert page.text_content(".assistant")
    assert re.fullmatch(r"\d+ tokens, [\d.]+ tokens/s", page.inner_text(".note"))
    assert page.problems == []


def test_stop_ends_the_answer_and_frees_its_pages(page, server):
    before = server.metrics().get('flax_paged_answers_total{finish_reason="disconnect"}', 0)
    page.click("#clear")
    assert page.locator(".message").count() == 0
    page.fill("#max-tokens", "230")
    stopped = False
    for _ in range(20):
        page.fill("#prompt", "Tell me a long story")
        page.evaluate("document.querySelector('#send').click()")
        page.evaluate(
            """() => new Promise((done) => {
                const timer = setInterval(() => {
                    const answers = document.querySelectorAll(".assistant");
                    if (answers[answers.length - 1].textContent) document.querySelector("#stop").click();
                    if (document.querySelector("#stop").disabled) { clearInterval(timer); done(); }
                }, 1);
            })"""
        )
        page.locator("#stop:disabled").wait_for()
        if stopped := "(stopped)" in page.locator(".note").last.inner_text():
            break
        page.click("#clear")
    assert stopped
    after = server.wait_until_idle()
    assert after.get('flax_paged_answers_total{finish_reason="disconnect"}', 0) >= before
    page.fill("#prompt", "And then?")  # the page goes on
    page.fill("#max-tokens", "5")
    page.press("#prompt", "Enter")
    page.locator("#stop:disabled").wait_for()
    assert page.locator(".error").count() == 0 and page.problems == []
