"""Chromium, as Debian has it, in which a test looks at the page of a run."""

from __future__ import annotations

import base64
import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll.testing.run import wait_until

AXE_PACKAGE = importlib.util.find_spec("axe_core_python")
"""The Python package that brings axe-core, a checker of accessibility; None if it is not installed."""


def why_absent() -> str:
    """Why no browser can be started; empty if one can."""
    if not shutil.which("chromium") or not shutil.which("chromedriver"):
        return "Debian's packages chromium and chromium-driver are not installed"
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "the package selenium is not installed"
    return ""


needs_browser = pytest.mark.skipif(bool(why_absent()), reason=why_absent())


class Browser:
    """A browser with one tab.

    Args:
        driver: of Selenium.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str) -> None:
        """Load a page anew, in a tab that keeps nothing of pages before."""
        self.driver.get("about:blank")
        self.driver.get(address)

    def forget(self) -> None:
        """Take the token of this origin out of the tab."""
        self.js("sessionStorage.clear()")

    def js(self, script: str, *values: Any) -> Any:
        """What a script returns."""
        return self.driver.execute_script(script, *values)

    def press(self, key: str) -> None:
        """Press a key, whichever element has the focus: the page may draw that element anew at any time."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(key).perform()

    def text(self, css: str) -> str:
        """The text of the first element; empty if there is none, or if it is hidden."""
        script = "const e = document.querySelector(arguments[0]); return e?.checkVisibility() ? e.innerText : ''"
        return str(self.js(script, css)).strip()

    def texts(self, css: str) -> list[str]:
        """The texts of all elements."""
        return list(self.js("return [...document.querySelectorAll(arguments[0])].map(e => e.innerText.trim())", css))

    def wait(self, css: str, part: str, seconds: float = 20) -> str:
        """Wait until the element's text has this part; its text."""
        wait_until(lambda: part in self.text(css), f"{part!r} in {css}", seconds)
        return self.text(css)

    def until(self, done: Callable[[], bool], what: str) -> None:
        wait_until(done, what, 20)

    def log(self) -> list[str]:
        """What the browser has complained of since the last call: errors of scripts, refused styles."""
        return [each["message"] for each in self.driver.get_log("browser") if each["level"] == "SEVERE"]

    def set_look(self, *, dark: bool = False, width: int = 1280, height: int = 900) -> None:
        """Light or dark, laptop or phone."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def save_in(self, folder: Path) -> None:
        """Save downloads in this folder."""
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)})

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        found = self.driver.execute_cdp_cmd(
            "Page.captureScreenshot",
            {"captureBeyondViewport": whole}
            | (
                {
                    "clip": {
                        "x": 0,
                        "y": 0,
                        "width": self.js("return document.body.scrollWidth + 40"),
                        "height": self.js("return document.documentElement.scrollHeight"),
                        "scale": 1,
                    }
                }
                if whole
                else {}
            ),
        )
        path.write_bytes(base64.b64decode(found["data"]))

    def axe(self) -> list[str]:
        """What axe-core finds that is serious or critical: rule, and the elements."""
        assert AXE_PACKAGE is not None
        (folder,) = AXE_PACKAGE.submodule_search_locations or ()
        self.driver.execute_cdp_cmd("Page.setBypassCSP", {"enabled": True})
        self.js((Path(folder) / "axe.min.js").read_text(encoding="utf-8"))
        found = self.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
        return [
            f"{each['id']}: {json.dumps([node['html'][:200] for node in each['nodes'][:3]])}"
            for each in found["violations"]
            if each["impact"] in ("serious", "critical")
        ]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that ends with the block."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium"))
    for each in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--window-size=1280,900",
        "--no-first-run",
    ):
        options.add_argument(each)  # the sandbox does not start as root in a container
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(shutil.which("chromedriver"))))
    try:
        yield Browser(driver)
    finally:
        driver.quit()
