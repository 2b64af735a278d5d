"""A second host on this machine: a network namespace, with shared memory and mounts of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NUMBERS = itertools.count()


@dataclass(frozen=True, slots=True)
class Host:
    """One host.

    Attributes:
        address: its IP address on the network between the hosts.
        interface: its network interface there.
        prefix: a command that runs another one on it.
        folder: for what only this host is to use; tests see it too.
    """

    address: str
    interface: str
    prefix: tuple[str, ...]
    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables by which engines find the network."""
        return {
            "VLLM_HOST_IP": self.address,
            "SGLANG_HOST_IP": self.address,
            "GLOO_SOCKET_IFNAME": self.interface,
            "TP_SOCKET_IFNAME": self.interface,
        }


@contextlib.contextmanager
def two_hosts(folder: Path) -> Iterator[tuple[Host, Host]]:
    """Make a network of two hosts; the first one's loopback interface is this machine's.

    Needs to be root, for the namespaces.
    """
    number = f"{os.getpid()}-{next(_NUMBERS)}"
    name, ours, theirs = f"delta-{number}", f"d{number}a"[-15:], f"d{number}b"[-15:]
    net = f"10.213.{os.getpid() % 250}"
    namespace = ("ip", "netns", "exec", name)
    _run("ip", "netns", "add", name)
    try:
        _run("ip", "link", "add", ours, "type", "veth", "peer", "name", theirs, "netns", name)
        _run("ip", "address", "add", f"{net}.1/24", "dev", ours)
        _run("ip", "link", "set", ours, "up")
        _run(*namespace, "ip", "address", "add", f"{net}.2/24", "dev", theirs)
        _run(*namespace, "ip", "link", "set", theirs, "up")
        _run(*namespace, "ip", "link", "set", "lo", "up")
        first = _host(f"{net}.1", ours, (), folder / "first")
        second = _host(f"{net}.2", theirs, namespace, folder / "second")
        yield first, second
    finally:
        subprocess.run(["ip", "link", "delete", ours], capture_output=True, check=False)
        _run("ip", "netns", "delete", name)


def _host(address: str, interface: str, namespace: tuple[str, ...], folder: Path) -> Host:
    folder.mkdir()
    mounts = 'mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$TMPDIR" && exec "$@"'
    prefix = (*namespace, "unshare", "--mount", "sh", "-c", mounts, "sh")
    return Host(address, interface, prefix, folder)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()} (this needs root)")
