"""Code that ends in the middle of a line, as that of a process which is killed."""

import sys
from collections.abc import Callable, Collection
from types import ModuleType


class Killed(BaseException):
    """The process has ended."""


def run_until(line: int | None, modules: Collection[ModuleType], function: Callable[..., object], *arguments) -> bool:
    """Whether a function came to its end before that many lines of the modules had run; None = it may."""
    left, files = [line], {module.__file__ for module in modules}

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in files:
            return None
        if event == "line" and left[0] is not None:
            if left[0] == 0:
                raise Killed
            left[0] -= 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*arguments)
    except Killed:
        return False
    finally:
        sys.settrace(before)
    return True
