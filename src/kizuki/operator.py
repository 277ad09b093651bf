"""`attend` and `AttentionMatrix`: A as a matrix that is held without being stored."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, cast

import torch
from torch import Tensor

from . import autograd, backends, functions, indexing, portable, readgrad
from .errors import KizukiTypeError, SizeError
from .leaks import Leaks, leaks
from .mask import Mask, functions_of
from .mass import Segments, mass
from .memory import told
from .observation import DENSE_LIMIT, Observation, Observe, asked, check_reading, collect
from .problem import Problem, build, check_value, widened
from .products import Linear, MeanHeads, Product, Transposed
from .statistics import READINGS, Frame, Statistic
from .steps import Steps, steps
from .verify import Verified, verify

if TYPE_CHECKING:
    pass


def attend(
    query: Tensor,
    key: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    bias: Tensor | None = None,
    scale: float | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: Callable[..., Any] | None = None,
    backend: str = "auto",
) -> AttentionMatrix:
    """The attention weights A = softmax(mask(cap(scale · Q Kᵀ) + bias)) as a matrix that is not stored.

    Arguments:
        query: `[..., heads, queries, head_dim]`, or `[queries, head_dim]`; float16, bfloat16, float32 or float64.
        key: `[..., kv_heads, keys, head_dim]`, same dtype and device; kv_heads divides heads, batch axes broadcast.
        mask: a boolean tensor that broadcasts to `[..., heads, queries, keys]`, True = visible, or a rule of
            `kizuki.masks`. None: every key is visible.
        causal: query i sees keys 0 … i; needs as many queries as keys (else `masks.causal("lower_right")`).
        window: `(left, right)`, the keys visible beyond the query's own position; None on a side = unlimited.
        bias: floating tensor that broadcasts to `[..., heads, queries, keys]`, added to the scores in natural
            units; −inf makes a key absent.
        scale: multiplies the scores; None means 1/√head_dim. A 0-dim floating tensor is read once, here, and may
            require a gradient.
        softcap: scores become cap · tanh(score / cap), before bias and mask; None is off.
        sinks: `[heads]`, one more logit a head in the denominator only.
        score: `fn(score, b, h, i, j)`, a function of each score (after the cap, before the bias) and its batch, head,
            query and key, that gives the new score; −inf makes the key absent. On CPU tensors a plain Python
            function is compiled into the kernel (numbers in, a number out; `if`, `math`, torch's elementwise
            functions and captured tensors it indexes may be used); else it is called with tensors that broadcast
            and must be elementwise. Its slope, for training, is a central difference in float64 where compiled
            (off by about 1e-10), else torch's own; a tensor it uses gets no gradient.
        backend: "auto", "cpu" (compiled, CPU tensors) or "portable" (plain torch, any device). A named
            backend runs or raises; `A.plan()` says what "auto" chose.

    Returns an `AttentionMatrix` of shape `[..., heads, queries, keys]`. Nothing is computed yet.

    Raises ShapeError, OptionError (both ValueError) or KizukiTypeError (TypeError), in one line, before anything runs.

    Cost: none now; O(queries + keys) memory whatever is read later.

    Source: Vaswani et al. 2017, section 3.2.1; tiling: Dao et al. 2022 (FlashAttention), section 3.1.

        >>> import torch, kizuki
        >>> q = torch.tensor([[1.0, 0.0]])
        >>> k = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> kizuki.attend(q, k, scale=1.0)[0]
        tensor([0.7311, 0.2689])
    """
    return make(
        "kizuki.attend",
        query,
        key,
        mask=mask,
        causal=causal,
        window=window,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        score=score,
        backend=backend,
    )


def make(
    caller: str, query: Tensor, key: Tensor, *, backend: str = "auto", **options: Any
) -> AttentionMatrix:
    """`attend` for another public function, which its errors name as `caller`."""
    # Inside vmap and its like some numbers cannot be read; they are checked where they can.
    values = not torch._C._are_functorch_transforms_active()
    problem = build(query, key, caller=caller, values=values, **options)
    return AttentionMatrix(problem, backends.choose(problem, backend, caller))


class Options(TypedDict, total=False):
    """The options `attend` and `attention` share, for type checkers; `attend` says what they mean."""

    mask: Mask | Tensor | None
    causal: bool
    window: tuple[int | None, int | None] | None
    bias: Tensor | None
    scale: float | Tensor | None
    softcap: float | None
    sinks: Tensor | None
    score: Callable[..., Any] | None
    backend: str


def check_observe(what: object, named: str) -> None:
    """Raise unless `what` says which readings are wanted."""
    if not isinstance(what, Observe):
        raise KizukiTypeError(
            f"{named} is a {type(what).__name__} but must be kizuki.Observe(...); name the readings there"
        )


class AttentionMatrix(Linear):
    """A = softmax(scores): one row per query, one column per key, read without being stored.

    Made by `attend`. Every reading is exact and streamed: extra memory grows with queries and keys, never
    with their product. `A @ value`, `A.T @ y`, `lse`, `entropy` and `mass` carry gradients, the others do not.

    >>> import torch, kizuki
    >>> q, k, v = torch.randn(3, 2, 100, 16).unbind(0)  # [heads, length, head_dim]
    >>> A = kizuki.attend(q, k, causal=True)
    >>> A
    AttentionMatrix([2, 100, 100], float32, cpu, backend=cpu)
    >>> (A @ v).shape, A[1, 99].shape, A.topk(8)[1].shape
    (torch.Size([2, 100, 16]), torch.Size([100]), torch.Size([2, 100, 8]))
    """

    def __init__(self, problem: Problem, backend: backends.Backend) -> None:
        self.problem = problem
        self.backend = backend
        self._lse: Tensor | None = None
        self._stamp: Hashable | None = None

    # -- what it is ------------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """`[..., heads, queries, keys]`."""
        return torch.Size(self.problem.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of query and key; weights are read in float32 (float64 for float64)."""
        return self.problem.dtype

    @property
    def device(self) -> torch.device:
        return self.problem.device

    @property
    def query(self) -> Tensor:
        """The query it was made from."""
        return self.problem.query

    @property
    def key(self) -> Tensor:
        """The key it was made from."""
        return self.problem.key

    @property
    def scale(self) -> float:
        """What multiplies the scores."""
        return self.problem.scale

    @property
    def T(self) -> Transposed:
        """Aᵀ: `A.T @ y` is what each key receives.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A.T @ torch.ones(4, 1)  # what each key gives: its column's sum
        tensor([[2.0833],
                [1.0833],
                [0.5833],
                [0.2500]])
        """
        return Transposed(self)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"AttentionMatrix({list(self.shape)}, {kind}, {self.device}, backend={self.backend.name})"

    def plan(self) -> backends.Plan:
        """Which kernel runs, and why; prints as one line.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A.plan().backend
        'cpu'
        """
        plan, problem = self.backend.plan(self.problem), self.problem
        own = functions.described(problem)
        if own:
            plan = replace(plan, why=f"{plan.why}; {own}")
        return plan

    def visible_range(self) -> tuple[Tensor, Tensor] | None:
        """`(first, stop)`: each query sees exactly the keys first <= j < stop.

        int64, broadcastable to `[batch, heads, queries]`. None when the mask is not known to be such a range
        from its rules alone, when a bias holds −inf, or with a score function. O(queries + keys), and one read of
        the bias.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> first, stop = A.visible_range()
        >>> stop.flatten().tolist()
        [1, 2, 3, 4]
        """
        problem = self.problem
        if problem.score is not None:
            return None
        if problem.bias is not None and bool((problem.bias == portable.NEG_INF).any()):
            return None
        if problem.mask is None:
            first = torch.zeros(1, 1, problem.queries, dtype=torch.int64, device=self.device)
            return first, first + problem.keys
        if problem.bounds is None or problem.residual is not None:
            return None
        return problem.bounds.first, problem.bounds.stop

    # -- as a linear map -------------------------------------------------------------------------

    def mean_heads(self) -> MeanHeads:
        """The mean over heads as a linear map, `[..., queries, keys]`, itself not stored.

        >>> import torch, kizuki
        >>> x = torch.zeros(2, 4, 2)  # two heads
        >>> kizuki.attend(x, x).mean_heads() @ torch.ones(4, 1)
        tensor([[1.],
                [1.],
                [1.],
                [1.]])
        """
        return MeanHeads(self)

    def __matmul__(self, other: Tensor | Linear) -> Any:
        """`A @ value`: Σ_j a_ij v_j, `[..., heads, queries, value_dim]`, the fused kernel; differentiable.

        `value` is `[..., kv_heads, keys, value_dim]` in the dtype of the query. With another matrix it is
        the product, itself not stored: `(A2 @ A1) @ x` is evaluated right to left. Sums and multiples are maps too:

        >>> import torch, kizuki
        >>> A = kizuki.attend(torch.eye(3), torch.eye(3), causal=True)
        >>> (0.5 * A + 0.5 * kizuki.Identity(3)).T @ torch.tensor([[0.0], [1.0], [0.0]])
        tensor([[0.1798],
                [0.8202],
                [0.0000]])
        """
        if isinstance(other, Linear):
            return Product(self, other)
        problem = self.problem
        check_value(problem, other)
        value, restore = widened(problem, other)
        transformed = torch._C._are_functorch_transforms_active()
        if transformed or autograd.wanted(problem, value):
            output, lse = autograd.attend(problem, value, self.backend)
        else:
            output, lse = self.backend.forward(problem, value)
        if not transformed and problem.kind is None:  # the lse of a transform does not outlive it
            self._keep(lse.detach())
        if len(problem.lead) != 1 or not problem.has_heads:  # else the axes are those the backend returns
            output = output.reshape(problem.result_shape(problem.queries, value.shape[-1]))
        return restore(output)

    # -- rows and entries ------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> Tensor:
        """The exact weights of any rows, columns or entries, with torch's indexing rules.

        Ints, slices, None-free tuples, boolean and index tensors and `...` over `[..., heads, queries, keys]`.
        Costs one read of the keys for each row touched; returns float32 (float64 for float64).
        Raises IndexError out of range, SizeError when the result is larger than `DENSE_LIMIT` weights.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A[2], A[3, 0].item()
        (tensor([0.3333, 0.3333, 0.3333, 0.0000]), 0.25)
        """
        return indexing.weights(self, index, DENSE_LIMIT)

    def dense(self, limit: int = DENSE_LIMIT) -> Tensor:
        """All of A, `[..., heads, queries, keys]`. Refuses above `limit` weights and says what to use instead.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A.dense()
        tensor([[1.0000, 0.0000, 0.0000, 0.0000],
                [0.5000, 0.5000, 0.0000, 0.0000],
                [0.3333, 0.3333, 0.3333, 0.0000],
                [0.2500, 0.2500, 0.2500, 0.2500]])
        """
        count = math.prod(self.shape)
        if count > limit:
            size = count * (8 if self.dtype is torch.float64 else 4) / 1e9
            raise SizeError(
                f"A.dense: {list(self.shape)} is {count:,} weights ({size:.1f} GB), above limit={limit:,}; "
                "read rows with "
                "A[b, h, i], the largest with A.topk(k), column sums with A.received(), a picture with "
                "A.pool(rows, cols), "
                "or raise the limit"
            )
        with torch.no_grad():
            return self.backend.dense(self.problem).reshape(self.shape)

    # -- readings --------------------------------------------------------------------------------

    def _flat_lse(self) -> Tensor:
        # Kept between readings, unless a tensor it was computed from has been written to since.
        if not self._fresh():
            with torch.no_grad():
                self._keep(self.backend.lse(self.problem))
        return cast(Tensor, self._lse)

    def _fresh(self) -> bool:
        stamp = self._versions()
        return self._lse is not None and stamp is not None and self._stamp == stamp

    def _keep(self, lse: Tensor) -> None:
        self._lse, self._stamp = lse, self._versions()

    def _versions(self) -> Hashable | None:
        """How often each tensor A is computed from has been written to; None when that cannot be told."""
        problem = self.problem
        tensors = [problem.query, problem.key, problem.bias, problem.sinks, problem.scale_tensor]
        tensors += [] if problem.mask is None else problem.mask.tensors()
        given = [t for t in tensors if t is not None]
        if any(t.is_inference() for t in given):  # made under inference_mode: such tensors count nothing
            return None
        stamps = [functions.stamp(fn, "mask") for fn in functions_of(problem.mask)]
        stamps += [] if problem.score is None else [problem.score.stamp()]
        if any(stamp is None for stamp in stamps):
            return None
        return (*(t._version for t in given), *stamps)

    @property
    def lse(self) -> Tensor:
        """L_i = ln Σ_j e^{s_ij}, natural, with scale, bias, cap and sinks in it; −inf for an empty row.

        `[..., heads, queries]`, float32 (float64 for float64). Differentiable once.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A.lse  # ln 1, ln 2, ln 3, ln 4
        tensor([0.0000, 0.6931, 1.0986, 1.3863])
        """
        problem, lse = self.problem, self._flat_lse()
        made = lse.to(problem.accumulate_dtype, copy=True)
        return self._carry("lse", made).reshape(problem.result_shape(problem.queries))

    def _carry(self, name: str, flat: Tensor) -> Tensor:
        """A flat reading, with its gradient where one may be asked for."""
        if not readgrad.wanted(self.problem):
            return flat
        return readgrad.carry(readgrad.Reading(name, self.problem, self.backend, self._flat_lse(), flat))

    def topk(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest weights of each row and their keys, `(weights, keys)`, each `[..., heads, queries, k]`.

        Largest first, ties to the lower key. Where a row sees fewer than k keys: weight 0, key −1.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> weights, keys = A.topk(2)
        >>> weights[1], keys[1], keys[0]
        (tensor([0.5000, 0.5000]), tensor([0, 1]), tensor([ 0, -1]))
        """
        check_reading(self.problem, "topk", k)
        if k == 0:
            nothing = torch.zeros(
                *self.shape[:-1], 0, dtype=self.problem.accumulate_dtype, device=self.device
            )
            return nothing, nothing.to(torch.int64)
        return cast("tuple[Tensor, Tensor]", self._read("topk", k))

    def entropy(self) -> Tensor:
        """−Σ_j a_ij ln a_ij of each row in nats, 0 … ln(visible keys), `[..., heads, queries]`; 0 for an empty row.

        Differentiable once, to spread attention or sharpen it in training.

        >>> import torch, kizuki
        >>> q = torch.ones(2, 4, requires_grad=True)
        >>> kizuki.attend(q, torch.eye(4)[:3]).entropy().sum().backward()
        >>> q.grad.shape
        torch.Size([2, 4])
        """
        made = cast(Tensor, self._read("entropy"))
        if not readgrad.wanted(self.problem):
            return made
        flat = made.reshape(self._flat_lse().shape)
        return self._carry("entropy", flat).reshape(made.shape)

    def max(self) -> Tensor:
        """The largest weight of each row, `[..., heads, queries]`; 0 for an empty row.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A.max()
        tensor([1.0000, 0.5000, 0.3333, 0.2500])
        """
        return cast(Tensor, self._read("max"))

    def max_score(self) -> Tensor:
        """The largest score of each head, in logits, `[..., heads]`; −inf for a head that sees nothing.

        >>> import torch, kizuki
        >>> x = torch.eye(4)  # q·k is 1 on the diagonal, times 1/√4
        >>> kizuki.attend(x, x).max_score()
        tensor(0.5000)
        """
        return cast(Tensor, self._read("max_score"))

    def received(self, reduce: str = "sum", last: int | None = None) -> Tensor:
        """Σ_i a_ij for each key, `[..., heads, keys]`; "mean" divides by the number of queries that see the key.

        `last`: only over the last so many queries, which costs no more than their rows (what a KV cache is pruned by).

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A.received(), A.received("mean")
        (tensor([2.0833, 1.0833, 0.5833, 0.2500]), tensor([0.5208, 0.3611, 0.2917, 0.2500]))
        """
        return cast(Tensor, self._read("received", reduce, last))

    def pool(self, rows: int, cols: int, reduce: str = "mass") -> Tensor:
        """A picture of A, `[..., heads, rows, cols]`: each pixel a block of queries × keys.

        "mass": mean over the queries, sum over the keys, so that pixel rows sum to 1; "peak": the largest weight.
        Query i lies in pixel row ⌊i·rows/queries⌋, key j in column ⌊j·cols/keys⌋.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A.pool(2, 2)
        tensor([[1.0000, 0.0000],
                [0.5833, 0.4167]])
        """
        return cast(Tensor, self._read("pool", rows, cols, reduce))

    def distance(self) -> Tensor:
        """Σ_j a_ij · |i − j| of each row in tokens, `[..., heads, queries]`.

        The query's own position is counted from the right end when there are fewer queries than keys (a KV cache).
        A first key that soaks up weight (a sink) inflates it: read it beside `A[..., 0]`.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> A = kizuki.attend(x, x, causal=True)
        >>> A.distance()
        tensor([0.0000, 0.5000, 1.0000, 1.5000])
        """
        return cast(Tensor, self._read("distance"))

    def future(self) -> Tensor:
        """Σ of a_ij over the keys after the query's own position, `[..., heads, queries]`; 0 to the bit if none leaks.

        Where the queries are fewer than the keys, positions are counted from the right end (a KV cache).

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)  # equal scores, so that equal weights
        >>> kizuki.attend(x, x).future(), kizuki.attend(x, x, causal=True).future()
        (tensor([0.7500, 0.5000, 0.2500, 0.0000]), tensor([0., 0., 0., 0.]))
        """
        return cast(Tensor, self._read("future"))

    def observe(self, what: Observe) -> Observation:
        """Several readings in one pass over A, the same numbers as one by one.

        >>> import torch, kizuki
        >>> x = torch.eye(4)
        >>> seen = kizuki.attend(x, x, causal=True).observe(kizuki.Observe(topk=2, entropy=True))
        >>> seen.topk[1][3].tolist(), seen.entropy.shape
        ([3, 0], torch.Size([4]))
        """
        check_observe(what, "A.observe: what")
        made = self.begin(asked(what))
        self.fold(made)
        return collect(self, what, made)

    def mass(
        self, groups: Tensor | Segments, rows: Tensor | Segments | Sequence[str] | None = None
    ) -> Tensor:
        """Σ of the weights on each group of keys, `[..., heads, queries, groups]`.

        `groups` is integer `[keys]`, the group of each key counted from 0 (−1 leaves a key out), or a mapping of names
        to segments: `(start, stop)`, a slice, a range, indices or a boolean `[keys]`; the order is the mapping's.
        With `rows`, groups of queries in the same forms, or a list of names of `groups`: the mean over the queries of
        each, `[..., heads, row groups, groups]`, how much one segment reads of another (0 where no query is of it).
        float32 (float64 for float64), differentiable. Costs one forward for every 64 groups. Raises in one line where
        lengths, names or places do not fit.

        >>> import torch, kizuki
        >>> x = torch.zeros(4, 2)
        >>> kizuki.attend(x, x).mass({"system": (0, 3), "question": (3, 4)}, rows=["question"])
        tensor([[0.7500, 0.2500]])
        """
        return mass(self, groups, rows)

    def leaks(
        self, documents: Tensor | None = None, padding: Tensor | None = None, future: bool = True
    ) -> Leaks:
        """The weight that lies where it must not: on the future, between documents, on padding; 0 to the bit if none.

        documents: integer `[keys]`, the document of each position. padding: bool `[keys]` or `[batch, keys]`, True
        where a key is padding. future: whether keys after a query's own position are forbidden.

        >>> import torch, kizuki
        >>> x = torch.randn(4, 2)
        >>> kizuki.attend(x, x, causal=True).leaks().none, kizuki.attend(x, x).leaks().none
        (True, False)
        """
        return leaks(self, documents, padding, future)

    def verify(self, rows: int = 16, cells: int = 64, seed: int = 0) -> Verified:
        """Proofs on demand: readings of A against each other and against float64, at places drawn by `seed`.

        `rows` rows sum to 1 less the sink's share; received sums to what the rows hold; the top 8 against full rows;
        pooled mass against its children; `cells` entries against float64. Prints a line a check; `.ok` says whether all
        hold. Costs two passes over A, and for each row one read of its keys in float64.

        >>> import torch, kizuki
        >>> kizuki.attend(torch.randn(2, 50, 8), torch.randn(2, 50, 8), causal=True).verify().ok
        True
        """
        return verify(self, rows, cells, seed)

    def steps(self, query: int, key: int) -> Steps:
        """Every number on the way to `A[..., query, key]`, in each head: dot, scaled, capped, bias, score, lse, weight.

        Costs one pass for the lse, the first time, and one dot product a head.

        >>> import torch, kizuki
        >>> q, k = torch.tensor([[1.0, 0.0]]), torch.eye(2)
        >>> one = kizuki.attend(q, k).steps(query=0, key=0)
        >>> one.dot.item(), round(one.scaled.item(), 4), round(one.weight.item(), 4)
        (1.0, 0.7071, 0.6698)
        """
        return steps(self, query, key)

    def _wide(self) -> AttentionMatrix:
        """The same matrix in the dtype it accumulates in, so that a sum of weights is not rounded to float16."""
        problem, dtype = self.problem, self.problem.accumulate_dtype
        if problem.dtype is dtype:
            return self
        return AttentionMatrix(
            replace(problem, query=problem.query.to(dtype), key=problem.key.to(dtype)), self.backend
        )

    def _read(self, name: str, *arguments: Any) -> Any:
        made = self.begin({name: arguments})
        self.fold(made)
        return self.finish(made)[name]

    @told
    def begin(self, asked: dict[str, tuple[Any, ...]]) -> dict[str, Statistic]:
        """The statistics of the readings named in `asked`, with their arguments, ready to be folded in."""
        for name, arguments in asked.items():
            check_reading(self.problem, name, *arguments)
        frame = Frame.of(self.problem)
        return {name: READINGS[name](frame, *arguments) for name, arguments in asked.items()}

    def fold(self, made: dict[str, Statistic]) -> None:
        """Update the statistics with all of A, in one pass."""
        with torch.no_grad():
            lse = self._lse if self._fresh() else None
            self._keep(self.backend.observe(self.problem, None, list(made.values()), lse)[1])

    @told
    def finish(self, made: dict[str, Statistic]) -> dict[str, Any]:
        """The readings of folded statistics, in the shapes the user sees."""
        return {name: _shaped(self.problem, name, statistic.finalize()) for name, statistic in made.items()}


def _shaped(problem: Problem, name: str, result: Any) -> Any:
    """A flat reading `[batch, heads, …]` with the axes the user gave."""
    if isinstance(result, tuple):
        return tuple(_shaped(problem, name, part) for part in result)
    tail = () if name == "max_score" else tuple(result.shape[2:])
    return result.reshape((*problem.lead, problem.heads, *tail) if problem.has_heads else tail)
