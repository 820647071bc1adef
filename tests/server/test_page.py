"""The page at /, in a real browser against a live server."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
if CHROMIUM is None:
    pytest.skip("needs Chromium: apt-get install chromium", allow_module_level=True)

import jllm  # noqa: E402
from jllm.server import Server  # noqa: E402
from tests.server.conftest import OPTIONS, make_engine, wait_until  # noqa: E402

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any, live: Server) -> Iterator[Any]:
    """The page of a server without a key, loaded; it must not complain to its console."""
    opened = browser.new_page()
    complaints: list[str] = []
    opened.on("console", lambda message: complaints.append(message.text))
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.goto(live.url)
    opened.wait_for_selector("#model option", state="attached")
    yield opened
    opened.close()
    # The browser notes refusals too, which the page shows.
    assert [text for text in complaints if "status of 400" not in text] == []


def ask(page: Any, prompt: str, **options: Any) -> None:
    for name, value in options.items():
        page.fill(f"[name={name}]", str(value))
    page.fill("#prompt", prompt)
    page.press("#prompt", "Enter")


def wait_for_the_end(page: Any) -> None:
    page.wait_for_selector("#send:visible")


def answer(page: Any) -> str:
    """The last answer, whole; ask so that there is one (a sampled answer may be empty)."""
    wait_for_the_end(page)
    text: str = page.locator("#messages li").last.inner_text()
    return text


def sent(page: Any, prompt: str, **options: Any) -> dict[str, Any]:
    """The request that a question makes."""
    with page.expect_request("**/v1/chat/completions") as caught:
        ask(page, prompt, **options)
    wait_for_the_end(page)
    body: dict[str, Any] = caught.value.post_data_json
    return body


def test_an_answer_is_streamed_into_the_conversation(page: Any, live_engine: jllm.Engine) -> None:
    ask(page, "hi", max_tokens=24, seed=1, temperature=0)
    first = answer(page)
    assert page.locator("#messages li").all_inner_texts()[0] == "hi" and first
    body = sent(page, "and?")
    assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user"]
    page.click("#new")
    assert page.locator("#messages li").count() == 0
    assert sent(page, "anew")["messages"] == [{"role": "user", "content": "anew"}]


def test_options_reach_the_request(page: Any) -> None:
    chosen = dict(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, max_tokens=3, seed=5)
    chosen |= dict(presence_penalty=1, frequency_penalty=-1)
    body = sent(page, "hi", **chosen, system="Be brief.")
    assert chosen.items() <= body.items()
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert body["model"] == "tiny"
    assert "seed" not in sent(page, "hi", seed="")


def test_stop_frees_the_engine(
    page: Any, live: Server, live_engine: jllm.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = live_engine.step

    def slow_step() -> list[jllm.RequestOutput]:
        time.sleep(0.1)
        return step()

    monkeypatch.setattr(live_engine, "step", slow_step)
    ask(page, "hi", max_tokens=200)
    page.wait_for_selector("#messages li.streaming")
    wait_until(lambda: live.served.engine.num_open == 1)
    page.click("#stop")
    wait_for_the_end(page)
    wait_until(lambda: live.served.engine.num_open == 0)


def test_gauges_show_what_the_engine_does(page: Any) -> None:
    # Not page.wait_for_function: what it evaluates again, the page's security policy refuses.
    wait_until(lambda: page.inner_text("#running") == "0")
    ask(page, "hi", max_tokens=200, temperature=0)
    wait_until(lambda: page.inner_text("#rate") not in ("–", "0.0"))
    assert answer(page)
    assert page.inner_text("#kv").endswith("%")


def test_a_hostile_text_stays_text(page: Any) -> None:
    chunk = json.dumps({"choices": [{"delta": {"content": HOSTILE}}]})
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body=f"data: {chunk}\n\ndata: [DONE]\n\n",
        ),
    )
    ask(page, HOSTILE)
    assert answer(page) == HOSTILE
    assert page.title() == "jllm" and page.locator("#messages img, #messages script").count() == 0


def test_an_error_is_shown_in_the_servers_words(page: Any) -> None:
    ask(page, "hi", max_tokens=100_000)
    page.wait_for_selector("#error:visible")
    assert "maximum context length" in page.inner_text("#error")
    assert page.input_value("#prompt") == "hi"  # it can be asked again


def test_an_empty_answer_is_told(page: Any) -> None:
    page.route(
        "**/v1/chat/completions",
        lambda route: route.fulfill(content_type="text/event-stream", body="data: [DONE]\n\n"),
    )
    ask(page, "hi")
    page.wait_for_selector("#error:visible")
    assert "empty" in page.inner_text("#error")
    assert page.input_value("#prompt") == "hi"


def test_a_key_is_asked_for_and_kept(browser: Any) -> None:
    with Server(make_engine(), replace(OPTIONS, api_key="secret")) as server:
        wait_until(lambda: server.served.engine.state == "ready")
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("#error:visible")
        assert "API key" in page.inner_text("#error")
        page.fill("#key", "secret")
        page.press("#key", "Tab")
        page.wait_for_selector("#model option", state="attached")
        page.reload()
        page.wait_for_selector("#model option", state="attached")
        ask(page, "hi", max_tokens=4, temperature=0)
        assert answer(page)
        page.close()


def test_nothing_may_come_from_elsewhere(page: Any, live: Server) -> None:
    policy = page.request.get(live.url).headers["content-security-policy"]
    assert policy.startswith("default-src 'self';")


def test_a_model_without_a_chat_template_goes_on_with_text(browser: Any) -> None:
    from tests.server.conftest import spoken_model

    params = spoken_model()
    assert params.tokenizer is not None
    plain = params.replace(tokenizer=replace(params.tokenizer, chat_template=None))
    with Server(jllm.Engine(plain, make_engine().config), OPTIONS) as server:
        wait_until(lambda: server.served.engine.state == "ready")
        page = browser.new_page()
        page.goto(server.url)
        page.wait_for_selector("#model option", state="attached")
        page.wait_for_timeout(300)  # until it knows that there is no template
        with page.expect_request("**/v1/completions") as caught:
            ask(page, "Once", max_tokens=4, temperature=0)
        assert caught.value.post_data_json["prompt"] == "Once"
        assert answer(page)
        page.close()
