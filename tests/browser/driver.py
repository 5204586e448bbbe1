"""Chromium, driven by chromedriver over W3C WebDriver's HTTP interface: Python's own urllib."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

#: What the browser is called here and there.
BROWSERS = ("chromium", "chromium-browser", "google-chrome")

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--disable-dev-shm-usage",
)  # fmt: skip

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"

#: Keys as WebDriver writes them.
HOME, END, LEFT, RIGHT, DOWN, TAB = "\ue011", "\ue010", "\ue012", "\ue014", "\ue015", "\ue004"


def why_no_browser() -> str:
    """What is missing to run one; ``""`` for nothing."""
    if not any(map(shutil.which, BROWSERS)):
        return "needs Chromium, and none is on PATH here"
    return "" if shutil.which("chromedriver") else "needs chromedriver, and none is on PATH here"


class Browser:
    """A session; what the browser refuses is a RuntimeError with its words."""

    def __init__(self, address: str, profile: Path) -> None:
        self._opener = build_opener(ProxyHandler({}))  # nothing is asked of a proxy
        self._address = address
        options = {
            "binary": next(filter(None, map(shutil.which, BROWSERS))),
            "args": [*_FLAGS, f"--user-data-dir={profile}"],
        }
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        session = self._call("POST", "/session", {"capabilities": capabilities})["sessionId"]
        self._address = f"{address}/session/{session}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self._address}{path}", data, method=method)
        try:
            with self._opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except HTTPError as error:
            said = json.load(error)["value"]["message"]
            raise RuntimeError(f"{method} {path}: {said}") from error

    def open(self, page: Path) -> None:
        """Loads a file."""
        self._call("POST", "/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a function body returns."""
        return self._call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def press(self, selector: str, keys: str) -> None:
        """Types into an element as a user does."""
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[_ELEMENT]}/value", {"text": keys})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        body = {"cmd": command, "params": parameters}
        return self._call("POST", "/goog/cdp/execute", body)

    def look(self, width: int, height: int, scheme: str) -> None:
        """The size of the window in CSS pixels, and ``"light"`` or ``"dark"``."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        preferred = [{"name": "prefers-color-scheme", "value": scheme}]
        self.devtools("Emulation.setEmulatedMedia", features=preferred)

    def screenshot(self, path: Path) -> None:
        """Writes what the window shows as PNG."""
        path.write_bytes(base64.b64decode(self._call("GET", "/screenshot")))

    def quit(self) -> None:
        """Ends the session and its browser."""
        self._call("DELETE", "")


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a fresh profile in the folder, on a free port."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    hanging = Timer(60, driver.kill)
    hanging.start()
    try:
        said = ""
        assert driver.stdout is not None
        for line in driver.stdout:
            said += line
            if found := re.search(r"started successfully on port (\d+)", line):
                break
        else:
            raise RuntimeError(f"chromedriver did not start:\n{said}")
        hanging.cancel()
        session = Browser(f"http://127.0.0.1:{found[1]}", folder / "profile")
        try:
            yield session
        finally:
            session.quit()
    finally:
        hanging.cancel()
        driver.terminate()
        driver.wait(timeout=30)
        driver.stdout.close()
