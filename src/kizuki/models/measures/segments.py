"""How much each part of a prompt reads of each other part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..recording import Recording
from ..rule import RecordError
from .reader import Reader, check

REST = "rest"


@dataclass(frozen=True, eq=False)
class Segments:
    """Segment → segment tables of every head.

    Attributes:
        names: the segments, in the given order; "rest" at the end where tokens are in none of them.
        mass: float64 `[batch, layers, heads, segments, segments]`: of what the rows of one segment read, the share that
            falls on the keys of another, the mean over its rows. A line sums to 1, but for what sinks take, and is 0
            for a segment whose rows see nothing.
        control: the same for equal weights on the keys each row sees: a long segment gets much by its length.
        layers, heads: which ones they are.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> found = kizuki.models.measures.segments(recording, {"question": (0, 3)})
        >>> found.names, found.mass.shape  # [batch, layers, heads, segments, segments]
        (('question', 'rest'), torch.Size([1, 3, 2, 2, 2]))
    """

    names: tuple[str, ...]
    mass: Tensor
    control: Tensor
    layers: tuple[Any, ...]
    heads: tuple[int, ...]

    def of(self, reading: str, read: str) -> tuple[Tensor, Tensor]:
        """How much of what `reading` reads is `read`: value and control, each `[batch, layers, heads]`."""
        from kizuki import OptionError

        for name in (reading, read):
            if name not in self.names:
                raise OptionError(
                    f"Segments.of: there is no segment {name!r}; there are {', '.join(self.names)}"
                )
        i, j = self.names.index(reading), self.names.index(read)
        return self.mass[..., i, j], self.control[..., i, j]


def segments(recording: Recording, parts: Mapping[str, tuple[int, int]]) -> Segments:
    """Segment → segment tables: `mean over rows i of segment s of Σ_{j in segment t} a_ij`.

    Args:
        recording: a pass over the whole text.
        parts: name → `(start, stop)`, token positions, stop exclusive: {"system": (0, 21), "documents": (21, 900),
            "question": (900, 931), "answer": (931, 1000)}. They may leave tokens out, which make "rest", and must not
            overlap.

    Returns `Segments`.

    Raises OptionError for segments that overlap, are empty or lie outside the text; RecordError for layers that do not
    read the text itself (cross-attention, a cache).

    Cost: of each layer one product with a one-hot matrix of the segments.

    Example:
        >>> import kizuki, torch, transformers
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> table = kizuki.models.measures.segments(recording, {"question": (0, 3), "answer": (3, 5)})
        >>> value, control = table.of("answer", "question")
        >>> value.shape, control[0, 0, 0]
        (torch.Size([1, 3, 2]), tensor(0.6750, dtype=torch.float64))
    """
    check(recording, "measures.segments")
    masses, controls = [], []
    names: tuple[str, ...] = ()
    heads: tuple[int, ...] = ()
    for layer in recording:
        reader = Reader(recording, layer)
        if reader.queries != reader.keys:
            raise RecordError(
                f"measures.segments: layer {layer!r} has {reader.queries} queries and {reader.keys} keys; record the "
                "self-attention of one pass over the whole text"
            )
        names, groups = _groups(parts, reader.keys, reader.A.device)
        heads = reader.heads
        masses.append(_table(reader, reader.wide, groups, len(names)))
        controls.append(_table(reader, reader.uniform, groups, len(names)).expand_as(masses[-1]))
    return Segments(names, torch.stack(masses, 1), torch.stack(controls, 1), tuple(recording.layers), heads)


def _table(reader: Reader, matrix: Any, groups: Tensor, count: int) -> Tensor:
    """`[batch, heads, segments, segments]`, means over the rows that count."""
    if bool(reader.live.all()):
        return matrix.mass(groups, rows=groups).to(torch.float64)
    # Padding differs from text to text of a batch, so that the rows of a segment do too.
    rows = matrix.mass(groups).to(torch.float64)
    own = (
        torch.nn.functional.one_hot(groups, count).to(torch.float64) * reader.live[..., None]
    )  # [batch, rows, s]
    return own.mT[:, None] @ rows / own.sum(1).clamp(min=1)[:, None, :, None]


def _groups(parts: Mapping[str, tuple[int, int]], length: int, device: Any) -> tuple[tuple[str, ...], Tensor]:
    """The names, and the segment of each token."""
    from kizuki import OptionError

    if not isinstance(parts, Mapping) or not parts:
        raise OptionError(
            f"measures.segments: parts is {parts!r:.60} but must be a mapping of names to (start, stop), at least one"
        )
    groups = torch.full((length,), -1, dtype=torch.int64, device=device)
    names = list(parts)
    for number, (name, place) in enumerate(parts.items()):
        try:
            start, stop = place
        except (TypeError, ValueError):
            raise OptionError(
                f"measures.segments: {name} is {place!r:.60} but must be (start, stop), token positions"
            ) from None
        whole = all(isinstance(n, int) and not isinstance(n, bool) for n in (start, stop))
        if not whole or not 0 <= start < stop <= length:
            raise OptionError(
                f"measures.segments: {name} is ({start!r}, {stop!r}) but must have 0 <= start < stop <= {length}"
            )
        taken = groups[start:stop]
        if bool((taken >= 0).any()):
            other = names[int(taken.max())]
            raise OptionError(f"measures.segments: {name} ({start}, {stop}) overlaps {other} {parts[other]}")
        groups[start:stop] = number
    if bool((groups < 0).any()):
        if REST in parts:
            raise OptionError(
                'measures.segments: "rest" is the name of the tokens in no segment, and there are some; name it anew'
            )
        groups[groups < 0] = len(names)
        names.append(REST)
    return tuple(names), groups
