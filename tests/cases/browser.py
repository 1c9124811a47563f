"""A browser that is told what to do: Chromium without a window, by the protocol of WebDriver."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's id, as the standard has it."""
ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"
DOWN, RIGHT, END = "\ue015", "\ue014", "\ue010"

_CONTRAST = """
const light = (rgb) => rgb.map((part) => part / 255)
  .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4))
  .reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
const numbers = (color) => color.match(/[\\d.]+/g).map(Number)
  .map((part, i) => (color.startsWith("color(srgb") && i < 3 ? part * 255 : part));
const ground = (each) => {
  const found = numbers(getComputedStyle(each).backgroundColor);
  return found.length === 4 && found[3] === 0 ? ground(each.parentElement) : found.slice(0, 3);
};
const ratio = (each) => {
  const both = [numbers(getComputedStyle(each).color).slice(0, 3), ground(each)].map(light);
  return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
};
const texts = "h1, h2, h3, p, dt, dd, th, td, li, label, button, textarea, input, summary, .said, .text, .label";
const all = [...document.querySelectorAll(texts)];
return Math.min(...all.filter((each) => each.checkVisibility()).map(ratio));
"""


def missing_browser() -> str | None:
    """Why there is none; None if there is one."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"there is no {' and no '.join(lacking)} here" if lacking else None


class Browser:
    """One window.

    Args:
        session: its address at the driver.
    """

    def __init__(self, session: str) -> None:
        self._session = session

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """What the driver answers."""
        return _call(method, self._session + path, body)

    def open(self, address: str) -> None:
        self.call("POST", "/url", {"url": address})

    def run(self, script: str, *args: Any) -> Any:
        """What JavaScript returns."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def find(self, selector: str) -> list[str]:
        """The ids of elements."""
        found = self.call("POST", "/elements", {"using": "css selector", "value": selector})
        return [each[_ELEMENT] for each in found]

    def click(self, selector: str) -> None:
        """Where a user would: it fails if something is in the way."""
        self.call("POST", f"/element/{self.find(selector)[0]}/click", {})

    def type(self, selector: str, keys: str) -> None:
        self.call("POST", f"/element/{self.find(selector)[0]}/value", {"text": keys})

    def press(self, keys: str) -> None:
        """Wherever the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def text(self, selector: str) -> str:
        """Of the first one, as it is shown."""
        found: str = self.call("GET", f"/element/{self.find(selector)[0]}/text")
        return found

    def texts(self, selector: str) -> list[str]:
        """Of all of them, read at one time."""
        script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.innerText)"
        found: list[str] = self.run(script, selector)
        return found

    def look(self, *, width: int = 1280, height: int = 800, scheme: str = "light", media: str = "") -> None:
        """How wide the window is, what its user prefers, and whether it is paper (``"print"``)."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 800}
        self._devtools("Emulation.setDeviceMetricsOverride", size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self._devtools("Emulation.setEmulatedMedia", {"media": media, "features": features})

    def contrast(self) -> float:
        """The least between a text that is seen and what is behind it."""
        found: float = self.run(_CONTRAST)
        return found

    def point(self, selector: str, x: int = 0, y: int = 0, *, click: bool = False) -> None:
        """Move to a place, from the middle of an element on; and press there."""
        move = {"type": "pointerMove", "x": x, "y": y, "origin": {_ELEMENT: self.find(selector)[0]}}
        press = [{"type": kind, "button": 0} for kind in ("pointerDown", "pointerUp")] if click else []
        actions = [{"type": "pointer", "id": "mouse", "actions": [move, *press]}]
        self.call("POST", "/actions", {"actions": actions})

    def keep_downloads(self, folder: Path) -> None:
        self._devtools("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})

    def let_run(self, *, scripts: bool) -> None:
        """Whether pages that are opened from now on may run anything."""
        self._devtools("Emulation.setScriptExecutionDisabled", {"value": not scripts})

    def _devtools(self, command: str, params: Any) -> None:
        self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self.call("GET", "/screenshot"))

    def problems(self) -> list[str]:
        """What the browser has complained of since it was last asked."""
        found = self.call("POST", "/se/log", {"type": "browser"})
        return [each["message"] for each in found]


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """Start one that keeps its files in a folder."""
    flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    if os.name == "posix" and os.geteuid() == 0:  # its sandbox refuses to be run by root
        flags.append("--no-sandbox")
    wanted = {"browserName": "chrome", "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")}}
    wanted["goog:loggingPrefs"] = {"browser": "ALL"}
    with subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            told = next(line for line in driver.stdout if "successfully on port" in line)
            address = f"http://127.0.0.1:{told.split()[-1].strip('.')}"
            made = _call("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
            session = f"{address}/session/{made['sessionId']}"
            try:
                yield Browser(session)
            finally:
                _call("DELETE", session)
        finally:
            driver.kill()


def _call(method: str, address: str, body: Any = None) -> Any:
    data = None if method != "POST" else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(json.load(error)["value"]["message"]) from error


def until(condition: Callable[[], Any], seconds: float = 20) -> Any:
    """What a condition gives once it holds."""
    end = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < end
        time.sleep(0.03)
    return found
