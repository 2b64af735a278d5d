"""nginx in front of the engines, and the loop that lets it send requests to those that are ready.

Open-source nginx has no active health checks, so `Router` does what a readiness probe of Kubernetes
does for a Service: it asks each engine's ``/delta_ready?min_version=N`` twice a second, writes the
list of upstreams and reloads nginx when it changes.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import httpx
import psutil

_HOST: Final = "127.0.0.1"
_EVERY_S: Final = 0.5
_PROBE_S: Final = 2.0
_FAILURES: Final = 3  # probes in turn without an answer, as Kubernetes' failureThreshold
_RELOAD_S: Final = 30.0

_CONFIG: Final = """\
daemon off;
worker_processes 1;
user {user};
pid nginx.pid;
error_log error.log;
events {{ worker_connections 512; }}
http {{
  access_log off;
  client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
  uwsgi_temp_path uwsgi; scgi_temp_path scgi;
  upstream engines {{ least_conn; {servers} }}
  server {{
    listen {host}:{port};
    location / {{
      {action}
      proxy_http_version 1.1;
      proxy_buffering off;
      proxy_connect_timeout 2s;
      proxy_read_timeout 120s;
      proxy_next_upstream error http_503 non_idempotent;
    }}
  }}
}}
"""


class RouterError(RuntimeError):
    """Nginx is not installed, did not start, or did not take its list of engines."""


def config(ports: list[int], port: int, user: str) -> str:
    """Return nginx's configuration for engines on these ports; 503 if there is none."""
    servers = " ".join(f"server {_HOST}:{one} max_fails=0;" for one in ports)
    return _CONFIG.format(
        user=user,
        host=_HOST,
        port=port,
        servers=servers or "server 127.0.0.1:9 down;",
        action="proxy_pass http://engines;" if ports else "return 503;",
    )


class Router:
    """The router within the ``with`` block; it begins with no engine.

    Args:
        engines: port of each engine, by url.
        port: to listen on.
        folder: for nginx's files.

    Attributes:
        url: to send requests to.
        reloads: how often the list of engines has changed.
    """

    def __init__(self, engines: Mapping[str, int], port: int, folder: Path) -> None:
        self.url = f"http://{_HOST}:{port}"
        self.reloads = 0
        self._engines, self._port, self._folder = engines, port, folder
        self._least = 0
        self._listed: frozenset[str] = frozenset()
        self._evicted: set[str] = set()
        self._silent = dict.fromkeys(engines, 0)
        self._since: dict[str, float] = {}  # when an engine got into the list
        self._process: subprocess.Popen[bytes] | None = None
        self._lock, self._stop = threading.RLock(), threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._client = httpx.Client(timeout=_PROBE_S, trust_env=False)
        self.problems: list[str] = []

    def __enter__(self) -> Router:
        nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
        if nginx is None:
            raise RouterError("nginx is not installed (apt-get install nginx)")
        self._write()
        where = ["-p", str(self._folder), "-c", "nginx.conf", "-e", "error.log"]
        self._process = subprocess.Popen([nginx, *where], start_new_session=True)
        self._wait_for_workers(set())
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._client.close()
        process = self._process
        if process is not None:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def listed(self) -> frozenset[str]:
        """Urls of the engines that get requests."""
        return self._listed

    def since(self, url: str) -> float | None:
        """Return when an engine got its place in the list (`time.monotonic`); None without one."""
        with self._lock:
            return self._since.get(url) if url in self._listed else None

    def require(self, version: int) -> None:
        """Send requests from now on to engines that are ready with a version, or a later one."""
        with self._lock:
            self._least = version
            self._evicted.clear()
            self._look()

    def leave_out(self, url: str) -> None:
        """Send an engine no requests before the next version is required."""
        with self._lock:
            self._evicted.add(url)
            self._list(self._listed - {url})

    def _watch(self) -> None:
        while not self._stop.wait(_EVERY_S):
            with self._lock:
                try:
                    self._look()
                except (RouterError, OSError) as error:
                    self.problems.append(str(error))
                    return

    def _look(self) -> None:
        self._list(frozenset(url for url in self._engines if self._is_ready(url)))

    def _is_ready(self, url: str) -> bool:
        if url in self._evicted:
            return False
        try:
            answer = self._client.get(f"{url}/delta_ready", params={"min_version": self._least})
        except httpx.ConnectError:
            return False
        except httpx.TransportError:
            self._silent[url] += 1
            return url in self._listed and self._silent[url] < _FAILURES
        self._silent[url] = 0
        if answer.status_code != httpx.codes.OK:
            return False
        version = answer.json()["version"]
        if version < self._least:
            self.problems.append(f"{url} is ready for {self._least} with version {version}")
        return True

    def _list(self, urls: frozenset[str]) -> None:
        if urls == self._listed:
            return
        now = time.monotonic()
        self._since |= dict.fromkeys(urls - self._listed, now)
        self._listed = urls
        self._write()
        assert self._process is not None
        before = self._workers()
        self._process.send_signal(signal.SIGHUP)
        self._wait_for_workers(before)
        self.reloads += 1

    def _write(self) -> None:
        ports = [port for url, port in self._engines.items() if url in self._listed]
        user = pwd.getpwuid(os.getuid()).pw_name
        (self._folder / "nginx.conf").write_text(config(ports, self._port, user))

    def _workers(self) -> set[int]:
        """Return the ids of the workers that accept connections."""
        assert self._process is not None
        found = set()
        for child in psutil.Process(self._process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                title = " ".join(child.cmdline())
                if "worker process" in title and "shutting down" not in title:
                    found.add(child.pid)
        return found

    def _wait_for_workers(self, before: set[int]) -> None:
        """Wait until new workers accept connections, and none of those before."""
        deadline = time.monotonic() + _RELOAD_S
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            workers = self._workers()
            if workers and not workers & before:
                return
            time.sleep(0.02)
        raise RouterError(f"nginx failed: {(self._folder / 'error.log').read_text()[-2000:]}")
