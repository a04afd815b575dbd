"""A headless Chromium, driven over the pipe that it speaks the DevTools protocol on: no driver and no package beside it.

`see` opens a local page as a reader has it (width, colour scheme, scripts on or off) and says what the browser saw.
"""

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 240  # for any one answer; a machine that does much else is slow
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--hide-scrollbars", "--no-sandbox",
    "--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking", "--disable-component-update",
)  # fmt: skip


def installed() -> str | None:
    """The path of a Chromium, if there is one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass(frozen=True)
class Seen:
    """width: of the page's content, room: of the window (CSS pixels); problems: errors in the console; requests: addresses other
    than the page's own; text: what can be read; png: the whole page."""

    width: int
    room: int
    problems: list[str]
    requests: list[str]
    text: str
    background: str
    png: bytes


class Browser:
    """One running Chromium; a new tab for every page."""

    def __init__(self, inward: int, outward: int) -> None:
        self._in, self._out = inward, outward
        self._numbers, self._buffer = itertools.count(1), b""
        self._events: list[dict[str, Any]] = []

    def see(self, page: Path, width: int, scheme: str = "light", scripts: bool = True, media: str = "screen") -> Seen:
        """Open `page` in a window of `width` CSS pixels."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        tab = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable", tab)
        mobile = width < 600
        size = {"width": width, "height": 844, "deviceScaleFactor": 2 if mobile else 1, "mobile": mobile}
        self._call("Emulation.setDeviceMetricsOverride", tab, **size)
        scheme_feature = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", tab, media=media, features=scheme_feature)
        self._call("Emulation.setScriptExecutionDisabled", tab, value=not scripts)
        self._events.clear()
        address = page.resolve().as_uri()
        self._call("Page.navigate", tab, url=address)
        self._until("Page.loadEventFired")
        self._call("Emulation.setScriptExecutionDisabled", tab, value=False)  # for the questions below
        root = "document.scrollingElement"
        numbers = [int(self._evaluate(tab, f"{root}.{side}Width")) for side in ("scroll", "client")]
        text = str(self._evaluate(tab, "document.body.innerText"))
        background = str(self._evaluate(tab, "getComputedStyle(document.body).backgroundColor"))
        png = self._call("Page.captureScreenshot", tab, captureBeyondViewport=True, format="png")["data"]
        seen = Seen(*numbers, self._problems(), self._requests(address), text, background, base64.b64decode(png))
        self._call("Target.closeTarget", targetId=target)
        return seen

    def _evaluate(self, tab: str, expression: str) -> Any:
        return self._call("Runtime.evaluate", tab, expression=expression, returnByValue=True)["result"].get("value")

    def _problems(self) -> list[str]:
        found = []
        for event in self._events:
            about = event["params"]
            if event["method"] == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
                found.append(" ".join(str(item.get("value", item)) for item in about["args"]))
            elif event["method"] == "Runtime.exceptionThrown":
                found.append(about["exceptionDetails"]["text"])
            elif event["method"] == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
                found.append(about["entry"]["text"])
        return found

    def _requests(self, address: str) -> list[str]:
        asked = [e["params"]["request"]["url"] for e in self._events if e["method"] == "Network.requestWillBeSent"]
        return [url for url in asked if url != address and not url.startswith("data:")]

    def _call(self, method: str, tab: str | None = None, /, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": tab} if tab else {})
        os.write(self._in, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._events.append(answer)

    def _until(self, method: str) -> None:
        while not any(event.get("method") == method for event in self._events):
            self._events.append(self._read())

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._out], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"Chromium says nothing for {SECONDS} s")
            part = os.read(self._out, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(message))


@contextmanager
def browser(command: str, profile: Path) -> Iterator[Browser]:
    """A Chromium that reads on descriptor 3 and writes on 4, and is gone after the block."""
    ends = [end for _ in range(2) for end in os.pipe()]
    # Above 3 and 4, so that putting them there closes none of them.
    to_read, inward, outward, to_write = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 20) for end in ends)
    for end in ends:
        os.close(end)

    def place() -> None:
        os.dup2(to_read, 3)
        os.dup2(to_write, 4)

    arguments = [command, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(arguments, preexec_fn=place, close_fds=False, **quiet)  # type: ignore[call-overload]
    os.close(to_read)
    os.close(to_write)
    try:
        yield Browser(inward, outward)
    finally:
        os.close(inward)  # which ends it
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(outward)
