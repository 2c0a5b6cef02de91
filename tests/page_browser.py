"""A headless Chromium and what tests of the web page do in it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SCHEMES = ("light", "dark")
_FLAGS = (
    "--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --lang=en --window-size=1200,800"
)


class Page:
    """The page in a browser."""

    def __init__(self, driver: Any) -> None:
        self.driver, self.opened = driver, 0

    def open(self, url: str, view: str = "") -> None:
        """Open the page anew, with nothing kept of the time before."""
        if self.driver.current_url.startswith(url):
            self.run("sessionStorage.clear()")
        self.opened += 1
        self.driver.get(f"{url}/?{self.opened}{view}")
        if self.run("const kept = sessionStorage.length; sessionStorage.clear(); return kept"):
            self.driver.refresh()
        self.driver.get_log("browser")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns."""
        return self.driver.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements("css selector", selector))

    def one(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """The text of all elements, seen or not."""
        return str(self.run("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent).join('\\n')", selector))

    def seen(self, selector: str) -> list[str]:
        """The texts of the elements that are laid out."""
        script = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.offsetParent).map((e) => e.innerText)"
        return list(self.run(script, selector))

    def controls(self) -> list[tuple[str, str]]:
        """Role and name, as a screen reader gets them, of all that can have the focus."""
        nodes = self.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if any(held["name"] == "focusable" and held["value"]["value"] for held in node.get("properties", ()))
        ]

    def wait(self, what: Callable[[], Any], timeout_s: float = 20.0) -> Any:
        """What `what` gives once it gives something."""
        end = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < end, f"it didn't come to be so; the page's log: {self.driver.get_log('browser')}"
            time.sleep(0.02)
        return found

    def wait_for_text(self, selector: str, text: str) -> None:
        self.wait(lambda: text in self.text(selector))

    def ask(self, question: str) -> None:
        """Write a question and send it."""
        self.run("document.querySelector('#question').value = arguments[0]", question)
        self.one("#question").send_keys("\n")

    def asked(self, question: str) -> None:
        """Ask, and wait for the answer's end."""
        self.ask(question)
        self.wait(lambda: self.run("return document.querySelector('#log').getAttribute('aria-busy')") == "false")

    def prefer(self, **features: str) -> None:
        """Media features, such as prefers_color_scheme="dark"; none resets them."""
        told = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": told})

    @contextmanager
    def width(self, pixels: int) -> Iterator[None]:
        size = {"width": pixels, "height": 740, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        yield
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

    def complaints(self) -> list[str]:
        """What the browser had to say of the page since it was opened."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


def started(folder: Path) -> Any:
    """A driver of a new Chromium that keeps its files in `folder`. Skips the test where there is none."""
    selenium = pytest.importorskip("selenium.webdriver", reason="selenium isn't installed")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("chromium and chromium-driver aren't installed")
    options = selenium.ChromeOptions()
    options.binary_location = chromium
    for flag in (*_FLAGS.split(), f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return selenium.Chrome(options=options, service=selenium.ChromeService(chromedriver))
