"""A real Chromium for tests, driven over its debugging pipe: no package needed beside the browser."""

import base64
import json
import os
import selectors
import shutil
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
LAUNCH = """
import os, sys
commands, answers = int(sys.argv[1]), int(sys.argv[2])
high = [os.dup(commands), os.dup(answers)]
while min(high) < 5:
    high = [os.dup(fd) for fd in high]
os.dup2(high[0], 3)
os.dup2(high[1], 4)
os.execvp(sys.argv[3], sys.argv[3:])
"""  # the browser reads commands from 3 and answers on 4


def find():
    """Path of the browser, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page in a headless browser; everything it complains of, and every address it asks for, is kept."""

    def __init__(self, profile: Path):
        flags = ["--headless=new", "--remote-debugging-pipe", f"--user-data-dir={profile}", "--disable-gpu",
                 "--no-first-run", "--disable-dev-shm-usage", "--force-color-profile=srgb", "--hide-scrollbars",
                 *(["--no-sandbox"] if os.geteuid() == 0 else [])]  # fmt: skip
        for_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        self._process = subprocess.Popen(
            [sys.executable, "-c", LAUNCH, str(for_browser), str(from_browser), find(), *flags, "about:blank"],
            pass_fds=(for_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(for_browser)
        os.close(from_browser)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._read, selectors.EVENT_READ)
        self._buffer, self._number, self._session = b"", 0, None
        self.complaints, self.requests, self._loaded = [], [], False
        target = next(t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self):
        self._process.terminate()
        self._process.wait(timeout=20)
        self._selector.close()
        os.close(self._read)
        os.close(self._write)

    def call(self, method, **parameters):
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _next(self, seconds=30):
        """The next message; events are noted on the way."""
        until = time.monotonic() + seconds
        while b"\0" not in self._buffer:
            if not self._selector.select(max(0, until - time.monotonic())):
                raise TimeoutError("the browser does not answer")
            part = os.read(self._read, 1 << 16)
            assert part, "the browser has ended"
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, event, told):
        if event == "Runtime.exceptionThrown":
            self.complaints.append(told["exceptionDetails"]["text"] + str(told["exceptionDetails"].get("exception")))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])
        elif event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Page.loadEventFired":
            self._loaded = True

    def open(self, address, width=1280, height=900, dark=False):
        """Show a page at a size of window, in a light or dark system."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._next()
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, expression):
        """The value of a JavaScript expression; promises are waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def point_at(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def press(self, key):
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def screenshot(self, path: Path, whole=True):
        picture = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(picture["data"]))
