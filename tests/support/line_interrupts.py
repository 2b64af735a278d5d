"""Ctrl-C at a chosen line of a sender's own code, in the thread that syncs."""

from __future__ import annotations

import linecache
import sys
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any

_MOST = 2  # interruptions at one line
Place = tuple[str, str]  # a file's name and a function's


class InterruptedAt(AbstractContextManager["InterruptedAt"]):
    """Raises KeyboardInterrupt at the n-th line, from 0, of some functions and of all they call.

    Counted are lines of `delta_sender`, each twice at most, so that loops come to an end. Those of
    ``with`` are not: CPython itself does not leave a context manager that is interrupted there.

    Attributes:
        has_come: Whether that line was reached.
        place: The file and the line where it was.
    """

    def __init__(self, line: int, *functions: Place) -> None:
        self._left, self._functions = line, {*functions}
        self._seen: Counter[tuple[object, int]] = Counter()
        self._outermost: FrameType | None = None
        self._before: Any = None
        self.has_come, self.place = False, ""

    def __enter__(self) -> InterruptedAt:
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)

    def _enter(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        if "delta_sender" not in code.co_filename:
            return None
        if self._outermost is None:
            if (Path(code.co_filename).name, code.co_name) not in self._functions:
                return None
            self._outermost = frame
        return self._step

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if event == "return" and frame is self._outermost:
            self._outermost = None
        if event == "line" and not self.has_come and self._counts(frame):
            self._left -= 1
            if self._left < 0:
                self.has_come = True
                self.place = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._step

    def _counts(self, frame: FrameType) -> bool:
        code, line = frame.f_code, frame.f_lineno
        self._seen[code, line] += 1
        text = linecache.getline(code.co_filename, line).lstrip()
        is_clause = code.co_name.startswith("<")  # of a comprehension
        return self._seen[code, line] <= _MOST and not is_clause and not text.startswith("with ")
