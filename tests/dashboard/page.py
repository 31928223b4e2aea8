"""A headless Chromium with the dashboard in it, driven as its reader would: by labels, names and keys."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException, WebDriverException
from selenium.webdriver import ActionChains, Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.select import Select

from tests.support.server import TOKEN

#: Polling interval for what the page shows, and how long it may take to show it, seconds.
POLL_S = 0.02
WAIT_S = 30.0
DESKTOP = (1440, 900)
PHONE = (360, 740)
#: Screenshots for people; git ignores the directory.
SHOTS = Path(__file__).resolve().parents[1] / ".artifacts" / "dashboard"

#: Also: no traffic but that of the page.
ARGUMENTS = (
    "--headless=new", "--no-proxy-server", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run", "--lang=en-GB",
)  # fmt: skip

T = TypeVar("T")


def programs() -> tuple[str, str] | None:
    """Paths of Chromium and of its driver; None where one of them is missing."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Chrome]:
    """A Chromium of our own with an empty profile; it is gone afterwards."""
    found = programs()
    assert found is not None
    options = ChromeOptions()
    options.binary_location, driver = found
    for argument in (*ARGUMENTS, f"--user-data-dir={profile}"):
        options.add_argument(argument)
    if os.geteuid() == 0:
        # Chromium's own sandbox refuses root.
        options.add_argument("--no-sandbox")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(executable_path=driver))
    try:
        yield chrome
    finally:
        chrome.quit()


class Page:
    """The dashboard at ``url``, in a browser that forgets what it showed before."""

    def __init__(self, chrome: Chrome, url: str) -> None:
        self.chrome = chrome
        self.url = url
        self.console: list[dict[str, Any]] = []
        chrome.get("about:blank")
        chrome.get_log("browser")
        chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        self.resize(DESKTOP)

    # --- going there -------------------------------------------------------------------------------------------------

    def open(self, where: str = "") -> None:
        """Load the page; ``where`` is the part behind ``#``."""
        self.chrome.get("about:blank")
        self.chrome.get(f"{self.url}/{where and '#' + where}")

    def leave(self) -> None:
        """Go elsewhere: from here on the page asks nobody."""
        self.chrome.get("about:blank")

    def sign_in(self, token: str = TOKEN, where: str = "") -> None:
        """Load the page, type the token, and wait until it is let in."""
        self.open(where)
        self.type("token", token)
        self.press("ENTER")
        self.wait(lambda: self.shown("views"), "the dashboard is shown")

    def go(self, where: str) -> None:
        """Follow an address of the page's own."""
        self.run("location.hash = arguments[0]", where)

    def resize(self, size: tuple[int, int]) -> None:
        """Give the page this many pixels; a narrow one is a phone's."""
        width, height = size
        self._width = width
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """Prefer ``light`` or ``dark``."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    # --- looking -----------------------------------------------------------------------------------------------------

    def run(self, script: str, *arguments: Any) -> Any:
        """Run a script in the page and return its value."""
        return self.chrome.execute_script(script, *arguments)

    def by_id(self, name: str) -> WebElement:
        return self.chrome.find_element(By.ID, name)

    def find(self, selector: str) -> WebElement:
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def text(self, name: str) -> str:
        """What an element shows."""
        return self.by_id(name).text

    def shown(self, name: str) -> bool:
        return self.by_id(name).is_displayed()

    def rows(self) -> dict[str, str]:
        """The text of every row of the list, by Action id."""
        script = """return [...document.querySelectorAll('#rows tr')].map(
            row => [row.querySelector('a').textContent, row.innerText])"""
        return dict(self.run(script))

    def events(self) -> list[tuple[int, str, str]]:
        """Sequence, name and text of every row of the timeline."""
        script = """return [...document.querySelectorAll('#events > li')].map(
            row => [Number(row.children[0].textContent), row.children[1].textContent, row.children[2].textContent])"""
        return [tuple(row) for row in self.run(script)]

    def focused(self) -> str:
        """Id of the element that has the focus, else its text."""
        name: str = self.run("const e = document.activeElement; return e.id || e.innerText || e.tagName")
        return name

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], T], what: str, *, deadline_s: float = WAIT_S) -> T:
        """Return the first true value of ``condition``; elements that are replaced while it looks do not count."""
        give_up = time.monotonic() + deadline_s
        while True:
            with contextlib.suppress(NoSuchElementException, StaleElementReferenceException):
                if value := condition():
                    return value
            assert time.monotonic() < give_up, f"not within {deadline_s:g} s: {what}; {self._state()}"
            time.sleep(POLL_S)

    def wait_text(self, name: str, part: str) -> str:
        """Wait until an element shows ``part``; returns all that it shows."""
        return self.wait(lambda: part in self.text(name) and self.text(name), f"#{name} shows {part!r}")

    def _state(self) -> str:
        with contextlib.suppress(WebDriverException):
            return f"the page shows {self.find('body').text[:3000]!r}, the console {self.read_console()}"
        return "the page cannot be read"

    # --- doing -------------------------------------------------------------------------------------------------------

    def click(self, name: str) -> None:
        self.wait(lambda: self.shown(name), f"#{name} is there")
        self.by_id(name).click()

    def type(self, name: str, text: str) -> None:
        """Replace what is in a field."""
        field = self.wait(lambda: self.shown(name) and self.by_id(name), f"#{name} is there")
        field.clear()
        field.send_keys(text)

    def choose(self, name: str, text: str) -> None:
        """Choose from a list."""
        Select(self.by_id(name)).select_by_visible_text(text)

    def press(self, *keys: str) -> None:
        """Press keys, by the names of selenium's Keys, or type text, where the focus is."""
        for key in keys:
            ActionChains(self.chrome).send_keys(getattr(Keys, key, key)).perform()

    def tab_to(self, name: str, *, most: int = 60) -> None:
        """Press Tab until the element with that id, or with that text, has the focus."""
        for _ in range(most):
            if self.focused() == name:
                return
            self.press("TAB")
        raise AssertionError(f"{most} times Tab do not lead to {name}; the focus is on {self.focused()}")

    # --- what must not be --------------------------------------------------------------------------------------------

    def read_console(self) -> list[dict[str, Any]]:
        """Everything the console has had since the page was made, violations of the policy included."""
        self.console += self.chrome.get_log("browser")
        return self.console

    def faults(self, *, besides: str = "\0") -> list[str]:
        """Warnings and errors of the console, without those that contain ``besides``."""
        lines = [entry["message"] for entry in self.read_console() if entry["level"] in ("WARNING", "SEVERE")]
        return [line for line in lines if besides not in line]

    def overflow(self) -> int:
        """Pixels that the page is wider than its window."""
        wide: int = self.run("return document.documentElement.scrollWidth")
        return wide - self._width

    def sticking_out(self) -> list[str]:
        """Parts of the page whose content is wider than they are."""
        script = """return [...document.querySelectorAll('.views > *, dialog[open]')].filter(
            part => part.scrollWidth > part.clientWidth).map(part => part.id)"""
        return list(self.run(script))

    def shoot(self, name: str) -> Path:
        """Write a screenshot for people to look at."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        path = SHOTS / f"{name}.png"
        assert self.chrome.save_screenshot(str(path))
        return path
