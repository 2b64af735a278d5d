"""Threads can decode every type of the product at once, see `engine_ext.structs`."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

# Prints the types that msgspec looks at only when they are decoded. Those without equality hold
# arrays and are never decoded.
_LOOK = """
import contextlib, importlib, pkgutil, sys
import msgspec

def subclasses(kind):
    for one in kind.__subclasses__():
        yield one
        yield from subclasses(one)

looked_at = []

def notice(frame, event, argument):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        looked_at.append(frame.f_locals["obj"])

packages = ("engine_ext", "delta_server", "delta_sender")
for name in packages:
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, name + "."):
        with contextlib.suppress(ImportError):  # plug-ins for trainers that are not installed
            importlib.import_module(module.name)
found = [
    kind
    for kind in {*subclasses(msgspec.Struct)}
    if kind.__module__.partition(".")[0] in packages
    and kind.__struct_config__.eq
    and not kind.__subclasses__()
]
assert len(found) > 50
for kind in found:
    sys.setprofile(notice)
    msgspec.json.Decoder(kind)
    sys.setprofile(None)
print(sorted({kind.__qualname__ for kind in looked_at}))
"""

# Two threads decode a type, and the second one meets it half looked at.
_CRASH = """
from __future__ import annotations
import threading, time
import msgspec
from engine_ext.structs import prepare

def slow():
    time.sleep(0.3)
    return int

class Inner(msgspec.Struct):
    number: slow()

class Outer(msgspec.Struct):
    inner: Inner

{prepare}

def decode():
    msgspec.json.decode(b'{{"inner": {{"number": 1}}}}', type=Outer)

thread = threading.Thread(target=decode)
thread.start()
time.sleep(0.1)
decode()
thread.join()
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_every_decoded_type_is_prepared_at_import() -> None:
    done = run(_LOOK)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "[]"), done.stderr


def test_threads_decode_a_prepared_type_at_once() -> None:
    assert run(_CRASH.format(prepare="prepare(Outer)")).returncode == 0
