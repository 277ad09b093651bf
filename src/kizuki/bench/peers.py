"""The optional peers: onnxruntime, openvino and jax, each in the layout it likes best; no copy is timed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from .cells import Cell
from .providers import CannotDo, Data, Way, extra_mask, grouped_as_queries, installed, need


def tokens_first(tensor: Tensor) -> Tensor:
    """`[batch, heads, length, head_dim]` laid out as `[batch, length, heads, head_dim]`; copied only if need be."""
    return tensor.transpose(1, 2).contiguous()


def joined(tensor: Tensor) -> Tensor:
    """`[batch, length, heads · head_dim]`, the layout of projections."""
    return tokens_first(tensor).flatten(2)


class OnnxRuntime:
    """onnxruntime's CPU kernels: the Attention operator, MultiHeadAttention, and GroupQueryAttention with its cache.

    Inputs and outputs are bound to memory once. Idle threads do not spin, or they would slow whoever comes next.
    """

    name = "onnxruntime"

    def version(self) -> str | None:
        return installed("onnxruntime")

    def ways(self, cell: Cell, data: Data, threads: int) -> list[Way]:
        runtime = need("onnxruntime")
        need("onnx")
        if cell.backward:
            raise CannotDo("has no gradients")
        if cell.dtype == "bf16":
            raise CannotDo("has no bfloat16 kernel for attention on a CPU")
        mask = extra_mask(cell, data)
        builders: list[Callable[..., Way]] = [self._attention]
        equal = cell.kv_heads == cell.heads
        if mask is None and equal and cell.dtype != "f64":
            builders.append(self._multi_head)
        if mask is None and cell.dtype != "f64" and (cell.causal or cell.queries == 1):
            builders.append(self._grouped)
        state = need("onnxruntime.capi.onnxruntime_pybind11_state")
        refusals = (state.NotImplemented, state.InvalidGraph, state.InvalidArgument, state.Fail)
        found, why = [], ""
        for builder in builders:
            try:
                found.append(builder(runtime, cell, data, mask, threads))
            except refusals as error:
                why = str(error).partition("\n")[0].rpartition(" : ")[2]
        if not found:
            raise CannotDo(why)
        return found

    def _attention(self, runtime: Any, cell: Cell, data: Data, mask: Tensor | None, threads: int) -> Way:
        inputs = {"query": data.query, "key": data.key, "value": data.value}
        if mask is not None:
            inputs["mask"] = mask
        return _onnx_way(
            runtime,
            threads,
            "Attention",
            inputs,
            {"output": data.query.shape},
            {"is_causal": int(cell.causal)},
            lambda output: output,
        )

    def _multi_head(self, runtime: Any, cell: Cell, data: Data, mask: Tensor | None, threads: int) -> Way:
        query = joined(data.query)
        return _onnx_way(
            runtime,
            threads,
            "MultiHeadAttention",
            {"query": query, "key": joined(data.key), "value": joined(data.value)},
            {"output": query.shape},
            {"num_heads": cell.heads, "unidirectional": int(cell.causal)},
            lambda output: output.unflatten(2, (cell.heads, -1)).transpose(1, 2),
        )

    def _grouped(self, runtime: Any, cell: Cell, data: Data, mask: Tensor | None, threads: int) -> Way:
        """The operator of its language models: the newest keys are appended to a cache that is bound in place."""
        past = cell.keys - cell.queries
        query = joined(data.query)
        inputs = {
            "query": query,
            "key": joined(data.key[:, :, past:]),
            "value": joined(data.value[:, :, past:]),
            "past_key": data.key.clone(),  # written to: the last key again, with the same numbers
            "past_value": data.value.clone(),
            "seqlens": torch.full((cell.batch,), cell.keys - 1, dtype=torch.int32),
            "total": torch.tensor([cell.keys], dtype=torch.int32),
        }
        outputs = {"output": query.shape, "present_key": data.key.shape, "present_value": data.key.shape}
        return _onnx_way(
            runtime,
            threads,
            "GroupQueryAttention",
            inputs,
            outputs,
            {"num_heads": cell.heads, "kv_num_heads": cell.kv_heads},
            lambda output: output.unflatten(2, (cell.heads, -1)).transpose(1, 2),
            {"present_key": "past_key", "present_value": "past_value"},
        )


def _onnx_way(
    runtime: Any,
    threads: int,
    operator: str,
    inputs: dict[str, Tensor],
    outputs: Mapping[str, Sequence[int]],
    attributes: dict[str, int],
    arrange: Callable[[Tensor], Tensor],
    shared: dict[str, str] | None = None,
) -> Way:
    """A session of one node. `shared` names outputs that are written over an input."""
    onnx = need("onnx")
    helper, kinds = onnx.helper, onnx.TensorProto
    kind = {
        torch.float32: kinds.FLOAT,
        torch.float16: kinds.FLOAT16,
        torch.float64: kinds.DOUBLE,
        torch.bool: kinds.BOOL,
        torch.int32: kinds.INT32,
    }
    element = kind[inputs["query"].dtype]
    domain = "" if operator == "Attention" else "com.microsoft"
    node = helper.make_node(operator, list(inputs), list(outputs), domain=domain, **attributes)
    graph = helper.make_graph(
        [node],
        "attention",
        [helper.make_tensor_value_info(name, kind[t.dtype], list(t.shape)) for name, t in inputs.items()],
        [helper.make_tensor_value_info(name, element, list(shape)) for name, shape in outputs.items()],
    )
    versions = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=10)
    options = runtime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = runtime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    values = {name: runtime.OrtValue.ortvalue_from_numpy(tensor.numpy()) for name, tensor in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    output = torch.empty(tuple(outputs["output"]), dtype=inputs["query"].dtype)
    written = {"output": runtime.OrtValue.ortvalue_from_numpy(output.numpy())}
    written |= {name: values[source] for name, source in (shared or {}).items()}
    for name, value in written.items():
        binding.bind_ortvalue_output(name, value)
    return Way(
        lambda: session.run_with_iobinding(binding),
        lambda: (arrange(torch.from_numpy(written["output"].numpy())),),
        operator,
        [inputs, output, values, written],
    )


class OpenVino:
    """openvino's CPU plugin, ScaledDotProductAttention; inputs share their memory with torch."""

    name = "openvino"

    def version(self) -> str | None:
        return installed("openvino")

    def ways(self, cell: Cell, data: Data, threads: int) -> list[Way]:
        vino = need("openvino")
        operators = need("openvino.opset13")
        if cell.backward:
            raise CannotDo("has no gradients")
        mask = extra_mask(cell, data)
        query, note = data.query, ""
        if cell.kv_heads != cell.heads:
            if cell.queries != 1:
                raise CannotDo("would have to repeat the key heads")
            query, note = grouped_as_queries(cell, data), "a group's heads as queries of one head"
        kind = {
            torch.float32: vino.Type.f32,
            torch.float16: vino.Type.f16,
            torch.bfloat16: vino.Type.bf16,
            torch.float64: vino.Type.f64,
            torch.bool: vino.Type.boolean,
        }
        given = [query, data.key, data.value] + ([] if mask is None else [mask])
        parameters = [operators.parameter(list(tensor.shape), kind[tensor.dtype]) for tensor in given]
        node = operators.scaled_dot_product_attention(*parameters, causal=cell.causal)
        precision = "bf16" if cell.dtype == "bf16" else "f16" if cell.dtype == "f16" else "f32"
        compiled = vino.Core().compile_model(
            vino.Model([node], parameters, "attention"),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1,
                "PERFORMANCE_HINT": "LATENCY",
                "ENABLE_CPU_PINNING": False,  # pinned threads and everybody else's would meet on one core
                "INFERENCE_PRECISION_HINT": precision,
            },
        )
        request = compiled.create_infer_request()
        shared = [_vino_tensor(vino, tensor, kind) for tensor in given]
        for index, tensor in enumerate(shared):
            request.set_input_tensor(index, tensor)

        def results() -> tuple[Tensor, ...]:
            array = request.get_output_tensor(0).data
            if cell.dtype == "bf16":  # numpy has no bfloat16: the same bits under another name
                output = torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
            else:
                output = torch.from_numpy(array.copy())
            return (output.view(data.query.shape),)

        return [Way(request.infer, results, note, [given, shared, compiled])]


def _vino_tensor(vino: Any, tensor: Tensor, kind: dict[torch.dtype, Any]) -> Any:
    tensor = tensor.contiguous()
    if tensor.dtype is torch.bfloat16:
        return vino.Tensor(tensor.view(torch.int16).numpy(), list(tensor.shape), kind[tensor.dtype])
    return vino.Tensor(tensor.numpy(), shared_memory=True)


_pool: int | None = None  # how many cores this process could use when jax made its threads


class Jax:
    """`jax.nn.dot_product_attention`, jitted, on the CPU; its layout is `[batch, length, heads, head_dim]`."""

    name = "jax"

    def version(self) -> str | None:
        return installed("jax")

    def ways(self, cell: Cell, data: Data, threads: int) -> list[Way]:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before jax looks for accelerators
        jax = need("jax")
        global _pool
        _pool = _pool or _cores()
        if _pool != threads:
            raise CannotDo(
                f"cannot be told how many threads: it would use {_pool} and the others {threads} "
                f"(taskset gives a process {threads} cores)"
            )
        if cell.dtype == "f16":
            raise CannotDo("does not multiply float16 with float32 sums on a CPU")
        mask = extra_mask(cell, data)
        options: dict[str, Any] = {"is_causal": cell.causal}
        with jax.enable_x64(cell.dtype == "f64"):
            tensors = [tokens_first(t) for t in (data.query, data.key, data.value)]
            if mask is not None:
                mask = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
                tensors.append(mask)
            if data.grad is not None:
                tensors.append(tokens_first(data.grad))
            arrays = [jax.dlpack.from_dlpack(tensor) for tensor in tensors]

            def attend(query: Any, key: Any, value: Any, extra: Any = None) -> Any:
                named = {} if extra is None else {"bias" if cell.rule == "bias" else "mask": extra}
                return jax.nn.dot_product_attention(query, key, value, **options, **named)

            def both(query: Any, key: Any, value: Any, grad: Any) -> Any:
                output, back = jax.vjp(attend, query, key, value)
                return (output, *back(grad))

            function = jax.jit(both if cell.backward else attend).lower(*arrays).compile()
        last: list[Any] = []

        def call() -> None:
            last[:] = [jax.block_until_ready(function(*arrays))]

        def results() -> tuple[Tensor, ...]:
            each = last[0] if cell.backward else (last[0],)
            return tuple(from_dlpack(array).transpose(1, 2) for array in each)

        return [Way(call, results, "", [tensors])]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
