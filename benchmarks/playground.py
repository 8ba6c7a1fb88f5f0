"""How soon the page of `finola playground` is there, how long its actions take, and what memory they need.

    python benchmarks/playground.py --out results/playground_cpu.json

Everything is measured as a visitor sees it, in Debian's Chromium without a window: from the start of the process to the
page with all its controls, and from a click or a key to the line of words that answers it. The photographs are those of
the package, and one of 12 megapixels made of them.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from finola.data.examples import example_images

T = TypeVar("T")

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage")
PATIENCE = 20.0  # seconds for anything to happen
TABS = ("Rebuild", "Slide", "Components", "Grow", "Quantise", "Finer grid")
# a tab's button, or, where there is no room for it, its place in the menu of further tabs, which is opened first
OPEN_TAB = """
const shown = element => element.offsetParent !== null && getComputedStyle(element).visibility !== "hidden";
const named = element => element.textContent.trim() === arguments[0] && shown(element);
const places = [...document.querySelectorAll(".tab-container:not(.visually-hidden) button[role=tab]"),
                ...document.querySelectorAll(".overflow-dropdown button")];
const place = places.find(named), more = [...document.querySelectorAll(".overflow-menu > button")].find(shown);
if (place) place.click(); else if (more) more.click();
return Boolean(place);
"""


@contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator:
    """Chromium without a window, with a profile of its own."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        for flag in (*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(DRIVER))
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)  # a window has a least width
        try:
            yield driver
        finally:
            driver.quit()


@contextmanager
def playground(port: int, **environment: str) -> Iterator[subprocess.Popen]:
    """The process of `finola playground`, on CPU, which is ended by SIGTERM."""
    command = [sys.executable, "-m", "finola.cli", "playground", "--port", str(port), "--device", "cpu"]
    heard = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # a job in the background ignores it
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, **environment}, preexec_fn=heard)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def until(condition: Callable[[], T], what: str) -> T:
    """The first value of `condition` that is true."""
    from selenium.common.exceptions import StaleElementReferenceException

    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            if value := condition():
                return value
        except (OSError, StaleElementReferenceException):
            pass
        time.sleep(0.01)
    raise TimeoutError(f"{what}: not within {PATIENCE:.0f} seconds")


def visit(driver, port: int) -> None:
    """Open the page, and wait until its controls and its photographs are there."""
    until(lambda: socket.create_connection(("127.0.0.1", port), 1).close() is None, "the server")
    driver.get(f"http://127.0.0.1:{port}")
    until(lambda: driver.execute_script("""
        const shelf = [...document.querySelectorAll(".shelf img")].filter(image => image.offsetParent);
        return document.querySelectorAll("button[role=tab]").length >= 6 && document.querySelector(".drop input")
            && shelf.length === 3 && shelf.every(image => image.naturalWidth)"""), "the page")


def lines(driver) -> list[str]:
    """The lines of words in sight: that about the photograph, and then those of the tab."""
    return driver.execute_script("""return [...document.querySelectorAll(".block.words .md")]
        .filter(words => words.offsetParent && words.innerText.trim()).map(words => words.innerText.trim())""")


def open_tab(driver, title: str) -> None:
    until(lambda: driver.execute_script(OPEN_TAB, title), f"the tab {title}")


def drop(driver, path: Path, place: int = 0) -> None:
    """Give a file to the first place for photographs, or to the second."""
    from selenium.webdriver.common.by import By

    def places() -> list:
        return driver.find_elements(By.CSS_SELECTOR, ".drop input[type=file]")

    until(lambda: len(places()) > place, "a place for a photograph")
    places()[place].send_keys(str(path))


def slide_to_end(driver, label: str, key: str) -> None:
    """Press a key on the slider with this in its label."""
    from selenium.webdriver.common.by import By

    sliders = driver.find_elements(By.CSS_SELECTOR, "input[type=range]")
    next(s for s in sliders if label in (s.get_attribute("aria-label") or "") and s.is_displayed()).send_keys(key)


def answered(driver, act: Callable[[], None], text: str) -> float:
    """Seconds from an act to a line on the page that has this text."""
    start = time.perf_counter()
    act()
    until(lambda: any(text in line for line in lines(driver)), text)
    return time.perf_counter() - start


def measure() -> dict:
    """One start of the page, and each action once."""
    from selenium.webdriver.common.keys import Keys

    port, seconds = free_port(), {}
    with tempfile.TemporaryDirectory() as folder, browser() as driver:
        large = Path(folder) / "large.jpg"
        example_images()["caps"].resize((4000, 3000)).save(large, quality=92)
        start = time.perf_counter()
        with playground(port) as process:
            visit(driver, port)
            seconds["page"] = time.perf_counter() - start
            until(lambda: any(" dB" in line for line in lines(driver)), "the first image")
            seconds["first image"] = time.perf_counter() - start
            seconds["12 megapixels dropped"] = answered(driver, lambda: drop(driver, large), "large.jpg: the centre")
            for title, text in zip(TABS, ("dB", "q₂", "q itself", "a map of", "dB", "by the law"), strict=True):
                seconds[f"tab {title}"] = answered(driver, lambda title=title: open_tab(driver, title), text)
            for title, label, text in (("Slide", "from the first", "1.00 · q₂"), ("Components", "component 1", "σ1"),
                                       ("Quantise", "bits for each", "768 of 8 bits")):
                open_tab(driver, title)
                time.sleep(1)  # what opening it began
                seconds[f"slider {title}"] = answered(driver, lambda label=label: slide_to_end(driver, label, Keys.END),
                                                      text)
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = next(int(line.split()[1]) // 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return {"seconds": seconds, "peak_mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="starts of the page (%(default)s)")
    parser.add_argument("--out", type=Path, help="write the result as JSON")
    args = parser.parse_args()
    runs = [measure() for _ in range(args.repeats)]
    medians = {name: statistics.median(run["seconds"][name] for run in runs) for name in runs[0]["seconds"]}
    for name, median in medians.items():
        print(f"{name}: {median:.2f} s")
    print(f"the server's peak memory: {max(run['peak_mib'] for run in runs)} MiB")
    if args.out:
        import torch

        from finola.files import write_json
        from finola.provenance import environment

        write_json(args.out, {"medians": medians, "runs": runs, **environment(torch.device("cpu"))})


if __name__ == "__main__":
    main()
