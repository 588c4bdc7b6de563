"""A headless Chromium that tests drive over the DevTools protocol.

Tests that open one are marked with `needs("Chromium")`.
"""

import base64
import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from websockets.sync.client import ClientConnection, connect

from tests.needs import chromium
from tests.waiting import WAIT_SECONDS

LISTENING = re.compile(r"DevTools listening on (ws://\S+)")


class Browser:
    """One page in it."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self._session: str | None = None
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        self._call("Page.enable")

    def open(self, url: str) -> None:
        """Go to a page and wait until it is there."""
        self._call("Page.navigate", url=url)
        self.wait("Page.loadEventFired")

    def evaluate(self, script: str) -> Any:
        """The value of a script in the page, or what its promise comes to."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        found = self._call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a condition holds in the page, which may be another one by then."""
        end = monotonic() + WAIT_SECONDS
        while True:
            try:
                if self.evaluate(f"Boolean({condition})"):
                    return
            except AssertionError as error:
                # The page gave way to another while it was asked.
                if "target navigated" not in str(error):
                    raise
            assert monotonic() < end, self.evaluate("document.body?.innerText")
            sleep(0.05)

    def wait(self, event: str) -> None:
        """Wait until the page tells of something."""
        while json.loads(self._connection.recv(WAIT_SECONDS)).get("method") != event:
            pass

    def press(self, key: str) -> None:
        """Press and let go of a key: Tab or Enter."""
        named = {"key": key, "code": key, "windowsVirtualKeyCode": {"Tab": 9, "Enter": 13}[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **named, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **named)

    def type(self, text: str) -> None:
        """Write where the focus is."""
        self._call("Input.insertText", text=text)

    def set_scheme(self, scheme: str) -> None:
        """Prefer light or dark."""
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self._call("Emulation.setEmulatedMedia", features=media)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """Write what a window of this size shows as PNG."""
        self.resize(width, height)
        content = self._call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(content))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._connection.send(json.dumps(message))
        while True:
            answer = json.loads(self._connection.recv(WAIT_SECONDS))
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with a profile of its own in the folder."""
    program = chromium()
    assert program is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    options += ["--disable-background-networking", "--no-first-run", "--hide-scrollbars"]
    process = subprocess.Popen(
        [program, *options, f"--user-data-dir={folder / 'profile'}", "about:blank"],
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        found = next(filter(None, map(LISTENING.search, process.stderr)))
        with connect(found.group(1), max_size=None) as connection:
            yield Browser(connection)
    finally:
        process.terminate()
        process.wait()
