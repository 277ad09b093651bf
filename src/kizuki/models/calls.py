"""What is heard of a model's attention: one `Call`, and who wants to hear it while a pass runs on this thread.

Three places tell: transformers' attention table (`hf`), PyTorch's own functions (`torch_native`), and a line in a
model's code (`note`). Each asks `watchers()` whether a recording's pass is running on its thread; where none is, it
does nothing.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor, nn

if TYPE_CHECKING:
    from kizuki import Observation, Observe


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call of a model: what its function was given and what it returned."""

    module: nn.Module
    implementation: str  # transformers' name, or "torch" for PyTorch's own function, or "note"
    query: Tensor  # [batch, heads, queries, head_dim]
    key: Tensor  # [batch, kv_heads, keys, head_dim]
    value: Tensor  # [batch, kv_heads, keys, value_dim]
    mask: Any  # None, a tensor, or flex attention's BlockMask
    options: dict[str, Any]  # scaling, softcap, s_aux, position_bias, sliding_window, is_causal, …
    output: Any  # [batch, queries, heads, value_dim], or a `Behind`; None where a note was given none
    random: bool = False  # dropout was applied to the weights
    seen: Wanted | None = None  # what was read of A in the same pass, for whom


class Behind(Protocol):
    """Output that only shows further on in the model: rows of A v can be carried there and compared."""

    def gap(self, rows: list[int], mixed: Tensor) -> float:
        """How far the model's rows are from what `mixed` `[batch, heads, rows, value_dim]` leads to; 1 = too far."""


class Watcher(Protocol):
    """Something that wants to hear of a model's attention calls while a forward pass of it runs."""

    def wants(self, module: nn.Module) -> bool: ...

    def hear(self, module: nn.Module, make: Callable[[nn.Module], Call]) -> None:
        """`module` has attended; `make(module)` is the call, or raises RecordError. It is made where it is wanted."""


@runtime_checkable
class Observer(Watcher, Protocol):
    """A watcher that wants readings of A, which an attention function of kizuki's makes in its own pass."""

    def reads(self, module: nn.Module) -> Observe | None:
        """What it wants read of the attention that `module` is about to compute."""


@dataclass(eq=False)
class Wanted:
    """What is to be read in a call, and what was: None until a function that can has done it."""

    what: Observe
    observation: Observation | None = None


@runtime_checkable
class Editor(Watcher, Protocol):
    """A watcher that changes what an attention call gives: only transformers' attention table lets it."""

    def edit(self, call: Call) -> Any:
        """The output the model goes on with instead of `call.output`."""


_here = (
    threading.local()
)  # .watchers: those with a forward pass running on this thread; .deaf: told elsewhere


def watchers() -> list[Watcher]:
    """Those whose model is in a forward pass on this thread, innermost last."""
    if not hasattr(_here, "watchers"):
        _here.watchers = []
    found: list[Watcher] = _here.watchers
    return found


def listening() -> tuple[Watcher, ...]:
    """The watchers that a call on this thread is news to: none inside a call that is told as a whole."""
    return () if getattr(_here, "deaf", False) else tuple(watchers())


@contextmanager
def told() -> Iterator[None]:
    """Around a function whose call is told as a whole: what it calls in turn is not told again."""
    before = getattr(_here, "deaf", False)
    _here.deaf = True
    try:
        yield
    finally:
        _here.deaf = before


@contextmanager
def wanted(readers: Sequence[Watcher], module: nn.Module) -> Iterator[Wanted | None]:
    """Around the function that computes a module's attention: what one of its watchers wants read meanwhile."""
    asked = [what for w in readers if isinstance(w, Observer) and (what := w.reads(module)) is not None]
    before = getattr(_here, "wanted", None)
    _here.wanted = Wanted(asked[0]) if len(asked) == 1 else None
    try:
        yield _here.wanted
    finally:
        _here.wanted = before


def want() -> Wanted | None:
    """What is to be read in the call that runs on this thread now."""
    now: Wanted | None = getattr(_here, "wanted", None)
    return now


def callers() -> Iterator[nn.Module]:
    """The modules whose methods are running on this thread, innermost first, each once.

    Read off the first argument of each frame, so that no hook is needed: a hook inside
    `nn.TransformerEncoderLayer` switches its fast path off, which changes bits.
    """
    frame: FrameType | None = sys._getframe(1)
    last = None
    while frame is not None:
        code = frame.f_code
        if code.co_argcount:
            owner = frame.f_locals.get(code.co_varnames[0])
            if isinstance(owner, nn.Module) and owner is not last:
                last = owner
                yield owner
        frame = frame.f_back


def tell(heard: tuple[Watcher, ...], call: Callable[[nn.Module], Call], part: str | None = None) -> None:
    """Tell each watcher of `call(module)`, where module is the innermost running one that it knows.

    `part` names what in that module attends, where a function does the work of several modules.
    """
    waiting = list(heard)
    for module in callers():
        for watcher in [w for w in waiting if w.wants(module)]:
            waiting.remove(watcher)
            watcher.hear(module if part is None else getattr(module, part, module), call)
        if not waiting:
            return
