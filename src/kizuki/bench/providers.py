"""Who can compute a cell: a provider is given its tensors, and returns ways to compute it or says why not."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import OptionError
from .cells import DOCUMENT, WINDOW, Cell

INSTALL = "not installed: pip install kizuki[bench]"


class CannotDo(Exception):
    """A provider cannot compute a cell; the text says why."""


class Missing(Exception):
    """A provider's package is not installed."""


def need(module: str) -> Any:
    """Import an optional module, or raise Missing with what to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise
        raise Missing(INSTALL) from None


@dataclass
class Data:
    """A cell's tensors: query `[batch, heads, queries, head_dim]`, key and value `[batch, kv_heads, keys, head_dim]`.

    `grad` is the output's gradient, `mask` a dense boolean `[queries, keys]`, `bias` `[1, heads, queries, keys]`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor | None = None
    mask: Tensor | None = None
    bias: Tensor | None = None


def make_data(cell: Cell) -> Data:
    """The tensors of a cell, from a seed; contiguous."""
    generator = torch.Generator().manual_seed(2017)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(cell.torch_dtype)

    data = Data(
        normal(cell.batch, cell.heads, cell.queries, cell.head_dim),
        normal(cell.batch, cell.kv_heads, cell.keys, cell.head_dim),
        normal(cell.batch, cell.kv_heads, cell.keys, cell.head_dim),
    )
    if cell.backward:
        data.grad = normal(*data.query.shape)
    if cell.rule == "dense":
        data.mask = torch.rand(cell.queries, cell.keys, generator=generator) < 0.5
        data.mask[:, 0] = True  # no row is empty: what peers make of such rows differs
    if cell.rule == "bias":
        data.bias = normal(1, cell.heads, cell.queries, cell.keys)
    return data


@dataclass
class Way:
    """One way to compute a cell. `call` is what is timed; `results` gives the last call's output (and gradients)."""

    call: Callable[[], Any]
    results: Callable[[], tuple[Tensor, ...]]
    note: str = ""
    keep: list[Any] = field(default_factory=list)  # memory that is shared with a peer and must outlive it


class Provider(Protocol):
    """A library that computes attention."""

    name: str

    def version(self) -> str | None:
        """Its version, or None where it is not installed. Imports nothing."""

    def ways(self, cell: Cell, data: Data, threads: int) -> list[Way]:
        """Ways to compute the cell, the fastest of which counts. Raises CannotDo or Missing."""


def installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def torch_way(
    cell: Cell, data: Data, function: Callable[[Tensor, Tensor, Tensor], Tensor], note: str = ""
) -> Way:
    """A way from a function of torch tensors: under no_grad, or with the gradients of query, key and value."""
    last: list[tuple[Tensor, ...]] = []
    if not cell.backward:

        def forward() -> None:
            with torch.no_grad():
                last[:] = [(function(data.query, data.key, data.value),)]

        return Way(forward, lambda: last[0], note)
    operands = [t.detach().clone().requires_grad_() for t in (data.query, data.key, data.value)]

    def both() -> None:
        output = function(*operands)
        last[:] = [(output.detach(), *torch.autograd.grad(output, operands, data.grad))]

    return Way(both, lambda: last[0], note)


class Kizuki:
    """This package."""

    name = "kizuki"

    def version(self) -> str | None:
        from .. import __version__

        return __version__

    def ways(self, cell: Cell, data: Data, threads: int) -> list[Way]:
        from .. import attend, attention, masks

        options: dict[str, Any] = {"causal": True} if cell.causal else {}
        if cell.rule == "window":
            options["window"] = WINDOW
        elif cell.rule == "documents":
            options["mask"] = masks.documents([DOCUMENT] * (cell.keys // DOCUMENT))
        elif cell.rule == "lengths":
            options["mask"] = masks.lengths(query=cell.real_lengths(), key=cell.real_lengths())
        elif cell.rule == "dense":
            options["mask"] = data.mask
        elif cell.rule == "bias":
            options["bias"] = data.bias
        plan = attend(data.query, data.key, **options).plan()
        return [
            torch_way(
                cell, data, lambda q, k, v: attention(q, k, v, **options), f"{plan.backend}: {plan.kernel}"
            )
        ]


def extra_mask(cell: Cell, data: Data) -> Tensor | None:
    """What a peer without rules is given for this cell's mask: a dense boolean or a bias. Causal is not in it."""
    if cell.rule == "dense":
        return data.mask
    if cell.rule == "bias":
        return data.bias
    if cell.rule is None:
        return None
    mask = cell.dense_mask()
    if mask is None:
        size = cell.queries * cell.keys / 1e6
        raise CannotDo(
            f"has no rule for this mask, and as a tensor it would have {size:,.0f} million entries"
        )
    return mask


def grouped_as_queries(cell: Cell, data: Data) -> Tensor:
    """One query a head: the heads that share a key head, seen as that head's queries. The same numbers, no copy."""
    group = cell.heads // cell.kv_heads
    return data.query.view(cell.batch, cell.kv_heads, group, cell.head_dim)


class TorchSdpa:
    """`torch.nn.functional.scaled_dot_product_attention`."""

    name = "torch-sdpa"

    def version(self) -> str | None:
        return torch.__version__

    def ways(self, cell: Cell, data: Data, threads: int) -> list[Way]:
        mask = extra_mask(cell, data)
        grouped = cell.kv_heads != cell.heads

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=cell.causal, enable_gqa=grouped
            )

        found = [torch_way(cell, data, call, "enable_gqa" if grouped else "")]
        if grouped and cell.queries == 1:
            few = grouped_as_queries(cell, data)
            shape = data.query.shape
            found.append(
                torch_way(
                    cell,
                    data,
                    lambda q, k, v: F.scaled_dot_product_attention(few, k, v).view(shape),
                    "a group's heads as queries of one head",
                )
            )
        return found


class TorchEager:
    """Two matrix products and a softmax, the whole matrix of weights in memory."""

    name = "torch-eager"

    def version(self) -> str | None:
        return torch.__version__

    def ways(self, cell: Cell, data: Data, threads: int) -> list[Way]:
        size = cell.batch * cell.heads * cell.queries * cell.keys * torch.finfo(cell.torch_dtype).bits // 8
        if size * 3 > memory() / 2:
            raise CannotDo(f"its weights would take {size / 1e9:.1f} GB, and as much again for the scores")
        added = extra_mask(cell, data)
        if cell.causal:
            added = torch.ones(cell.queries, cell.keys, dtype=torch.bool).tril()
        hidden = ~added if added is not None and added.dtype is torch.bool else None
        query = data.query
        if cell.kv_heads != cell.heads:
            if cell.queries != 1:
                raise CannotDo("would have to repeat the key heads")
            query = grouped_as_queries(cell, data)
        scale = cell.head_dim**-0.5

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2) * scale
            if hidden is not None:
                scores = scores.masked_fill(hidden, -torch.inf)
            elif added is not None:
                scores = scores + added
            return (scores.softmax(-1) @ v).view(data.query.shape)

        if query is data.query:
            return [torch_way(cell, data, call)]
        return [
            torch_way(cell, data, lambda q, k, v: call(query, k, v), "a group's heads as queries of one head")
        ]


def memory() -> int:
    """Bytes of memory in this machine."""
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 8 << 30


def all_providers() -> dict[str, Provider]:
    """Every provider by name, kizuki first."""
    from . import peers

    every: tuple[Provider, ...] = (
        Kizuki(),
        TorchSdpa(),
        TorchEager(),
        peers.OnnxRuntime(),
        peers.OpenVino(),
        peers.Jax(),
    )
    return {provider.name: provider for provider in every}


def choose(listed: str | None) -> list[Provider]:
    """The providers of a comma-separated list; None means all. Raises OptionError for an unknown name."""
    every = all_providers()
    if listed is None:
        return list(every.values())
    names = [name.strip() for name in listed.split(",") if name.strip()]
    for name in names:
        if name not in every:
            raise OptionError(f"kizuki bench: --only has {name!r}; choose from {', '.join(every)}")
    if not names:
        raise OptionError(f"kizuki bench: --only names nobody; choose from {', '.join(every)}")
    return [provider for name, provider in every.items() if name in names]
