"""The page on `/` in a headless Chromium: it streams, stops, folds reasoning and calls, and asks no other host."""

from __future__ import annotations

import importlib
import importlib.util
import json
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server.web import FILES, HEADERS, ROOT

pytestmark = pytest.mark.browser
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
CALL = [{"index": 0, "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}]


class Handler(BaseHTTPRequestHandler):
    """The page as the server sends it, and answers that follow a script."""

    server: Any

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self.send(json.dumps({"data": [{"id": "fox"}]}).encode(), "application/json")
        elif self.path in FILES:
            name, kind = FILES[self.path]
            self.send((ROOT / name).read_bytes(), kind)
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.send_response(200)
        self.end_headers()
        last = body["messages"][-1]["content"]
        if last == "think":
            self.event({"reasoning": "Hmm, let me see."})
            self.event({"content": "<b>Four</b>"})
        elif last == "short":
            self.event({"content": "Cut"}, "length")
        elif last == "lost":
            self.event({"content": "Half"})
            return
        elif last == "silent":
            self.server.left.clear()
            self.server.left.wait(30)
            return
        elif last == "call":
            self.event({"tool_calls": CALL})
        else:
            self.event({"content": f"You said {last}."})
        while last == "forever" and not self.server.left.is_set():
            try:
                self.event({"content": " on"})
            except OSError:
                self.server.left.set()
                return
            time.sleep(0.01)
        usage = {"prompt_tokens": 3, "completion_tokens": 4}
        self.wfile.write(b"data: %b\n\ndata: [DONE]\n\n" % json.dumps({"choices": [], "usage": usage}).encode())

    def event(self, delta: dict[str, Any], end: str | None = None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": end}
        self.wfile.write(b"data: %b\n\n" % json.dumps({"choices": [choice]}).encode())


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.daemon_threads = True
        found.asked, found.left = [], threading.Event()  # type: ignore[attr-defined]
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if importlib.util.find_spec("playwright") is None:
        pytest.skip("there is no playwright (pip install 'moesaic[browser]')")
    if CHROMIUM is None:
        pytest.skip("there is no Chromium (apt-get install chromium)")
    with importlib.import_module("playwright.sync_api").sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def page(browser: Any, served: Any) -> Iterator[Any]:
    """It asks no other host, and nothing goes wrong on it."""
    found = browser.new_page(viewport={"width": 1100, "height": 760}, color_scheme="light")
    requests: list[str] = []
    problems: list[str] = []
    found.on("request", lambda request: requests.append(request.url))
    found.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    found.on("pageerror", lambda error: problems.append(str(error)))
    base = f"http://127.0.0.1:{served.server_port}"
    found.goto(base)
    shows(found, "#state", "ready")
    yield found
    assert all(url.startswith((base, "data:")) for url in requests), requests
    assert not problems
    found.close()


def shows(page: Any, place: str, text: str) -> None:
    """It will."""
    importlib.import_module("playwright.sync_api").expect(page.locator(place)).to_contain_text(text)


def say(page: Any, text: str) -> None:
    page.wait_for_selector("#send:visible")
    page.fill("#text", text)
    page.click("#send")


def test_a_conversation(page: Any, served: Any, tmp_path: Path) -> None:
    page.fill("#system", "Be brief.")
    page.fill("#temperature", "0.5")
    page.fill("#max_tokens", "40")
    page.fill("#text", "hello")
    page.keyboard.press("Enter")
    shows(page, "#figures", "3 tokens in, 4 out")
    assert page.inner_text("#log li.assistant .content") == "You said hello."
    asked = served.asked[-1]
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("fox", 0.5, 40) and "top_p" not in asked
    assert [message["content"] for message in asked["messages"]] == ["Be brief.", "hello"]

    say(page, "think")
    page.wait_for_selector(".thought summary:visible")
    page.wait_for_selector("text=<b>Four</b>")  # as text: nothing that a model says is markup
    assert not page.is_visible("text=Hmm, let me see.")
    page.click(".thought summary:visible")
    assert page.is_visible("text=Hmm, let me see.")

    page.fill("#tools", '[{"type": "function", "function": {"name": "weather"}}]')
    say(page, "call")
    page.wait_for_selector("text=Calls weather")
    say(page, "sunny")
    page.wait_for_selector("text=You said sunny.")
    sent = served.asked[-1]["messages"]
    assert sent[-1] == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert sent[-2]["tool_calls"][0]["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.screenshot(path=str(tmp_path / f"{scheme}.png"))
    page.click("#reset")
    assert page.locator("#log li").count() == 0


def test_answers_that_are_stopped_cut_off_or_lost(page: Any, served: Any) -> None:
    say(page, "forever")
    page.wait_for_selector("text=on on on")
    page.keyboard.press("Escape")
    shows(page, "#state", "stopped")
    assert served.left.wait(30), "the server is told"
    say(page, "again")
    page.wait_for_selector("text=You said again.")
    assert served.asked[-1]["messages"][-2]["content"].startswith("You said forever. on")
    say(page, "short")
    shows(page, "#state", "the answer was cut off")
    say(page, "lost")
    shows(page, "#state", "the connection ended before the answer did")
    say(page, "silent")
    page.wait_for_selector("#stop:visible")
    page.click("#stop")
    shows(page, "#state", "stopped")
    served.left.set()
    assert page.input_value("#text") == "silent"  # it was not answered, and may be changed
    say(page, "after")
    page.wait_for_selector("text=You said after.")
    assert [message["content"] for message in served.asked[-1]["messages"][-2:]] == ["Half", "after"]


def test_a_phone(browser: Any, served: Any) -> None:
    """Nothing lies over anything else, however long the answer is, and the parameters are folded."""
    page = browser.new_page(viewport={"width": 390, "height": 700}, color_scheme="dark")
    page.goto(f"http://127.0.0.1:{served.server_port}")
    shows(page, "#state", "ready")
    for text in ("much " * 150, "y" * 300):
        say(page, text)
        shows(page, "#log", f"You said {text.strip()}"[:300])
    boxes = [page.locator(place).bounding_box() for place in ("header", "aside", "#log", "#ask")]
    assert not page.locator("#system").is_visible()
    bottom = 0.0
    for box in boxes:
        assert box["y"] >= bottom - 1 and box["width"] <= 390, boxes
        bottom = box["y"] + box["height"]
    assert bottom <= 700 and boxes[2]["height"] > 300, boxes
    page.click("aside summary")
    assert page.locator("#system").is_visible() and page.locator("#send").is_visible()
    page.close()
