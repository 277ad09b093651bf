"""What a page is made of: a run's readings, layer by layer, and the words about where they came from.

Everything comes from `recording[layer]`, an `AttentionMatrix` of one text. Readings are streamed; no
array here grows as queries × keys.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from .budget import LayerSize, Plan

if TYPE_CHECKING:
    from kizuki import AttentionMatrix, Observation, Verified
    from kizuki.models import Run

Floats = NDArray[np.float32]

MEANS = ("entropy", "effective", "max", "distance", "other_distance", "first_key", "previous")
VERIFIED = 4  # rows of a layer that are computed again in float64


class PageError(ValueError):
    """A page cannot be made of this run, or cannot be written there; the message is one line."""


@dataclass(frozen=True)
class Layer:
    """One layer's readings, heads first."""

    layer: int
    reason: dict[str, str] | None  # why the page cannot recompute it, by language; None where it can
    ranges: bytes | None  # first and stop of every query, int32, one after the other
    dim: int
    scale: float
    softcap: float | None
    sinks: list[float] | None
    rows: dict[str, Floats]  # [heads, queries]
    received: Floats  # [heads, keys]
    picture: Floats  # [heads, rows, cols]
    top: tuple[Floats, NDArray[np.int64]] | None  # weights and keys, [heads, queries, k]
    lse: Floats  # [heads, queries]
    means: dict[str, list[float | None]]
    verified: Verified


def why_not_drawn(matrix: AttentionMatrix) -> dict[str, str] | None:
    """Why the page cannot recompute this matrix from q, k and L; None where it can."""
    problem = matrix.problem
    if problem.bias is not None:
        return {"en": "a bias is added to its scores", "ja": "スコアにバイアスが加えられているため"}
    if problem.score is not None:
        return {"en": "a function changes its scores", "ja": "スコアが関数で変えられているため"}
    if matrix.dtype is torch.float64:
        return {
            "en": "it was recorded in float64, and the page holds float32",
            "ja": "float64 で記録されており、ページは float32 を扱うため",
        }
    if matrix.visible_range() is None:
        return {
            "en": "its mask is not one range of keys for each query",
            "ja": "マスクが、クエリごとに連続したキーの範囲ではないため",
        }
    return None


def size_of(layer: int, matrix: AttentionMatrix, tokens: int) -> LayerSize:
    """The lengths of a layer; raises `PageError` unless it is one text, read in one pass."""
    if len(matrix.shape) != 4 or matrix.shape[0] != 1:
        raise PageError(
            f"run: layer {layer} holds {list(matrix.shape)}; a page shows one text, [1, heads, queries, keys]"
        )
    _, heads, queries, keys = matrix.shape
    if not queries == keys == tokens:
        raise PageError(
            f"run: layer {layer} holds {queries} queries and {keys} keys for {tokens} tokens; record one forward pass"
        )
    drawable = why_not_drawn(matrix) is None
    return LayerSize(layer, heads, matrix.problem.kv_heads, queries, keys, matrix.problem.head_dim, drawable)


def read_layer(layer: int, matrix: AttentionMatrix, plan: Plan) -> Layer:
    """All readings of one layer that the plan keeps, and its proofs. Five passes over Q Kᵀ; memory of the readings."""
    from kizuki import Observe

    problem = matrix.problem
    reason = why_not_drawn(matrix)
    rule = None if reason is not None else matrix.visible_range()
    _, heads, queries, keys = matrix.shape
    full = layer in plan.full
    k = 0 if full else min(plan.top, keys)
    side = min(plan.side, queries), min(plan.side, keys)
    seen = matrix.observe(Observe(topk=max(1, k), entropy=True, received=True, distance=True, pool=side))
    weights, places = asked(seen.topk)
    statistics = statistics_of(matrix, rule, seen)
    means = means_of(statistics)
    return Layer(
        layer=layer,
        reason=reason,
        ranges=None if rule is None else ranges_of(rule, heads, queries),
        dim=problem.head_dim,
        scale=matrix.scale,
        softcap=problem.softcap,
        sinks=None if problem.sinks is None else [float(s) for s in problem.sinks],
        rows={name: floats(values) for name, values in statistics.items() if full or name in plan.rows},
        received=floats(asked(seen.received)[0]),
        picture=floats(asked(seen.pool)[0]),
        top=(floats(weights[0]), places[0].cpu().numpy()) if k > 0 else None,
        lse=floats(matrix.lse[0]),
        means=means,
        verified=matrix.verify(rows=VERIFIED, cells=4 * VERIFIED),
    )


def statistics_of(
    matrix: AttentionMatrix, rule: tuple[torch.Tensor, torch.Tensor] | None, seen: Observation
) -> dict[str, torch.Tensor]:
    """What every row measures (ROWS of budget.py), `[heads, queries]`; `seen` holds top-k, entropy and distance."""
    return {
        "entropy": asked(seen.entropy)[0],
        "max": asked(seen.topk)[0][0, :, :, 0],
        "distance": asked(seen.distance)[0],
        "other_distance": distance_without_first(matrix),
        "first_key": matrix[0, :, :, 0] if rule is None else _near(matrix, rule, None),
        "previous": _previous(matrix) if rule is None else _near(matrix, rule, -1),
    }


def means_of(statistics: dict[str, torch.Tensor]) -> dict[str, list[float | None]]:
    """The mean of each measure over the queries, for each head; None where it is nowhere defined."""
    means = {name: _means(values) for name, values in statistics.items()}
    means["effective"] = _means(statistics["entropy"].exp())
    return means


T = TypeVar("T")


def asked(reading: T | None) -> T:
    """A reading that was asked for, and is therefore there."""
    if reading is None:
        raise PageError("run: a reading that was asked for is missing; report this as a fault of kizuki")
    return reading


def distance_without_first(matrix: AttentionMatrix) -> torch.Tensor:
    """Distance of the same attention with key 0 hidden, so that the other weights sum to 1; NaN where none is left."""
    from kizuki import attend, masks

    problem = matrix.problem
    others = masks.keys(torch.arange(problem.keys, device=matrix.device) > 0)
    rest = attend(
        matrix.query,
        matrix.key,
        mask=others if problem.mask is None else problem.mask & others,
        bias=problem.bias,
        scale=matrix.scale,
        softcap=problem.softcap,
        score=None if problem.score is None else problem.score.fn,
        backend=matrix.plan().backend,
    )
    distance: torch.Tensor = rest.distance()[0].masked_fill(rest.lse[0] == -math.inf, math.nan)
    return distance


def floats(values: torch.Tensor) -> Floats:
    array: Floats = values.to(torch.float32).cpu().numpy()
    return np.ascontiguousarray(array)


def exact(values: torch.Tensor) -> Floats:
    """Recorded numbers as little-endian float32; float16 and bfloat16 widen without loss."""
    array: Floats = values.to(torch.float32).cpu().contiguous().numpy().astype("<f4", copy=False)
    return array


def _means(values: torch.Tensor) -> list[float | None]:
    """Mean over the queries where it is defined, for each head; None where it is nowhere."""
    return [None if math.isnan(mean) else mean for mean in values.to(torch.float64).nanmean(-1).tolist()]


def ranges_of(rule: tuple[torch.Tensor, torch.Tensor], heads: int, queries: int) -> bytes:
    """The visible ranges as bytes; every rule that transformers has is the same for all heads."""
    first, stop = (end.expand(1, heads, queries)[0] for end in rule)
    if not (bool((first == first[:1]).all()) and bool((stop == stop[:1]).all())):
        raise PageError("run: the mask differs from head to head; the page holds one mask a layer")
    both = torch.stack((first[0], stop[0])).to(torch.int32).cpu().numpy()
    return both.astype("<i4").tobytes()


def _near(matrix: AttentionMatrix, rule: tuple[torch.Tensor, torch.Tensor], step: int | None) -> torch.Tensor:
    """Weight of every query on the first key (`step` None) or on its neighbour, [heads, queries], from q, k and L."""
    problem = matrix.problem
    query = matrix.query[0].to(torch.float32)  # [heads, queries, head_dim]
    key = matrix.key[0].to(torch.float32).repeat_interleave(problem.heads // problem.kv_heads, 0)
    return near(query, key, matrix.lse[0], (rule[0][0], rule[1][0]), matrix.scale, problem.softcap, step)


def near(
    query: torch.Tensor,
    key: torch.Tensor,
    lse: torch.Tensor,
    rule: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    softcap: float | None,
    step: int | None,
) -> torch.Tensor:
    """Weight of every query on the first key (`step` None) or on its neighbour `step` away, `[heads, queries]`.

    `query` and `key` are `[heads, tokens, head_dim]`, `lse` L, `rule` first and stop of the visible keys. One product a
    query. Not defined (NaN) where there is no such key, 0 where it is not visible.
    """
    tokens = query.shape[-2]  # as many keys as queries: size_of saw to it
    own = torch.arange(tokens, device=query.device)
    place = torch.zeros_like(own) if step is None else own + step
    there = (place >= 0) & (place < tokens)
    place = place.clamp(0, tokens - 1)
    score = scale * (query * key[:, place]).sum(-1)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    seen = (place >= rule[0]) & (place < rule[1])
    weight = torch.where(seen, torch.exp(score - lse), 0.0)
    return torch.where(there, weight, math.nan)


def _previous(matrix: AttentionMatrix) -> torch.Tensor:
    """The same, for a matrix that only its own indexing can read."""
    count = matrix.shape[-2]
    own = torch.arange(1, count, device=matrix.device)
    weight = matrix[0, :, own, own - 1]
    return torch.cat((weight.new_full((weight.shape[0], 1), math.nan), weight), -1)


def bound_of(ranges: bytes | None, queries: int, keys: int) -> float:
    """The mean of ln(visible keys) over the queries: what the mean entropy of a head cannot exceed."""
    if ranges is None:
        return math.log(keys)
    first, stop = np.frombuffer(ranges, "<i4").reshape(2, queries)
    return float(np.log(np.maximum(stop - first, 1)).mean())


def controls_of(ranges: bytes, queries: int) -> dict[str, float | None]:
    """What each of MEANS is for equal weights on the keys that each query sees: the number to compare a head's with.

    The shape of a mask alone gives high ones: under a causal mask equal weights put ln(n)/n on the first key.
    """
    first, stop = np.frombuffer(ranges, "<i4").reshape(2, queries).astype(np.int64)
    own = np.arange(queries)
    count = np.maximum(stop - first, 0)
    share = np.where(count > 0, 1 / np.maximum(count, 1), 0.0)

    def apart(low: NDArray[np.int64]) -> float | None:
        """The mean distance to the keys of low … stop, over the rows that see one."""
        some = stop > low
        before = _steps(own - low) - _steps(own - stop)  # of the keys up to the own one
        behind = _steps(stop - 1 - own) - _steps(low - 1 - own)
        return _mean((before + behind)[some] / (stop - low)[some])

    def seen(place: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.where((place >= first) & (place < stop), share, 0.0)

    return {
        "entropy": _mean(np.log(np.maximum(count, 1))),
        "effective": _mean(np.maximum(count, 1.0)),
        "max": _mean(share),
        "distance": apart(first),
        "other_distance": apart(np.maximum(first, 1)),
        "first_key": _mean(seen(np.zeros_like(own))),
        "previous": _mean(seen(own - 1)[1:]),
    }


def _steps(most: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 + 1 + … + most; 0 where that is below 0."""
    most = np.maximum(most, 0)
    total: NDArray[np.int64] = most * (most + 1) // 2
    return total


def _mean(values: NDArray[np.float64]) -> float | None:
    return float(f"{values.mean():.9g}") if len(values) else None


def tokens_of(run: Run) -> dict[str, Any]:
    """Tokens as the page shows them: each character of the text once, whatever pieces it was cut into.

    Labels, the text before a token and its chip are named, by number, where they are not the usual: the token's own
    text, nothing, and none.
    """
    tokens = run.tokens
    text, special, offsets = tokens.text, tokens.special, tokens.offsets
    texts: list[str] = []
    labels, gaps, chips = {}, {}, {}
    covered = 0
    last = len(offsets) - 1
    for i, ((start, stop), label) in enumerate(zip(offsets, tokens.labels, strict=True)):
        if special[i]:
            chips[i] = "special"
        elif start < covered or (i < last and not special[i + 1] and offsets[i + 1][0] < stop):
            chips[i] = "piece"
        if start > covered:
            gaps[i] = text[covered:start]
        own = text[max(start, covered) : stop]
        texts.append(own)
        if label != own:
            labels[i] = label
        covered = max(covered, stop)
    return {"texts": texts, "labels": labels, "gaps": gaps, "chips": chips, "tail": text[covered:]}


def meta_of(
    run: Run,
    layers: Sequence[int],
    matrices: Mapping[int, AttentionMatrix],
    missing: list[dict[str, Any]],
    sizes: Sequence[LayerSize],
) -> dict[str, Any]:
    """What every carrier's page is told first: the model, the tokens, the heads, and how they were recorded.

    Of `layers` only those in `sizes` need to be open. Words and predictions, which the first picture does without, are
    told by `words_of` and `predictions_of`.
    """
    count = len(run.tokens.ids)
    return {
        "version": 1,
        "model": run.recording.model_name,
        "has_head": (
            run.predictions is not None
            or bool(run.note)
            or run.source is None  # a file does not say; its predictions are not in it either way
            or run.source.kind == "decoder"
        ),
        "note": run.note,
        "missing": missing,
        "queries": count,
        "keys": count,
        "tokens": tokens_of(run),
        "predictions": run.predictions is not None,
        "heads": list(run.recording.heads or range(sizes[0].heads)),
        "kv_of": [slot * sizes[0].kv_heads // sizes[0].heads for slot in range(sizes[0].heads)],
        "provenance": list(provenance(run, layers, [size.layer for size in sizes], matrices[sizes[0].layer])),
    }


def numbers_of(run: Run) -> list[int]:
    """The layers of a run; raises unless they have numbers."""
    numbers = []
    for layer in run.recording.layers:
        if not isinstance(layer, int):
            raise PageError(
                f"run: its layers have names ({layer}) but a page shows one stack, by number; record a part of it"
            )
        numbers.append(layer)
    return numbers


def matrices_of(run: Run) -> tuple[dict[int, AttentionMatrix], list[dict[str, Any]]]:
    """A of every layer, and why there is none of the others; raises when there is none at all."""
    from kizuki.models import RecordError

    matrices: dict[int, AttentionMatrix] = {}
    missing: list[dict[str, Any]] = []
    for layer in numbers_of(run):
        try:
            matrices[layer] = run.recording[layer]
        except RecordError as error:
            missing.append({"layer": layer, "reason": str(error)})
    if not matrices:
        why = missing[0]["reason"] if missing else "record at least one"
        raise PageError(f"run: its recording holds no layer; {why}")
    return matrices, missing


def check_shared(
    heads: Sequence[int],
    layers: Mapping[int, Any],
    other_heads: Sequence[int],
    other_layers: Mapping[int, Any],
) -> None:
    """Raise `PageError` where two inputs have no head in common that could be compared."""
    if not (layers.keys() & other_layers.keys() and set(heads) & set(other_heads)):
        raise PageError(
            f"other: holds layers {spans(list(other_layers))} and heads {spans(other_heads)}, none of which are here "
            f"({spans(list(layers))} and {spans(heads)}); record the same ones"
        )


def sizes_of(run: Run, matrices: Mapping[int, AttentionMatrix]) -> list[LayerSize]:
    """The lengths of every layer; raises `PageError` unless they are of one text and alike."""
    count = len(run.tokens.ids)
    sizes = [size_of(layer, matrix, count) for layer, matrix in matrices.items()]
    for size in sizes[1:]:
        if (why := unlike(size, sizes[0])) is not None:
            raise PageError(why)
    return sizes


def unlike(size: LayerSize, first: LayerSize) -> str | None:
    """Why two layers cannot stand on one page; None where they can."""
    if (size.heads, size.kv_heads) == (first.heads, first.kv_heads):
        return None
    return (
        f"run: layer {size.layer} has {size.heads} heads on {size.kv_heads} but layer {first.layer} has "
        f"{first.heads} on {first.kv_heads}; look at layers that are alike (--layers)"
    )


def words_of(run: Run) -> dict[str, Any] | None:
    """The words that people write, each by its first token and its label; None where every token is one."""
    from kizuki.models import Tokens, join

    tokens = run.tokens
    whole = Tokens(tokens.text, tokens.ids, tokens.offsets, tokens.labels, tokens.special)
    words = join(whole, "word")
    if len(words) == len(whole):
        return None
    return {"starts": words.starts, "labels": words.labels}


def predictions_of(run: Run) -> dict[str, Any] | None:
    """Next tokens with each name once: names, ids, and for every token its choices and their probabilities."""
    if run.predictions is None:
        return None
    number: dict[int, int] = {}
    names: list[str] = []
    choices, probabilities = [], []
    for position in run.predictions:
        line = []
        for token, label, _ in position:
            if token not in number:
                number[token] = len(names)
                names.append(label)
            line.append(number[token])
        choices.append(line)
        probabilities.append([float(f"{p:.7g}") for _, _, p in position])
    return {"names": names, "ids": list(number), "choices": choices, "probabilities": probabilities}


def provenance(
    run: Run, held: Sequence[int], opened: Sequence[int], matrix: AttentionMatrix
) -> Iterator[dict[str, str]]:
    """How the run was made, in both languages; the mask's rule is that of the layers `opened` so far."""

    def fact(en: str, ja: str, value: object) -> dict[str, str]:
        return {"en": en, "ja": ja, "value": str(value)}

    recording = run.recording
    _, heads, queries, _ = matrix.shape
    rules = list(dict.fromkeys(recording.rule(layer) for layer in recording.layers if layer in opened))
    yield fact("Model", "モデル", recording.model_name)
    # of a local folder only its name: a page is made to be passed on
    origin = "" if run.source is None else run.source.origin
    origin = Path(origin).name if Path(origin).is_absolute() else origin
    if origin:
        yield fact("From", "入手元", origin)
    yield fact("Tokens", "トークン数", queries)
    yield fact("Layers recorded", "記録した層", spans(held))
    yield fact("Heads, key heads", "ヘッド数、キーのヘッド数", f"{heads}, {matrix.problem.kv_heads}")
    of = "" if len(opened) == len(held) else f" ({spans(opened)})"
    yield fact("Mask rule", "マスクの規則", "; ".join(rules) + of)
    yield fact("Recorded as", "記録の型", f"{str(matrix.dtype).removeprefix('torch.')}, {matrix.device}")
    yield fact("Scale", "scale", f"{matrix.scale:.9g}")
    yield fact("Readings by", "読み取り", matrix.plan())
    if "forward" in run.seconds:
        yield fact("Forward pass", "順伝播", f"{run.seconds['forward']:.2f} s")
    if recording.versions is not None:
        with_what = " · ".join(f"{name} {version}" for name, version in recording.versions.items())
        yield fact("Recorded with", "記録時のバージョン", with_what)
    versions = " · ".join(
        f"{name} {metadata.version(name)}"
        for name in ("kizuki", "torch", "transformers", "numpy")
        if _installed(name)
    )
    yield fact("Versions", "バージョン", f"{versions} · Python {platform.python_version()}")
    yield fact("Made", "作成", f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC")


SYMBOLS = {
    "sampled rows sum to 1 less the sink's share": "Σⱼ aᵢⱼ = 1",
    "received sums to what the rows hold": "Σᵢⱼ aᵢⱼ",
    "top 8 against full rows": "top 8",
    "pooled mass against its children": "pool",
    "sampled cells against float64": "float64",
}


def checked(layers: Sequence[Layer]) -> dict[str, str]:
    """What `A.verify` found in every layer: how many hold, and the largest error of each check."""
    held = sum(layer.verified.ok for layer in layers)
    worst: dict[str, float] = {}
    for layer in layers:
        for check in layer.verified.checks:
            worst[check.what] = max(worst.get(check.what, 0.0), check.error)
    errors = " · ".join(f"{SYMBOLS[what]} ±{error:.1g}" for what, error in worst.items())
    mark = "✓" if held == len(layers) else "✗"
    return {
        "en": "Layers checked by A.verify()",
        "ja": "A.verify() で検算した層",
        "value": f"{held}/{len(layers)} {mark} {errors}",
    }


def spans(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0–2, 5"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(
        f"{part[0]}–{part[-1]}" if len(part) > 2 else ", ".join(map(str, part)) for part in parts
    )


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
