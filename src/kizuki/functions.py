"""A user's function of indices or of a score: what it refers to, and what it gives on a tile of A.

On CPU tensors a plain Python function is compiled (cpu/custom.py) and called element by element, the same code for
every backend, so that it may use `if` and `math`. Where it cannot be compiled, or the tensors are elsewhere, it is
called with torch tensors that broadcast, and must be written elementwise.
"""

from __future__ import annotations

import dis
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .errors import KizukiTypeError, OptionError, ShapeError, show

if TYPE_CHECKING:
    from .problem import Problem

ARGUMENTS = {"mask": ("b", "h", "i", "j"), "score": ("s", "b", "h", "i", "j")}
MODULES = {"math", "numpy", "torch", "builtins"}
DTYPES = {
    torch.bool: np.dtype(np.bool_),
    torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
    torch.float16: np.dtype(np.float32),  # widened when the function is about to run
    torch.bfloat16: np.dtype(np.float32),
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
}
NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
Fn = Callable[..., Any]


class Unfit(Exception):
    """Why a function is not compiled, in words that follow 'it …'."""


@dataclass
class Node:
    """A plain function and what each outside name in it stands for.

    A value is `("value", x)`, `("array", n)` for the n-th captured array, or `("function", Node)`.
    """

    fn: FunctionType
    cells: list[tuple[str, Any]] = field(default_factory=list)
    globals: dict[str, tuple[str, Any]] = field(default_factory=dict)
    defaults: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class Survey:
    """What a function refers to: `key` is equal for functions that compile to the same code."""

    node: Node
    kind: str  # "mask" or "score"
    key: Hashable
    arrays: list[Tensor | np.ndarray]


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The global names code reads, and all names it mentions; its inner functions included."""
    outside: dict[str, None] = {}
    mentioned: set[str] = set()
    for step in dis.get_instructions(code):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            outside[str(step.argval)] = None
        mentioned.update(a for a in _texts(step.argval))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            more, names = _names(constant)
            outside.update(dict.fromkeys(more))
            mentioned |= names
    return tuple(outside), frozenset(mentioned)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _texts(part)


def survey(fn: Any, kind: str) -> Survey:
    """What `fn` refers to now. Raises Unfit where something in it cannot be part of compiled code."""
    arrays: list[Tensor | np.ndarray] = []
    node, key = _visit(fn, arrays, ())
    _count(node.fn, len(ARGUMENTS[kind]))
    return Survey(node, kind, (kind, key), arrays)


def _count(fn: FunctionType, wanted: int) -> None:
    code = fn.__code__
    if code.co_flags & 0x0C or code.co_kwonlyargcount:
        raise Unfit(f"takes *args, **kwargs or keyword-only arguments ({fn.__qualname__})")
    least = code.co_argcount - len(fn.__defaults__ or ())
    if not least <= wanted <= code.co_argcount:
        raise Unfit(f"takes {code.co_argcount} arguments, not {wanted}")


def _visit(fn: Any, arrays: list[Tensor | np.ndarray], trail: tuple[Any, ...]) -> tuple[Node, Hashable]:
    plain = getattr(fn, "py_func", fn)  # a function that Numba already compiles is taken as it was written
    if not isinstance(plain, FunctionType):
        raise Unfit(f"is a {type(fn).__name__}, not a plain function")
    code = plain.__code__
    if plain in trail:
        raise Unfit(f"calls itself ({plain.__qualname__})")
    node, keys = Node(plain), []
    outside, _ = _names(code)
    places: list[tuple[str, str, Any]] = []
    for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
        try:
            places.append(("cell", name, cell.cell_contents))
        except ValueError:
            raise Unfit(f"uses {name}, which has no value yet") from None
    places += [("global", name, plain.__globals__[name]) for name in outside if name in plain.__globals__]
    places += [("default", "a default", value) for value in plain.__defaults__ or ()]
    for place, name, value in places:
        spec, key = _classify(name, value, arrays, (*trail, plain))
        keys.append((place, name, key))
        if place == "cell":
            node.cells.append(spec)
        elif place == "global":
            node.globals[name] = spec
        else:
            node.defaults.append(spec)
    return node, (code, tuple(keys))


def _classify(
    name: str, value: Any, arrays: list[Tensor | np.ndarray], trail: tuple[Any, ...]
) -> tuple[tuple[str, Any], Hashable]:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.dtype not in DTYPES or value.device.type != "cpu":
            raise Unfit(f"uses {name}, a tensor of {value.dtype} on {value.device}")
        if type(value) not in (Tensor, torch.nn.Parameter):
            raise Unfit(f"uses {name}, a {type(value).__name__}")
        if value.dim() == 0:
            return _classify(name, value.item(), arrays, trail)
        arrays.append(value)
        return ("array", len(arrays) - 1), ("array", len(arrays) - 1, DTYPES[value.dtype].str, value.dim())
    if isinstance(value, np.ndarray):
        if value.dtype not in DTYPES.values() or not value.dtype.isnative:
            raise Unfit(f"uses {name}, an array of {value.dtype}")
        if value.ndim == 0:
            return _classify(name, value.item(), arrays, trail)
        arrays.append(value)
        return ("array", len(arrays) - 1), ("array", len(arrays) - 1, value.dtype.str, value.ndim)
    if value is None or isinstance(value, NUMBERS) or _is_numbers(value):
        return ("value", value), (type(value), repr(value))
    if isinstance(value, ModuleType):
        if value.__name__ not in MODULES:
            raise Unfit(f"uses the module {value.__name__}")
        return ("value", value), value.__name__
    if isinstance(value, (BuiltinFunctionType, np.ufunc)) or (
        isinstance(value, type) and value in (int, float, bool)
    ):
        return ("value", value), ("builtin", repr(value))
    if isinstance(getattr(value, "py_func", value), FunctionType):
        node, key = _visit(value, arrays, trail)
        return ("function", node), ("function", key)
    raise Unfit(f"uses {name}, a {type(value).__name__}")


def _is_numbers(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(v, NUMBERS) or _is_numbers(v) for v in value)


# -- what a function depends on ----------------------------------------------------------------------


def tensors(fn: Any) -> list[Tensor]:
    """The tensors a function refers to, as far as they can be found without running it."""
    return [value for value in _captures(fn, ()) if isinstance(value, Tensor)]


def _captures(fn: Any, trail: tuple[Any, ...]) -> Iterator[Any]:
    plain = getattr(fn, "py_func", fn)
    if not isinstance(plain, FunctionType) or plain in trail:
        return
    values = [plain.__globals__[n] for n in _names(plain.__code__)[0] if n in plain.__globals__]
    for cell in plain.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # a cell that is still empty
            continue
    values += plain.__defaults__ or ()
    for value in values:
        yield value
        yield from _captures(value, (*trail, plain))


def stamp(fn: Any, kind: str) -> Hashable | None:
    """Something that changes whenever what `fn` gives may have changed; None when that cannot be told."""
    try:
        found = survey(fn, kind)
    except Unfit:
        return None
    places: list[Hashable] = []
    for array in found.arrays:
        if not isinstance(array, Tensor) or array.is_inference():  # these count no writes
            return None
        places.append((array.data_ptr(), tuple(array.shape), array.stride(), array._version))
    return found.key, tuple(places)


def names_used(fn: Any, kind: str) -> frozenset[str]:
    """Which of its arguments (b, h, i, j) a function mentions; all of them where that cannot be told."""
    every = ARGUMENTS[kind]
    plain = getattr(fn, "py_func", fn)
    if not isinstance(plain, FunctionType):
        return frozenset(every)
    own = plain.__code__.co_varnames[: len(every)]
    mentioned = _names(plain.__code__)[1]
    return frozenset(name for name, given in zip(every, own, strict=False) if given in mentioned)


def refusal(fn: Any, kind: str) -> str | None:
    """Why `fn` cannot be compiled, in words that follow 'it …'; None when it can (and then it is)."""
    from .cpu import custom

    try:
        custom.code(survey(fn, kind))
    except Unfit as unfit:
        return str(unfit)
    return None


def named(fn: Any) -> str:
    """What to call a function in a message."""
    return str(getattr(fn, "__name__", type(fn).__name__))


# -- evaluation --------------------------------------------------------------------------------------


def places(problem: Problem, rows: slice, cols: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The indices (batch, head, query, key) of one tile, each along its own axis of four."""
    device = problem.device
    return (
        torch.arange(problem.batch, device=device).view(-1, 1, 1, 1),
        torch.arange(problem.heads, device=device).view(1, -1, 1, 1),
        torch.arange(rows.start, rows.stop, device=device).view(1, 1, -1, 1),
        torch.arange(cols.start, cols.stop, device=device).view(1, 1, 1, -1),
    )


def see(fn: Fn, at: tuple[Tensor, Tensor, Tensor, Tensor]) -> Tensor | None:
    """`fn(b, h, i, j)` of a mask by its compiled code, boolean and broadcastable; None where there is none."""
    if not _plain(*at):
        return None
    from .cpu import custom

    used = names_used(fn, "mask")
    # An axis that no index the function looks at runs along stays 1.
    chosen = [t if name in used else t[:1, :1, :1, :1] for name, t in zip("bhij", at, strict=True)]
    try:
        return custom.see(survey(fn, "mask"), chosen)
    except Unfit:
        return None


def _plain(*given: Tensor) -> bool:
    return all(type(t) is Tensor and t.device.type == "cpu" and t.dim() == 4 for t in given)


def called(fn: Fn, kind: str, what: str, *given: Tensor) -> Any:
    """`fn(*given)` with tensors; what it raises becomes one line that begins with `what` and names it."""
    try:
        return fn(*given)
    except Exception as error:  # a user's function may raise anything; `from` keeps all of it
        compiled = refusal(fn, kind) if _plain(*given) else None
        why = "" if compiled is None else f"it {compiled}, and with tensors "
        raise OptionError(
            f"{what} {named(fn)} cannot run: {why}it raised {type(error).__name__}: {_first_line(error)}"
        ) from error


@dataclass(frozen=True, eq=False)
class Score:
    """A function of the score, batch, head, query and key, applied to every score after the cap and before the bias.

    A result of −inf makes the key absent, as a bias of −inf does.
    """

    fn: Fn

    def check(self, problem: Problem, caller: str, values: bool) -> None:
        """Raise unless the function can be called on this problem; a few entries are asked for at once."""
        if not callable(self.fn):
            raise KizukiTypeError(
                f"{caller}: score is a {type(self.fn).__name__} but must be a function fn(score, b, h, i, j) of the "
                "score, batch, head, query and key"
            )
        if any(t.requires_grad for t in tensors(self.fn)):
            raise OptionError(
                f"{caller}: score uses a tensor that requires a gradient, which cannot reach it; add it with bias=, "
                "or detach it"
            )
        if not values or not math.prod(problem.shape):
            return
        rows, cols = slice(0, min(2, problem.queries)), slice(0, min(2, problem.keys))
        shape = (problem.batch, problem.heads, rows.stop, cols.stop)
        some = torch.zeros(shape, dtype=problem.accumulate_dtype, device=problem.device)
        self.apply(some, places(problem, rows, cols), caller)

    def stamp(self) -> Hashable | None:
        return stamp(self.fn, "score")

    def apply(
        self, scores: Tensor, at: tuple[Tensor, Tensor, Tensor, Tensor], caller: str = "kizuki.attend"
    ) -> Tensor:
        """The new scores `[batch, heads, rows, cols]` in the dtype of the old; `at` as `places` gives it."""
        return self._run(scores, at, caller, sloped=False)[0]

    def bend(
        self, scores: Tensor, at: tuple[Tensor, Tensor, Tensor, Tensor], caller: str = "kizuki.attend"
    ) -> tuple[Tensor, Tensor]:
        """The new scores, and d new / d old; 0 where the new score is infinite or NaN.

        By compiled code the derivative is a central difference in float64, off by about 1e-10 of the score's
        scale where the function is smooth; by torch it is torch's own.
        """
        made, slope = self._run(scores, at, caller, sloped=True)
        return made, torch.zeros_like(made) if slope is None else slope

    def _run(
        self, scores: Tensor, at: tuple[Tensor, Tensor, Tensor, Tensor], caller: str, sloped: bool
    ) -> tuple[Tensor, Tensor | None]:
        from .problem import in_dtype

        if _plain(scores, *at):
            from .cpu import custom

            try:
                made, slope = custom.score(survey(self.fn, "score"), scores, at, sloped)
                return in_dtype(made, scores.dtype), None if slope is None else slope.to(scores.dtype)
            except Unfit:  # then it is called with tensors
                pass
        with torch.enable_grad():
            leaf = scores.detach().requires_grad_(sloped)
            given = called(self.fn, "score", f"{caller}: score", leaf, *at)
            made = self._checked(given, leaf, caller)
            slope = None
            if sloped and made.requires_grad:
                (slope,) = torch.autograd.grad(made.sum(), leaf, allow_unused=True)
        made = made.detach()
        if slope is not None:
            slope = torch.where(made.isfinite() & slope.isfinite(), slope, 0.0)
        return in_dtype(made, scores.dtype), slope

    def _checked(self, made: Any, scores: Tensor, caller: str) -> Tensor:
        if not isinstance(made, Tensor):
            if isinstance(made, bool) or not isinstance(made, (int, float)):
                raise KizukiTypeError(
                    f"{caller}: score returned a {type(made).__name__} but must return the new score, a number"
                )
            made = torch.full_like(scores, made)
        if made.dtype is torch.bool or made.dtype.is_complex:
            raise KizukiTypeError(
                f"{caller}: score returned {made.dtype} but must return the new score; a boolean mask goes into "
                "mask=kizuki.masks.where(fn)"
            )
        if made.requires_grad and not scores.requires_grad:
            raise OptionError(
                f"{caller}: score uses a tensor that requires a gradient, which cannot reach it; add it with bias=, "
                "or detach it"
            )
        if made.dim() > scores.dim() or any(
            n not in (1, m) for n, m in zip(reversed(made.shape), reversed(scores.shape), strict=False)
        ):
            raise ShapeError(
                f"{caller}: score returned shape {show(made)} but must broadcast to {list(scores.shape)}; use its "
                "arguments score, b, h, i, j elementwise"
            )
        return made.to(scores.dtype if made.dtype.is_floating_point else torch.float64).expand(scores.shape)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:160]


def described(problem: Problem) -> str:
    """How the user's functions of a problem run, for `A.plan()`; empty where there are none."""
    from .mask import functions_of

    parts = []
    asked = [("masks.where", "mask", fn) for fn in functions_of(problem.mask)]
    if problem.score is not None:
        asked.append(("score", "score", problem.score.fn))
    for what, kind, fn in asked:
        why = f"tensors on {problem.device}" if problem.device.type != "cpu" else refusal(fn, kind)
        if why is None:
            parts.append(f"{what} {named(fn)} compiled")
        else:
            parts.append(f"{what} {named(fn)} in torch: {'it ' if problem.device.type == 'cpu' else ''}{why}")
    return "; ".join(parts)
