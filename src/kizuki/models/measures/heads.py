"""Where each head reads on the whole: the token before, the first key, how many keys, how far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..recording import Recording
from .reader import Measure, Reader, measured

if TYPE_CHECKING:
    from kizuki import AttentionMatrix

UNIFORM = "equal weights on the keys each row sees"


def previous(recording: Recording) -> Measure:
    """The weight on the token before: mean over rows of `a_{i,i−1}`.

    Args:
        recording: what `kizuki.record` or `kizuki.open` gave. Rows that do not see the token before (the first, those
            behind padding or at the start of a document) and padding rows are left out.

    Returns:
        A `Measure`, 0 … 1; the control is the same mean for equal weights on the keys each row sees.

    Cost: one pair a row, and the lse.

    Example:
        >>> import kizuki, torch, transformers
        >>> from kizuki.models import measures
        >>> config = transformers.GPT2Config(vocab_size=11, n_positions=16, n_embd=12, n_layer=3, n_head=2)
        >>> model = transformers.GPT2LMHeadModel(config).eval()
        >>> with kizuki.record(model) as recording:
        ...     _ = model(torch.tensor([[3, 1, 4, 1, 5]]))
        >>> measures.previous(recording).value.shape                 # [batch, layers, heads]
        torch.Size([1, 3, 2])
    """
    return measured(recording, read_previous, "previous", unit="of each row", against=UNIFORM)


def read_previous(reader: Reader) -> tuple[Tensor, Tensor]:
    share = reader.pairs(-1, flat=True)
    counted = reader.live & (share > 0).any(1)
    return reader.mean(reader.pairs(-1), counted), reader.mean(share, counted)


def first_key(recording: Recording) -> Measure:
    """The weight on the first key: mean over rows of `a_{i,0}`; behind padding on the left, the first real key.

    Returns:
        A `Measure`, 0 … 1; the control is the same mean for equal weights on the keys each row sees: under a causal
        mask ln(n)/n and not 1/n, for the first rows see little else.

    Cost: one product with a one-hot column.

    Source: Xiao et al. 2023 (attention sinks), section 3.1.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> (layer, head, value, control), *_ = kizuki.models.measures.first_key(recording).top()
        >>> layer, value > control
        (13, True)
    """
    return measured(recording, read_first_key, "first_key", unit="of each row", against=UNIFORM)


def read_first_key(reader: Reader) -> tuple[Tensor, Tensor]:
    return reader.mean(reader.on_first), reader.mean(reader.column(reader.uniform, reader.first))


@dataclass(frozen=True, eq=False)
class SinkRate:
    """How many heads read mostly the first key.

    Attributes:
        rate, control: the share of all heads, float64 `[batch]`; the control counts equal weights likewise.
        by_layer: the share in each layer, float64 `[batch, layers]`.
        threshold: from which mean weight on the first key a head is counted.
        mass: the `first_key` measure they come from.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> found = kizuki.models.measures.sink_rate(recording)
        >>> found.threshold, found.by_layer.shape == (1, 1), bool(found.rate == found.by_layer[0, 0])
        (0.3, True, True)
    """

    rate: Tensor
    control: Tensor
    by_layer: Tensor
    threshold: float
    mass: Measure


def sink_rate(recording: Recording, threshold: float = 0.3) -> SinkRate:
    """The share of heads whose mean weight on the first key is above a threshold.

    Args:
        recording: what `kizuki.record` or `kizuki.open` gave.
        threshold: 0 … 1. Short texts exceed 0.3 with equal weights already: see `control`.

    Raises OptionError for a threshold that is no share.

    Source: Gu et al. 2024 (When attention sink emerges), section 3, with ε = 0.3.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> found = kizuki.models.measures.sink_rate(recording, threshold=0.5)
        >>> float(found.control)  # equal weights put 0.24 on the first of 13 tokens: no head of theirs would be counted
        0.0
    """
    from kizuki import OptionError

    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold <= 1:
        raise OptionError(f"measures.sink_rate: threshold is {threshold!r} but must be a number 0 … 1")
    mass = first_key(recording)
    above = (mass.value > threshold).to(torch.float64)
    control = (mass.control > threshold).to(torch.float64).mean((1, 2))
    return SinkRate(above.mean((1, 2)), control, above.mean(2), float(threshold), mass)


def entropy(recording: Recording) -> Measure:
    """How spread each head is: mean over rows of `−Σ_j a_ij ln a_ij`.

    Returns:
        A `Measure` in nats; the control is the bound, the mean of `ln n_i` for the n_i keys row i sees.

    Cost: one pass over A.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> spread = kizuki.models.measures.entropy(recording)
        >>> spread.unit, bool((spread.value < spread.control).all())
        ('nats', True)
    """
    return measured(recording, read_entropy, "entropy", unit="nats", against="ln of the keys each row sees")


def read_entropy(reader: Reader) -> tuple[Tensor, Tensor]:
    return reader.mean(reader.entropy), reader.mean(reader.uniform.lse)


def effective_keys(recording: Recording) -> Measure:
    """Over how many keys each head spreads: mean over rows of `e^entropy`, 1 … n_i.

    Returns:
        A `Measure` in keys; the control is the mean number of keys a row sees.

    Cost: one pass over A.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> found = kizuki.models.measures.effective_keys(recording)
        >>> found.unit, float(found.control[0, 0, 0])  # 13 rows see 1 … 13 keys
        ('keys', 7.0...)
    """
    return measured(
        recording, read_effective, "effective_keys", unit="keys", against="the keys each row sees"
    )


def read_effective(reader: Reader) -> tuple[Tensor, Tensor]:
    spread, seen = (x.to(torch.float64).exp() for x in (reader.entropy, reader.uniform.lse))
    return reader.mean(spread), reader.mean(seen)


def distance(recording: Recording) -> Measure:
    """How far each head reads: mean over rows of `Σ_j a_ij · |i − j|`.

    A first key that soaks up weight inflates it: read it beside `distance_rest`.

    Returns:
        A `Measure` in tokens; the control is the same mean for equal weights on the keys each row sees.

    Cost: one pass over A.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> found = kizuki.models.measures.distance(recording)
        >>> found.unit, float(found.control[0, 0, 0])  # the mean of 0, 1/2, …, 12/2
        ('tokens', 3.0...)
    """
    return measured(recording, read_distance, "distance", unit="tokens", against=UNIFORM)


def read_distance(reader: Reader) -> tuple[Tensor, Tensor]:
    return reader.mean(reader.distance), reader.mean(reader.uniform.distance())


def distance_rest(recording: Recording) -> Measure:
    """How far each head reads apart from the first key: `Σ_i Σ_{j≠0} a_ij · |i − j| / Σ_i Σ_{j≠0} a_ij`.

    One quotient of sums and not a mean of quotients: a row that reads hardly anything but the first key says little
    about the rest, and weighs as little. With sinks (gpt-oss) what they take is in neither sum.

    Returns:
        A `Measure` in tokens; the control is the same for equal weights on the keys each row sees. NaN for a text of
        one token.

    Cost: one pass over A, and one product with a one-hot column.

    Example:
        >>> import kizuki
        >>> from importlib.resources import files
        >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
        >>> found = kizuki.models.measures.distance_rest(recording)
        >>> found.unit, found.value.shape  # [batch, layers, heads]
        ('tokens', torch.Size([1, 1, 9]))
    """
    return measured(recording, read_distance_rest, "distance_rest", unit="tokens", against=UNIFORM)


def read_distance_rest(reader: Reader) -> tuple[Tensor, Tensor]:
    own = _rest(reader, reader.A, reader.distance, reader.capture.sinks)
    return own, _rest(reader, reader.uniform, reader.uniform.distance(), None)


def _rest(reader: Reader, matrix: AttentionMatrix, distance: Tensor, sinks: Tensor | None) -> Tensor:
    on_first = reader.on_first if matrix is reader.A else reader.column(matrix, reader.first)
    on_first = on_first.to(torch.float64)
    far = (reader.own - reader.first[:, None]).abs()[:, None]
    beyond = distance.to(torch.float64) - on_first * far
    left = 1 - on_first
    if sinks is not None:  # a row sums to what its sink leaves
        left = left - (sinks[:, None] - matrix.lse).to(torch.float64).exp()
    # Both are differences: what rounding leaves of a head that reads the first key alone is no distance.
    over, under = reader.mean(beyond.clamp(min=0)), reader.mean(left)
    return torch.where(under > 1e-6, over / under, torch.nan)
