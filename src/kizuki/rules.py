"""A mask as a short text, numbers and tensors, and back: what `torch.library` operators and transforms can carry.

The text is the rule in postfix order, one word a step; numbers and tensors are read in the same order:
`masks.causal() & masks.window(3, None)` is `"causal window:l and"` with the number 3. Nothing is expanded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from .errors import OptionError
from .mask import Align, And, Causal, Dense, Documents, Keys, Lengths, Mask, Not, Or, Packed, Where, Window

if TYPE_CHECKING:
    from .problem import Problem

Keep = Callable[[Callable[..., Any]], int]  # gives a function the number that stands for it


@dataclass(frozen=True)
class Rule:
    """One mask: `text` in postfix order, and the numbers and tensors its words read."""

    text: str
    numbers: tuple[int, ...]
    tensors: tuple[Tensor, ...]


def encode(mask: Mask | None, keep: Keep) -> Rule:
    """`mask` written down; `keep` is asked for a number for each function of `masks.where`."""
    words: list[str] = []
    numbers: list[int] = []
    tensors: list[Tensor] = []
    if mask is not None:
        _write(mask, keep, words, numbers, tensors)
    return Rule(" ".join(words), tuple(numbers), tuple(tensors))


def _write(mask: Mask, keep: Keep, words: list[str], numbers: list[int], tensors: list[Tensor]) -> None:
    if isinstance(mask, (And, Or)):
        _write(mask.left, keep, words, numbers, tensors)
        _write(mask.right, keep, words, numbers, tensors)
        words.append("and" if isinstance(mask, And) else "or")
    elif isinstance(mask, Not):
        _write(mask.inner, keep, words, numbers, tensors)
        words.append("not")
    elif isinstance(mask, Causal):
        words.append("causal" + _align(mask.align))
    elif isinstance(mask, Window):
        sides = ""
        for letter, n in (("l", mask.left), ("r", mask.right)):
            if n is not None:
                sides += letter
                numbers.append(n)
        words.append("window:" + sides + _align(mask.align))
    elif isinstance(mask, Documents):
        words.append("documents")
        tensors.extend((mask.ids, mask.key_ids))
    elif isinstance(mask, Packed):
        words.append(f"packed:{mask.given}" + (":ids" if mask.by_ids else ""))
        tensors.extend((mask.offsets, mask.keys))
    elif isinstance(mask, Keys):
        words.append("keys")
        tensors.append(mask.seen)
    elif isinstance(mask, Lengths):
        sides = ""
        for letter, given in (("q", mask.query), ("k", mask.key)):
            if given is not None:
                sides += letter
                tensors.append(given)
        words.append("lengths:" + sides)
    elif isinstance(mask, Dense):
        words.append("dense")
        tensors.append(mask.tensor)
    elif isinstance(mask, Where):
        words.append("where")
        numbers.append(keep(mask.fn))
    else:
        raise OptionError(
            f"kizuki.attention: mask is a {type(mask).__name__}, which has no written form and cannot be traced; "
            "build it from the functions of kizuki.masks"
        )


def _align(align: Align | None) -> str:
    return "" if align is None else ":" + align


def decode(
    text: str, numbers: Sequence[int], tensors: Sequence[Tensor], find: Callable[[int], Callable[..., Any]]
) -> Mask | None:
    """The mask that `encode` wrote; `find` gives back the function a number stands for."""
    stack: list[Mask] = []
    number, tensor = iter(numbers), iter(tensors)
    for word in text.split():
        name, _, rest = word.partition(":")
        if name in ("and", "or"):
            right, left = stack.pop(), stack.pop()
            stack.append(And(left, right) if name == "and" else Or(left, right))
        elif name == "not":
            stack.append(Not(stack.pop()))
        elif name == "causal":
            stack.append(Causal(cast("Align | None", rest or None)))
        elif name == "window":
            sides, _, align = rest.partition(":")
            left_side = next(number) if "l" in sides else None
            right_side = next(number) if "r" in sides else None
            stack.append(Window(left_side, right_side, cast("Align | None", align or None)))
        elif name == "documents":
            stack.append(Documents(next(tensor), next(tensor)))
        elif name == "packed":
            given, _, by_ids = rest.partition(":")
            stack.append(Packed(given, next(tensor), next(tensor), bool(by_ids)))
        elif name == "keys":
            stack.append(Keys(next(tensor)))
        elif name == "lengths":
            query = next(tensor) if "q" in rest else None
            stack.append(Lengths(query, next(tensor) if "k" in rest else None))
        elif name == "dense":
            stack.append(Dense(next(tensor)))
        elif name == "where":
            stack.append(Where(find(next(number))))
        else:
            raise OptionError(
                f"kizuki::attention: rule holds the word {word!r}, which no mask is written with"
            )
    return stack.pop() if stack else None


@lru_cache(maxsize=256)
def for_copies(fn: Callable[..., Any], batch: int, score: bool = False) -> Callable[..., Any]:
    """`fn` of a mask, or of a score, for copies of the problem in front of its batch.

    It goes on seeing the batch index it was written for. The same wrapper for the same function: a graph keeps it.
    """
    if score:
        return lambda s, b, h, i, j: fn(s, b % batch, h, i, j)
    return lambda b, h, i, j: fn(b % batch, h, i, j)


def spread(
    rule: Rule, tensors: Sequence[Tensor], dims: Sequence[int | None], count: int, problem: Problem
) -> tuple[tuple[Tensor, ...], Callable[[Callable[..., Any]], Callable[..., Any]]]:
    """The `tensors` of `rule` for `count` copies of the problem stacked in front of its batch, as `vmap` asks.

    `dims` says where each tensor holds the copies (None: the same for all). Also returns how to wrap a function
    of `masks.where`, which must go on seeing the batch index it was written for.
    """
    made: list[Tensor] = []
    places = zip(tensors, dims, strict=True)
    for word in rule.text.split():
        name, _, rest = word.partition(":")
        many = {"documents": 2, "packed": 2, "keys": 1, "dense": 1, "lengths": len(rest)}.get(name, 0)
        for _ in range(many):
            tensor, dim = next(places)
            tensor = tensor.unsqueeze(0) if dim is None else tensor.movedim(dim, 0)
            if name == "dense":
                made.append(in_front(tensor, len(problem.lead) + 3))
            else:
                length = () if name == "lengths" else tensor.shape[-1:]
                flat = tensor.reshape(tensor.shape[0], -1, *length)
                if name == "lengths" and not flat.shape[1]:
                    made.append(flat.reshape(-1))  # lengths of no batch entries
                    continue
                full = flat.expand(count, problem.batch, *length)
                made.append(full.reshape(count * problem.batch, *length))
    batch = max(1, problem.batch)

    return tuple(made), lambda fn: for_copies(fn, batch)


def in_front(tensor: Tensor, rank: int) -> Tensor:
    """`[copies, *rest]` with axes of length 1 put between, so that `rest` has `rank` axes."""
    return tensor.reshape(tensor.shape[0], *(1,) * (rank + 1 - tensor.dim()), *tensor.shape[1:])


def replace_tensors(mask: Mask, tensors: Sequence[Tensor], wrap: Callable[..., Any] | None = None) -> Mask:
    """The same rule over other tensors, and over wrapped functions."""
    functions: list[Callable[..., Any]] = []

    def keep(fn: Callable[..., Any]) -> int:
        functions.append(fn if wrap is None else wrap(fn))
        return len(functions) - 1

    rule = encode(mask, keep)
    return cast(Mask, decode(rule.text, rule.numbers, tensors, functions.__getitem__))


def leaves(mask: Mask | None) -> tuple[Tensor, ...]:
    """Every tensor the rule reads, private copies too, in the order `encode` writes them."""
    return () if mask is None else encode(mask, lambda fn: 0).tensors


__all__ = [
    "Rule",
    "decode",
    "encode",
    "for_copies",
    "in_front",
    "leaves",
    "replace_tensors",
    "spread",
]
