"""What was computed and may be asked for again, in memory of a fixed size."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any


class Kept:
    """Values by name, `limit` bytes of them; the one that was not asked for longest goes first.

    A value that is asked for while it is made is made once: the others wait. One larger than the limit is handed out
    and not kept. Safe between threads.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.size = 0
        self._values: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._making: dict[Hashable, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, name: Hashable, make: Callable[[], Any], size: Callable[[Any], int]) -> Any:
        """The value of `name`, made now if it is not there; `size` says how many bytes one holds."""
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
                return self._values[name][0]
            making = self._making.setdefault(name, threading.Lock())
        with making:
            with self._lock:
                if name in self._values:
                    self._values.move_to_end(name)
                    return self._values[name][0]
            value = make()
            held = size(value)
            with self._lock:
                self._making.pop(name, None)
                if held <= self.limit:
                    self._values[name] = (value, held)
                    self.size += held
                while self.size > self.limit:
                    _, (_, gone) = self._values.popitem(last=False)
                    self.size -= gone
            return value
