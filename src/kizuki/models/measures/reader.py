"""What every measure is made with: one layer of a recording, its A, the same with other scores, its mean over rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..recording import Recording
from ..rule import RecordError

if TYPE_CHECKING:
    from kizuki import AttentionMatrix
    from kizuki.masks import Mask


@dataclass(frozen=True, eq=False)
class Measure:
    """One number a head, beside its control.

    Attributes:
        name: what is measured.
        value, control: float64 `[batch, layers, heads]`; NaN where no row could be measured.
        against: what the control is, in words.
        unit: of both.
        layers, heads: which ones they are, in the order of the axes.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> found = kizuki.models.measures.previous(recording)
        >>> found.name, found.layers, found.value.shape == found.control.shape == (1, 1, 9)
        ('previous', (13,), True)
    """

    name: str
    value: Tensor
    control: Tensor
    against: str
    unit: str
    layers: tuple[Any, ...]
    heads: tuple[int, ...]

    def top(self, k: int = 10) -> list[tuple[Any, int, float, float]]:
        """The k heads farthest above their control, `(layer, head, value, control)`, means over the batch."""
        value, control = self.value.nanmean(0), self.control.nanmean(0)
        order = (value - control).flatten().nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        width = len(self.heads)
        return [
            (
                self.layers[at // width],
                self.heads[at % width],
                float(value.flatten()[at]),
                float(control.flatten()[at]),
            )
            for at in order[:k].tolist()
        ]

    def __repr__(self) -> str:
        batch, layers, heads = self.value.shape
        return (
            f"Measure({self.name}, {batch} × {layers} layers × {heads} heads: mean {self.value.nanmean():.4g} "
            f"{self.unit}, control {self.control.nanmean():.4g} ({self.against}))"
        )


class Reader:
    """One layer of a recording as the measures read it."""

    def __init__(self, recording: Recording, layer: Any) -> None:
        self.layer = layer
        self.A, self.rule = recording._matrix(layer)
        self.capture = recording._captures[layer]
        self.value = recording.value(layer)
        self.batch, self.head_count, self.queries, self.keys = self.A.shape
        self.heads = recording.heads or tuple(range(self.head_count))

    @cached_property
    def own(self) -> Tensor:
        """The queries' own positions among the keys, `[queries]`: the last query stands at the last key."""
        return torch.arange(self.queries, device=self.A.device) + max(0, self.keys - self.queries)

    @cached_property
    def live(self) -> Tensor:
        """Which rows count, bool `[batch, queries]`: those that see a key and are not padding themselves."""
        seen = self.uniform.lse[:, 0] > -torch.inf
        if self.rule.keys is not None:
            seen = seen & self.rule.keys.expand(self.batch, -1)[:, self.own.clamp(max=self.keys - 1)]
        return seen

    @cached_property
    def first(self) -> Tensor:
        """The first key that is not padding, `[batch]`."""
        if self.rule.keys is None:
            return torch.zeros(self.batch, dtype=torch.int64, device=self.A.device)
        return self.rule.keys.expand(self.batch, -1).to(torch.uint8).argmax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """`A.entropy()`, once for all the measures that need it."""
        return self.A.entropy()

    @cached_property
    def distance(self) -> Tensor:
        """`A.distance()`, likewise."""
        return self.A.distance()

    @cached_property
    def on_first(self) -> Tensor:
        """The weights on the first key, `[batch, heads, queries]`, likewise."""
        return self.column(self.wide, self.first)

    @cached_property
    def on_own(self) -> Tensor:
        """The weight of each row on its own key, `[batch, heads, queries]`, likewise."""
        return self.pairs(0)

    @cached_property
    def uniform(self) -> AttentionMatrix:
        """Equal weights on the keys that A sees, `[batch, 1, queries, keys]`: its lse is ln of their number.

        Where a bias makes keys absent in some heads only, it has all heads.
        """
        return self.with_scores(flat=True)

    @cached_property
    def wide(self) -> AttentionMatrix:
        """A in the dtype it accumulates in, so that what is multiplied with it is not rounded to 16 bits."""
        return self.A if self.A.dtype in (torch.float32, torch.float64) else self.with_scores(sinks=True)

    def with_scores(
        self,
        *,
        flat: bool = False,
        also: Mask | None = None,
        bias: Tensor | None = None,
        sinks: bool = False,
    ) -> AttentionMatrix:
        """A again, in the dtype it accumulates in, without the layer's sinks unless they are asked for.

        `flat`: with equal scores; `also`: seen through one more mask; `bias`: added to the scores.
        """
        from kizuki import attend

        dtype = torch.float64 if self.A.dtype is torch.float64 else torch.float32
        query, key = self.A.query.to(dtype), self.A.key.to(dtype)
        own: Tensor | None = getattr(self.capture, "bias", None)
        if own is not None:
            own = own[..., : self.keys].to(dtype)
        if flat:
            query = query.new_zeros(self.batch, 1, self.queries, 1)
            key = key.new_zeros(self.batch, 1, self.keys, 1)
            if own is not None:  # of a bias, equal scores keep which keys it makes absent
                absent = own == -torch.inf
                if bool((absent == absent[..., :1, :, :]).all()):
                    absent = absent[..., :1, :, :]
                else:
                    query = query.expand(-1, self.head_count, -1, -1)
                own = torch.zeros_like(own[..., : absent.shape[-3], :, :]).masked_fill(absent, -torch.inf)
        if bias is not None:
            own = bias if own is None else own + bias
        mask = self.rule.mask(self.queries)
        if also is not None:
            mask = also if mask is None else mask & also
        return attend(
            query,
            key,
            mask=mask,
            bias=own,
            scale=None if flat else self.A.scale,
            softcap=None if flat else self.capture.softcap,
            sinks=self.capture.sinks if sinks and not flat else None,
        )

    def mean(self, rows: Tensor, counted: Tensor | None = None) -> Tensor:
        """The mean of `[batch, heads, queries]` over the rows that count, float64 `[batch, heads]`; NaN of none."""
        counted = self.live if counted is None else counted
        total = torch.where(counted[:, None], rows.to(torch.float64), 0.0).sum(-1)
        return (total / counted.sum(-1, keepdim=True)).expand(-1, self.head_count)

    def column(self, matrix: AttentionMatrix, key: Tensor) -> Tensor:
        """The weights on one key a batch entry, `[batch, heads, queries]`: A times a one-hot column."""
        places = torch.arange(self.keys, device=key.device)
        return (matrix @ (places == key[:, None])[:, None, :, None].to(matrix.dtype))[..., 0]

    def pairs(self, shift: int, *, flat: bool = False) -> Tensor:
        """The weight of each row on the key `shift` from its own, `[batch, heads, queries]`; 0 where there is none.

        Seen through a mask that leaves this key alone, the lse is its score: O(n), where indexing A would normalise
        every row once more.
        """
        from kizuki import masks

        one = masks.documents(ids=self.own + shift, key_ids=torch.arange(self.keys, device=self.own.device))
        score = self.with_scores(flat=flat, also=one).lse.to(torch.float64)
        lse = (self.uniform if flat else self.wide).lse.to(torch.float64)
        return torch.where(score > -torch.inf, (score - lse).exp(), torch.where(score.isnan(), score, 0.0))


Layered = Callable[[Reader], tuple[Tensor, Tensor]]  # value and control, each [batch, heads]


def measured(
    recording: Recording,
    read: Layered,
    name: str,
    *,
    unit: str,
    against: str,
    readers: Iterable[Reader] | None = None,
) -> Measure:
    """`read` of every recorded layer as one Measure."""
    check(recording, f"measures.{name}")
    values, controls = [], []
    for reader in readers or (Reader(recording, layer) for layer in recording):
        value, control = read(reader)
        values.append(value)
        controls.append(control)
    heads = same_heads(recording, f"measures.{name}")
    return Measure(
        name, torch.stack(values, 1), torch.stack(controls, 1), against, unit, tuple(recording.layers), heads
    )


def same_heads(recording: Recording, caller: str) -> tuple[int, ...]:
    """The numbers of the recorded heads; RecordError where layers have different ones, which no table holds."""
    counts = {layer: recording[layer].shape[1] for layer in recording}
    if len(set(counts.values())) != 1:
        several = ", ".join(f"{layer!r}: {count}" for layer, count in counts.items())
        raise RecordError(
            f"{caller}: layers have different numbers of heads ({several:.80}); record those that have as many"
        )
    return recording.heads or tuple(range(next(iter(counts.values()))))


def check(recording: object, caller: str) -> None:
    """Raise unless `recording` is one."""
    from kizuki import KizukiTypeError

    if not isinstance(recording, Recording):
        raise KizukiTypeError(
            f"{caller}: recording is a {type(recording).__name__} but must be a Recording; give what kizuki.record or "
            "kizuki.open gave"
        )
