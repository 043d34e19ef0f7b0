"""A real browser without a library: headless Chromium, told what to do over a pipe by its DevTools protocol."""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE = 60  # seconds that the browser may take for one answer


def chromium() -> str | None:
    """The browser on this machine, if there is one; $UNSKEW_CHROMIUM names another."""
    return os.environ.get("UNSKEW_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in a headless Chromium. Messages are JSON, each ended by a zero byte, on the browser's files 3 and 4."""

    def __init__(self, home: Path) -> None:
        (theirs, mine), (read, write) = os.pipe(), os.pipe()
        command = [
            str(chromium()),
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={home}",
        ]

        def place() -> None:  # by way of numbers that neither end can have
            for number, end in ((100, theirs), (101, write), (3, 100), (4, 101)):
                os.dup2(end, number)

        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(command, pass_fds=(3, 4), preexec_fn=place, **silent)
        os.close(theirs)
        os.close(write)
        self.out, self.back = os.fdopen(mine, "wb", 0), os.fdopen(read, "rb")
        self.number, self.rest, self.session = 0, b"", None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for name in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{name}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method and wait for its result; events that come meanwhile are kept."""
        self.number += 1
        message = {
            "id": self.number,
            "method": method,
            "params": params,
            **({"sessionId": self.session} if self.session else {}),
        }
        self.out.write(json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.rest:
            some = os.read(self.back.fileno(), 1 << 20)
            assert some, "the browser has ended"
            self.rest += some
        first, _, self.rest = self.rest.partition(b"\0")
        return json.loads(first)

    def show(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False, phone: bool = False) -> None:
        """Open a page at a size, and wait until its charts are drawn."""
        self.events.clear()
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setTouchEmulationEnabled", enabled=phone)
        self.media(dark)
        self.call("Page.navigate", url=page.resolve().as_uri())
        ends = time.monotonic() + PATIENCE
        while not self.value("document.documentElement?.dataset.drawn"):
            assert time.monotonic() < ends, f"charts are not drawn: {self.complaints()}"
            time.sleep(0.05)

    def media(self, dark: bool, kind: str = "screen") -> None:
        """Take a colour scheme, and a kind of medium."""
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media=kind, features=features)

    def value(self, code: str) -> Any:
        """The value of an expression in the page."""
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def point_at(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, selector: str = "html") -> Path:
        """A picture of an element, or of the whole page."""
        box = self.value(
            f"(r => ({{x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height}}))"
            f"(document.querySelector({selector!r}).getBoundingClientRect())"
        )
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, clip={**box, "scale": 1})
        path.write_bytes(base64.b64decode(found["data"]))
        return path

    def printed(self) -> bytes:
        """The page as a PDF file."""
        return base64.b64decode(self.call("Page.printToPDF", printBackground=True)["data"])

    def complaints(self) -> list[str]:
        """Errors and warnings of the console, and what the page tried to load beside itself."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event["method"] == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:400])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
                found.append(json.dumps(params["args"])[:400])
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(params["entry"]["text"])
            elif event["method"] == "Network.requestWillBeSent":
                url = params["request"]["url"]
                found += [url[:200]] if not url.startswith(("data:", "file:")) else []
        return found

    def close(self) -> None:
        """End the browser."""
        self.process.terminate()
        self.process.wait(10)
        self.out.close()
        self.back.close()
