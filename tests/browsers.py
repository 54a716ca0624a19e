"""Chromium for the tests of pages, by selenium; the tests that ask for it are skipped without.

``apt install chromium chromium-driver`` and ``pip install selenium``.
"""

import contextlib
import shutil

import pytest

selenium = pytest.importorskip("selenium", reason="pages are tested by selenium: pip install it")
from selenium import webdriver  # noqa: E402 (after the check)
from selenium.webdriver.support.ui import WebDriverWait as WebDriverWait  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
if not (CHROMIUM and DRIVER):
    pytest.skip("no chromium or no chromedriver on the PATH", allow_module_level=True)

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--host-resolver-rules=MAP * ~NOTFOUND",  # no network
]
SIZES = {"desktop": (1280, 900), "phone": (390, 844)}


@contextlib.contextmanager
def opened(size):
    """A browser of a size of ``SIZES``; the phone has a touch screen."""
    width, height = SIZES[size]
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    for flag in [*FLAGS, f"--window-size={width},{height}"]:
        options.add_argument(flag)
    if size == "phone":
        metrics = {"width": width, "height": height, "pixelRatio": 2.0, "touch": True}
        options.add_experimental_option("mobileEmulation", {"deviceMetrics": metrics})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield browser
    finally:
        browser.quit()
