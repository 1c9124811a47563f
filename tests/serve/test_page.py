"""The page at ``/``: in a browser, with clicks and keys."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import piecegraph
from piecegraph.base.events import Event, EventLog
from piecegraph.llm.async_llm import AsyncLLM
from tests.cases.browser import ENTER, ESCAPE, TAB, Browser, until
from tests.cases.script_llm import write_script_llm
from tests.cases.serving import Served, served

MARKUP = "<i>a</i><script>window.isOwned=1</script><img/src=x/onerror=window.isOwned=1>"
CHAT = "{% for m in messages %}<user> {{ m.content }} {% endfor %}<assistant>"
ANSWER = ".assistant > .said"
RUNNING = "return document.getElementById('running').textContent"


@pytest.fixture
def window(chromium: Browser) -> Iterator[Browser]:
    chromium.look()
    yield chromium
    chromium.open("about:blank")  # no page asks for anything any more
    chromium.problems()


@pytest.fixture
def page(window: Browser, running: Served) -> Iterator[Browser]:
    """A fresh page, where answers are short and always the same. It complains of nothing."""
    visit(window, running)
    window.click("summary")
    window.type("[name=temperature]", "0")
    window.type("[name=max_tokens]", "6")
    yield window
    assert window.problems() == []
    until(running.is_idle)


def visit(window: Browser, running: Served, state: str = "ready") -> None:
    window.open(running.address)
    until(lambda: window.text("#state") == state)


def is_answered(window: Browser) -> bool:
    return window.run("return document.getElementById('stop').hidden") is True


def make_slow(llm: piecegraph.LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm.started.engine
    step = engine.step

    def slow() -> bool:
        time.sleep(0.1)
        return step()

    monkeypatch.setattr(engine, "step", slow)


# -- what is served


def test_what_it_may_do_is_said_in_its_headers(running: Served) -> None:
    status, html, headers = running.get("/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    rules = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert (rules["default-src"], rules["connect-src"], rules["frame-ancestors"]) == ("'none'", "'self'", "'none'")
    assert all(re.fullmatch(r"'sha256-[\w+/]{43}='", rules[f"{each}-src"]) for each in ("script", "style"))
    assert "unsafe" not in str(rules)
    assert set(re.findall(r"https?://[^\s'\"]+", html)) == {"http://www.w3.org/2000/svg"}  # a name, and no address


def test_the_page_needs_no_key_and_its_numbers_do(tiny: piecegraph.LLM) -> None:
    with served(tiny, api_keys=("secret",)) as running:
        assert running.get("/")[0] == 200
        assert running.get("/stats")[0] == 401
        status, stats, _ = running.get("/stats", Authorization="Bearer secret")
    assert (status, stats["status"], stats["model"]) == (200, "ready", "tiny")
    assert stats["load"]["num_running"] == 0
    assert stats["engine"].keys() == tiny.stats().keys()


def test_there_are_no_numbers_of_a_model_that_is_not_there(tiny: piecegraph.LLM) -> None:
    was_asked = threading.Event()

    def load(_: object) -> AsyncLLM:
        assert was_asked.wait(60)
        return AsyncLLM(tiny)

    with served(tiny, load=load) as running:
        stats = running.get("/stats")[1]
        was_asked.set()
        assert stats.pop("time_s") > 0
        assert stats == {"status": "loading", "models": ["tiny"], "model": "tiny", "version": piecegraph.__version__}
        until(lambda: running.get("/ready")[0] == 200)


# -- in a browser


def test_a_conversation_with_the_settings_that_are_shown(page: Browser, tiny: piecegraph.LLM) -> None:
    messages = [{"role": "system", "content": "gx"}]
    page.type("#system", "gx")
    for number, text in enumerate(("ax by", "cz")):
        messages.append({"role": "user", "content": text})
        expected = tiny.generate([tiny.chat_prompt(messages)], max_new_tokens=6)[0].text
        messages.append({"role": "assistant", "content": expected or ""})
        page.type("#prompt", text)
        page.click("#send") if number else page.press(ENTER)
        until(lambda number=number: is_answered(page) and len(page.texts(".about")) == number + 1)
        assert page.texts(ANSWER)[number] == (expected or "").lstrip()
        assert page.texts(".about")[number].startswith("6 tokens · ")
        assert page.texts(".about")[number].endswith(" · length limit")
    page.click("#clear")
    assert page.texts(".turn") == []
    assert "Nothing is stored" in page.text("#empty")


@pytest.mark.parametrize("way", ["click", "key"])
def test_an_answer_is_stopped_while_it_streams(
    page: Browser, tiny: piecegraph.LLM, running: Served, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    make_slow(tiny, monkeypatch)
    page.run("document.querySelector('[name=max_tokens]').value = 50")
    page.type("#prompt", "ax by" + ENTER)
    first = until(lambda: page.texts(ANSWER)[0])
    until(lambda: len(page.texts(ANSWER)[0]) > len(first))  # it grows
    assert not is_answered(page)
    until(lambda: page.text("#running") == "1")  # and the engine is seen at work
    assert page.text("#cache") != "0 %"
    page.click("#stop") if way == "click" else page.press(ESCAPE)
    until(lambda: is_answered(page))
    assert page.texts(".about")[0].endswith(" · stopped")
    until(running.is_idle)
    text = page.texts(ANSWER)[0]
    assert text.startswith(first)
    assert len(text.split()) < 50
    assert page.run("return document.activeElement.id") == "prompt"


def test_the_engine_is_watched(page: Browser, tiny: piecegraph.LLM, running: Served) -> None:
    before = tiny.stats()["num_steps"]
    running.post("/v1/completions", {"model": "tiny", "prompt": "ax", "max_tokens": 20, "temperature": 0})
    stats = until(lambda: (found := tiny.stats())["num_steps"] >= before + 20 and found)

    def shown() -> list[int]:
        return [int(text.split("\t")[1].replace(",", "")) for text in page.texts("#kinds tr")]

    expected = [counts["num_steps"] for counts in stats["steps"].values()]
    until(lambda: shown() == expected)
    assert page.texts("#kinds th") == list(stats["steps"])
    assert (page.text("#running"), page.text("#waiting"), page.text("#cache")) == ("0", "0", "0 %")
    assert int(page.text("#rate")) >= 0
    assert page.text("#padding").endswith(" %")


def test_text_is_never_taken_for_html(window: Browser, tmp_path: Path) -> None:
    """Neither that of a model, nor its reasoning, nor what the engine tells."""
    answer = MARKUP.replace("<i>", "<b>")
    words = ["<unk>", "<user>", "<assistant>", "<think>", MARKUP, "</think>", answer, "<end>"]
    marks = {"reasoning_content": {"open": "<think>", "close": "</think>"}, "content": {}}
    fields = {name: {**mark, "content": "text"} for name, mark in marks.items()}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "<assistant>", "fields": fields}
    folder = write_script_llm(tmp_path, words, chat_template=CHAT, response_template=template)
    with piecegraph.LLM(folder, backend="eager", device="cpu", max_num_seqs=1, options={"progress": False}) as llm:
        llm.events = EventLog("ignore")
        llm.events.emit(Event("PG501", "call", MARKUP))
        with served(llm) as running:
            visit(window, running)
            window.type("#prompt", MARKUP + ENTER)
            until(lambda: window.texts(".about"))
            assert window.texts(".user .said") == [MARKUP]
            assert window.texts(ANSWER) == [answer]
            window.click(".thought summary")
            assert [text.strip() for text in window.texts(".thought .said")] == [MARKUP]
            until(lambda: window.texts("#losses li") == [f"1 \N{MULTIPLICATION SIGN} PG501 call: {MARKUP}"])
            assert window.find("img, main i, main script, aside script") == []
            assert window.run("return window.isOwned ?? null") is None
            assert window.problems() == []
            assert (
                window.run("try { document.body.innerHTML = 'x' } catch (error) { return error.name }") == "TypeError"
            )


def test_errors_are_shown_and_the_text_is_kept(window: Browser, running: Served) -> None:
    visit(window, running)
    window.click("summary")
    window.type("[name=top_p]", "0")
    window.type("#prompt", "ax by" + ENTER)
    assert "400: PG108 top_p is 0.0" in until(lambda: "".join(window.texts("[role=alert]")))
    assert window.run("return document.getElementById('prompt').value") == "ax by"
    window.type("[name=top_p]", "7")  # 07: the browser knows that this is too much, and does not ask
    window.press(ENTER)
    assert len(window.texts(".turn")) == 2


def test_a_key(window: Browser, tiny: piecegraph.LLM) -> None:
    with served(tiny, api_keys=("secret",)) as running:
        window.look(width=360)
        visit(window, running, "needs a key")
        assert window.run("return document.documentElement.scrollWidth") <= 360
        window.type("#prompt", "ax" + ENTER)
        assert "401: the API key is missing or wrong" in until(lambda: "".join(window.texts("[role=alert]")))
        assert window.run("return document.activeElement.id") == "key"
        window.press("secret" + TAB)
        until(lambda: window.text("#state") == "ready")
        window.type("[name=max_tokens]", "3")
        window.click("#send")
        until(lambda: window.texts(".about"))
        kept = "return [document.cookie, localStorage.length, sessionStorage.length, location.href]"
        assert window.run(kept) == ["", 0, 0, f"{running.address}/"]
        until(lambda: window.run(RUNNING) == "0")  # it is told once a second
    until(lambda: window.text("#state") == "cannot be reached")
    assert window.run(RUNNING) == "\N{EN DASH}"


def test_it_is_seen_and_read(page: Browser) -> None:
    """Light and dark, on a phone, and by those who only hear it."""
    page.type("#prompt", "ax" * 200 + ENTER)
    until(lambda: page.texts(".about"))
    for element in page.find("input, textarea, [role=log], aside, main, button:not([hidden], #toggle)"):
        assert page.call("GET", f"/element/{element}/computedlabel"), element
    for width, scheme in ((1280, "light"), (1280, "dark"), (360, "light"), (360, "dark")):
        page.look(width=width, height=740, scheme=scheme)
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.contrast() >= 4.5
    assert not page.run("return document.getElementById('side').checkVisibility()")
    page.click("#toggle")
    assert page.text("#engine") == "Engine"
    assert page.run("return document.documentElement.scrollWidth") <= 360
