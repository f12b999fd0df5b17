"""Drives headless Chromium over a pair of pipes; only Chromium itself is required."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_ANSWER_S = 30.0
_EXEC = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def installed() -> str | None:
    """Returns the path of an installed browser, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def _above_ten(fd: int) -> int:
    """Duplicates a descriptor to a number above ten, which the shell does not use for its own descriptors."""
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(fd)
    return moved


class BrowserError(Exception):
    """The browser reported an error or did not respond."""


class Browser:
    """A page in a separate browser process, with a profile that is removed afterwards."""

    def __init__(self, width: int = 1440, height: int = 1000, dark: bool = False) -> None:
        program = installed()
        if program is None:
            raise BrowserError(f"there is none of {', '.join(NAMES)}")
        self._profile = tempfile.TemporaryDirectory(prefix="paceline-browser-", ignore_cleanup_errors=True)
        to_browser, self._out = map(_above_ten, os.pipe())
        self._in, from_browser = map(_above_ten, os.pipe())
        words = [
            program,
            "--headless=new",
            "--no-sandbox",
            "--remote-debugging-pipe",
            "--disable-gpu",
            "--hide-scrollbars",
        ]
        words += [f"--user-data-dir={self._profile.name}", f"--window-size={width},{height}", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _EXEC, str(to_browser), str(from_browser), *words],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._rest = b""
        self._count = 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._out)
        os.close(self._in)
        self._profile.cleanup()

    def call(self, method: str, **arguments: Any) -> Any:
        """Sends a command of the DevTools protocol and returns its result."""
        self._count += 1
        message: dict[str, Any] = {"id": self._count, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        deadline_s = time.monotonic() + _ANSWER_S
        while True:
            answer = self._next(deadline_s)
            if answer.get("id") == self._count:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def open(self, address: str) -> None:
        """Navigates to a page."""
        self.call("Page.navigate", url=address)

    def resize(self, width: int, height: int) -> None:
        """Sets the size of the viewport."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def value(self, expression: str) -> Any:
        """Evaluates a JavaScript expression on the page and returns its value."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise BrowserError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 20.0) -> Any:
        """Waits until an expression is true."""
        deadline_s = time.monotonic() + seconds
        tried = f"(() => {{ try {{ return {expression} }} catch (error) {{ return null }} }})()"  # not loaded yet
        while not (found := self.value(tried)):
            if time.monotonic() > deadline_s:
                raise BrowserError(f"{expression} was not true within {seconds} s; errors: {self.errors()}")
            time.sleep(0.05)
        return found

    def screenshot(self, kind: str = "png") -> bytes:
        """Returns a screenshot of the viewport as PNG or WebP."""
        quality = {"quality": 70} if kind == "webp" else {}
        return base64.b64decode(self.call("Page.captureScreenshot", format=kind, **quality)["data"])

    def errors(self) -> list[str]:
        """Returns the errors that the page's scripts and its security policy have reported."""
        self.value("0")
        found = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(
                    event["params"]["exceptionDetails"].get("exception", {}).get("description", "an exception")
                )
            elif event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                found.append(event["params"]["entry"]["text"])
        return found

    def _next(self, deadline_s: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not select.select([self._in], [], [], left_s)[0]:
                raise BrowserError(f"the browser gave no answer within {_ANSWER_S:g} s")
            data = os.read(self._in, 1 << 16)
            if not data:
                raise BrowserError("the browser has ended")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)
