"""A lesson's material from a live model: one recorded pass, and what its own modules did around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from . import formula
from .material import LIMIT, Floats, LessonError, Material, Projection, build

if TYPE_CHECKING:
    from kizuki import AttentionMatrix
    from kizuki.models import Recording, Source
    from kizuki.models.sources import Progress

# A head of SmolLM2 that looks from a pronoun or a verb back to its noun, as the articles' examples do.
CHOSEN = {"smollm2": (13, 8)}
# Where a family keeps its four matrices: q, k, v in the attention module, W_O there or in the module above it.
PLACES = (
    ("q_proj", "k_proj", "v_proj", "o_proj"),
    ("q_proj", "k_proj", "v_proj", "out_proj"),
    ("query", "key", "value", "^output.dense"),
    ("q_lin", "k_lin", "v_lin", "out_lin"),
)


def gather(
    source: Source,
    text: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    word: str | int | None = None,
    progress: Progress | None = None,
) -> Material:
    """Run a model on a sentence once, and keep what the eight steps need of one layer.

    Args:
        source: what `kizuki.models.load` returned.
        text: the sentence; at most 64 tokens, for every row of every step is shown.
        layer, head: counted from 0. None: of smollm2 layer 13, head 8, which looks from a word back to its noun; of
            another model the middle layer, and the head there that reads most of words other than the first and
            its own.
        word: the token to follow, its text or its number; None: the one that reads another most.
        progress: called as `progress(stage, done, total)`.

    Returns:
        A `Material`.

    Raises:
        LessonError: a text too long, a layer, head or word that is not there, or a layer that changes its scores in
            a way the eight steps do not have (softcap, sinks, a bias).
        TextError, RecordError (both ValueError): as `kizuki.models.run`.

    Time and memory: one forward pass, and that layer's matrices.

    Example:
        >>> from kizuki.models import load
        >>> from kizuki.lesson import gather
        >>> lesson = gather(load("minilm"), "The dog slept.", layer=2, head=5)
        >>> lesson.labels[1:4], lesson.weights().shape
        (['The', 'dog', 'slept'], (6, 6))
    """
    return record(source, text, layer=layer, head=head, word=word, progress=progress)[0]


def record(
    source: Source,
    text: str,
    *,
    layer: int | None = None,
    head: int | None = None,
    word: str | int | None = None,
    progress: Progress | None = None,
) -> tuple[Material, Recording]:
    """`gather`, and the recording of its layer."""
    from kizuki.models import run
    from kizuki.models.layers import find

    tokens = source.tokenize(text)
    if len(tokens) > LIMIT:
        raise LessonError(
            f"the text has {len(tokens):,} tokens and a lesson shows at most {LIMIT}; give one sentence, or look "
            "at all of it with kizuki look"
        )
    found = {layer: place for layer, place in find(source.model).found.items() if isinstance(layer, int)}
    known = sorted(found)
    if not known:
        raise LessonError(
            f"model {source.name} has several stacks of layers, and a lesson walks through one; choose a model of one"
        )
    chosen = CHOSEN.get(source.name, (known[len(known) // 2], None))
    if layer is None:
        layer = chosen[0]
        head = chosen[1] if head is None else head
    if layer not in found:
        raise LessonError(f"layer is {layer} but the model's layers are {known[0]} … {known[-1]}")
    path, module = found[layer]
    with watched(source.model, path, module) as around:
        done = run(source, tokens, layers=[layer], k=0, progress=progress)
    made = from_recording(done.recording, layer, head=head, word=word)
    made = replace(made, origin=source.origin, layers=len(known))
    projection, why = around.projection(made)
    return replace(made, projection=projection, why=why), done.recording


def from_recording(
    recording: Recording, layer: int | str, *, head: int | None = None, word: str | int | None = None
) -> Material:
    """The material that a recording alone holds: q, k, v and the mask, and nothing before or after them.

    >>> import kizuki
    >>> from importlib.resources import files
    >>> recording = kizuki.open(files("kizuki") / "lesson/example/recording.safetensors")
    >>> from kizuki.lesson import from_recording
    >>> lesson = from_recording(recording, 13, head=8, word="it")
    >>> lesson.labels[lesson.word], lesson.projection is None
    (' it', True)
    """
    tokens = recording.tokens
    if tokens is None:
        raise LessonError("the recording holds no tokens; set recording.tokens before recording.save")
    if not isinstance(layer, int):
        raise LessonError(
            f"layer {layer!r} is one of several stacks, and a lesson walks through one; choose a number"
        )
    matrix = recording[layer]
    query, key, value = (numbers(t[0]) for t in (matrix.query, matrix.key, recording.value(layer)))
    made = build(
        text=tokens.text,
        labels=list(tokens.labels),
        ids=list(tokens.ids),
        model=recording.model_name,
        layer=layer,
        layers=len(recording.layers),
        query=query,
        key=key,
        value=value,
        scale=matrix.scale,
        own=plain(matrix),
        head=head,
        word=word,
        special=tokens.special,
    )
    read = matrix[0].to(torch.float64).cpu().numpy()
    return replace(made, gap=max(float(np.abs(made.weights(h) - read[h]).max()) for h in range(made.heads)))


def plain(matrix: AttentionMatrix) -> formula.Seen:
    """Which keys each query sees; LessonError where the scores are not scale · q·k and a range of keys."""
    problem = matrix.problem
    extras = {
        "caps them (softcap)": problem.softcap,
        "adds sinks to the softmax": problem.sinks,
        "adds a bias to them": problem.bias,
        "changes them with a function": problem.score,
    }
    for does, it in extras.items():
        if it is not None:
            raise LessonError(
                f"this layer {does}, which the lesson's eight steps do not have; choose another model, or see A.steps"
            )
    if matrix.shape[0] != 1 or matrix.shape[-1] != matrix.shape[-2]:
        raise LessonError(
            f"the recording holds {list(matrix.shape)}; a lesson is one text, [1, heads, n, n]; record one pass"
        )
    ranges = matrix.visible_range()
    if ranges is None:
        raise LessonError("this layer's mask is not one range of keys for each query; choose another layer")
    first, stop = (end.expand(1, matrix.shape[1], matrix.shape[2])[0, 0].cpu().numpy() for end in ranges)
    place = np.arange(matrix.shape[3])
    seen: formula.Seen = (place >= first[:, None]) & (place < stop[:, None])
    return seen


def numbers(tensor: Tensor) -> Floats:
    """A tensor as float32 (float16 and bfloat16 widen without loss; float64 is refused)."""
    if tensor.dtype is torch.float64:
        raise LessonError("the model runs in float64 and the lesson holds float32; load it in float32")
    made: Floats = tensor.detach().to(torch.float32).cpu().contiguous().numpy()
    return made


@dataclass(eq=False)
class Around:
    """What the modules around one attention layer were given, and their matrices."""

    parts: list[nn.Linear] | None
    x: Tensor | None = None  # [1, n, width]
    turn: Any = None  # (cos, sin), each [1, n, head_dim]
    attention: Tensor | None = None
    residual: Tensor | None = None

    def projection(self, made: Material) -> tuple[Projection | None, str]:
        """The matrices of the material's head, if they give its q, k and v; else the key of the words that say why."""
        if self.parts is None:
            return None, "closed_fused"
        if self.x is None or self.attention is None or self.residual is None:
            return None, "closed_unseen"
        wq, wk, wv, wo = (numbers(part.weight) for part in self.parts)
        bq, bk, bv, bo = (None if part.bias is None else numbers(part.bias) for part in self.parts)
        d, dv = made.head_dim, made.value.shape[2]
        group = made.head // (made.heads // made.kv_heads)
        own, shared = slice(made.head * d, (made.head + 1) * d), slice(group * d, (group + 1) * d)
        sizes = (wq.shape[0], wk.shape[0], wv.shape[0], wo.shape[1])
        if sizes != (made.heads * d, made.kv_heads * d, made.kv_heads * dv, made.heads * dv):
            return None, "closed_fused"
        values, ends = slice(group * dv, (group + 1) * dv), slice(made.head * dv, (made.head + 1) * dv)
        outputs = [made.output(h) for h in range(made.heads)]
        shares = [z @ wo[:, h * dv : (h + 1) * dv].T.astype(np.float64) for h, z in enumerate(outputs)]
        projection = Projection(
            x=numbers(self.x[0]),
            wq=wq[own].copy(),
            wk=wk[shared].copy(),
            wv=wv[values].copy(),
            wo=wo[:, ends].copy(),
            bq=None if bq is None else bq[own].copy(),
            bk=None if bk is None else bk[shared].copy(),
            bv=None if bv is None else bv[values].copy(),
            cos=None if self.turn is None else numbers(self.turn[0][0]),
            sin=None if self.turn is None else numbers(self.turn[1][0]),
            attention=numbers(self.attention[0]),
            residual=numbers(self.residual[0]),
            shares=np.stack([formula.norm(share) for share in shares]).astype(np.float32),
        )
        total = np.sum(shares, 0) + (0 if bo is None else bo)
        # A model may do more on the way (normalise q and k, turn a part of them): then nothing is opened.
        pairs = [(projection.rotated("q"), made.q()), (projection.rotated("k"), made.k())]
        pairs += [(projection.raw("v"), made.v()), (total, projection.attention.astype(np.float64))]
        if not all(a.shape == b.shape and close(a, b) for a, b in pairs):
            return None, "closed_other"
        return projection, ""


def close(mine: formula.Array, theirs: Any) -> bool:
    """Whether two ways to the same numbers differ by rounding only: √ε of the largest (float32's ε)."""
    unit = float(np.sqrt(np.finfo(np.float32).eps)) * max(float(np.abs(theirs).max()), 1e-30)
    return bool(np.abs(mine - theirs).max() <= unit)


@contextmanager
def watched(model: nn.Module, path: str, module: nn.Module) -> Iterator[Around]:
    """Watch one attention layer's neighbours during a pass; their computation is left alone."""
    above = model.get_submodule(path.rpartition(".")[0])
    parts = next(
        (each for names in PLACES if (each := _parts(module, above, names)) is not None),
        None,
    )
    around = Around(parts)
    handles: list[Any] = []

    def given(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        around.turn = kwargs.get("position_embeddings")

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        around.residual = (args[0] if args else kwargs["hidden_states"]).detach().clone()

    def entering(_: nn.Module, args: tuple[Any, ...]) -> None:
        around.x = args[0].detach().clone()

    def left(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        around.attention = output.detach().clone()

    if parts is not None:
        handles = [
            module.register_forward_pre_hook(given, with_kwargs=True),
            above.register_forward_pre_hook(before, with_kwargs=True),
            parts[0].register_forward_pre_hook(entering),
            parts[3].register_forward_hook(left),
        ]
    try:
        yield around
    finally:
        for handle in handles:
            handle.remove()


def _parts(module: nn.Module, above: nn.Module, names: tuple[str, ...]) -> list[nn.Linear] | None:
    """The four linear maps under these names, `^` for the module above; None unless all are there."""
    found: list[nn.Linear] = []
    for name in names:
        base, name = (above, name[1:]) if name.startswith("^") else (module, name)
        try:
            part = base.get_submodule(name)
        except AttributeError:
            return None
        if not isinstance(part, nn.Linear):
            return None
        found.append(part)
    return found
