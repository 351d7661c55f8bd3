"""A headless Chromium driven over its debugging pipe: no driver program and no package is needed for that."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-pipe",
         "--disable-background-networking", "--no-first-run", "--hide-scrollbars")  # fmt: skip
# The browser reads commands from its descriptor 3 and writes answers to 4, whatever ours are.
LAUNCH = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


def find() -> str | None:
    """The browser's program, None where none is installed."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in one browser.

    Attributes:
        problems: errors that the page raised, logged or was told of.
        requests: addresses that the page asked for, itself included.
    """

    def __init__(self, program: str, profile: Path) -> None:
        pipes = [fcntl.fcntl(end, fcntl.F_DUPFD, 16) for pair in (os.pipe(), os.pipe()) for end in pair]
        self._answers, self._commands = os.fdopen(pipes[2], "rb"), os.fdopen(pipes[1], "wb", buffering=0)
        command = [
            sys.executable,
            "-c",
            LAUNCH,
            str(pipes[0]),
            str(pipes[3]),
            program,
            *FLAGS,
            f"--user-data-dir={profile}",
        ]
        self._process = subprocess.Popen(command, pass_fds=(pipes[0], pipes[3]), stderr=subprocess.DEVNULL)
        os.close(pipes[0])
        os.close(pipes[3])
        self._left, self._number = b"", 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends a command and returns its result; notes what happens in the meantime."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._commands.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._answers.fileno(), 1 << 20)
            assert more, "the browser has ended"
            self._left += more
        line, _, self._left = self._left.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        what, about = answer.get("method"), answer.get("params", {})
        if what == "Runtime.exceptionThrown":
            details = about["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description", details["text"]))
        elif what == "Runtime.consoleAPICalled" and about["type"] in ("error", "warning", "assert"):
            self.problems.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in about["args"]))
        elif what == "Log.entryAdded" and about["entry"]["level"] in ("error", "warning"):
            self.problems.append(about["entry"]["text"])
        elif what == "Network.requestWillBeSent" and not about["request"]["url"].startswith(("data:", "blob:")):
            self.requests.append(about["request"]["url"])
        return answer

    def open(self, file: Path, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        """Shows a file in a window of this size and waits until its charts are drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.theme(dark)
        self.problems.clear()
        self.requests.clear()
        self.call("Page.navigate", url=file.as_uri())
        self.wait("location.protocol === 'file:' && document.readyState === 'complete'")
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def theme(self, dark: bool) -> None:
        """Chooses the light or the dark theme, of a page that is open too."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def run(self, code: str) -> Any:
        """The value of an expression in the page."""
        done = self.call("Runtime.evaluate", expression=code, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, code: str, seconds: float = 30) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(code):
            assert time.monotonic() < end, f"{code} did not become true"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Presses a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def point(self, x: float, y: float) -> None:
        """Moves the mouse to a place in the window."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def shot(self, file: Path) -> None:
        """Writes a picture of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        done = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(done["data"]))

    def close(self) -> None:
        """Ends the browser."""
        self._session = None
        try:
            self.call("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._answers.close()
        self._commands.close()
