"""A real server in processes of its own: `branchline serve` on a free port."""

import contextlib
import re
import subprocess
import sys
import threading
import time

import httpx
import psutil

ADMIN_KEY = "admin-of-the-tests"
READY = re.compile(r"is served on (http://[^ /]+)")


class Server:
    """Start it with options of `branchline serve`. Use as a context manager."""

    def __init__(self, *options: str, environment: dict[str, str] | None = None, timeout_s: float = 120.0) -> None:
        import os

        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-m", "branchline.cli.main", "serve", "--port", "0", *options],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**os.environ, "BRANCHLINE_ADMIN_KEYS": ADMIN_KEY, **(environment or {})},
        )  # fmt: skip
        self._ready = threading.Event()
        self.url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(timeout_s) or not self.url:
            self.close()
            raise AssertionError("the server did not start:\n" + "".join(self.lines))

    def _read(self) -> None:
        for line in self.process.stderr:
            self.lines.append(line)
            found = READY.search(line)
            if found:
                self.url = found.group(1)
                self._ready.set()
        self._ready.set()

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def post(self, path: str, **body) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=120)

    def admin(self, path: str) -> httpx.Response:
        return httpx.post(self.url + path, headers={"Authorization": f"Bearer {ADMIN_KEY}"}, timeout=30)

    def metrics(self) -> dict[str, float]:
        text = httpx.get(self.url + "/metrics", timeout=30, headers={"Authorization": f"Bearer {ADMIN_KEY}"}).text
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    def wait_for(self, condition, timeout_s: float = 20.0) -> dict[str, float]:
        """Metrics once ``condition(metrics)`` holds."""
        deadline = time.monotonic() + timeout_s
        while True:
            metrics = self.metrics()
            if condition(metrics):
                return metrics
            assert time.monotonic() < deadline, metrics
            time.sleep(0.1)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(5)
        self._reader.join(5)
        self.process.stderr.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
