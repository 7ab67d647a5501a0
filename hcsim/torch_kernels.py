"""The kernels of torch operations: of what kind each is, how large, and a dispatch mode that sees them all.

A kernel's time depends on its kind, on its size (FLOPs for products and convolutions, bytes for all others), on the
FLOPs that it does with each byte, and on its dtype. `KernelMode` shows every operation that moves data; views and
bookkeeping are free, and composite operations are taken apart. FLOPs come from torch's own table, and for recurrent
layers, grouped convolutions and some of the fused attentions, for which it has none or wrong ones, from their shapes.
Bytes are those of all input and output tensors; a gather moves only the rows that it takes, what is filled is not read,
and causal attention does half of its products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from hcsim.config import KernelKind
from hcsim.config.machine import BY_FLOPS
from hcsim.runtime.host import KernelGroup

Formula: TypeAlias = Callable[[Sequence[Any], dict[str, Any], Any], float]
"""FLOPs from arguments, named arguments, and the result."""

_FREE_NAMESPACES = ("c10d", "_c10d_functional", "prim", "profiler", "inductor")
_FREE = (
    "_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "set_",
    "resize_", "_local_scalar_dense", "lift_fresh", "_assert_async", "is_same_size", "record_stream",
)  # fmt: skip
_MADE_OF_OTHERS = ("DTensor", "AsyncCollectiveTensor")
"""Wrapper tensors: their operations on the inner plain tensors are counted instead."""
_WITHOUT_DATA = ("FakeTensor",)
"""Tensors without data, which torch uses to infer shapes."""

_BY_PART: tuple[tuple[str, KernelKind, KernelKind], ...] = (
    ("scaled_dot_product", "attention", "attention_backward"),
    ("convolution", "convolution", "convolution_backward"),
    ("rnn", "recurrent", "recurrent_backward"),
    ("lstm_mps", "recurrent", "recurrent_backward"),
    ("batch_norm", "batch_norm", "batch_norm_backward"),
    ("layer_norm", "norm", "norm_backward"),
    ("group_norm", "norm", "norm_backward"),
    ("rms_norm", "norm", "norm_backward"),
    ("softmax", "softmax", "softmax_backward"),
    ("_pool", "pooling", "pooling_backward"),
    ("upsample", "upsampling", "upsampling_backward"),
    ("embedding", "lookup", "lookup_backward"),
    ("_fused_adam", "update", "update"),
    ("_fused_sgd", "update", "update"),
)
"""The kind of an operation whose name has this part; the second one is of its backward pass."""
_BY_NAME: dict[str, KernelKind] = {
    **dict.fromkeys(("index", "gather", "take", "take_along_dim", "nll_loss_forward"), "gather"),
    "index_select": "lookup",
    **dict.fromkeys(("zero", "zeros", "zeros_like", "new_zeros", "ones", "ones_like", "new_ones", "fill", "full",
                     "full_like", "new_full"), "fill"),
    **dict.fromkeys(("index_add", "scatter", "scatter_add", "index_copy"), "scatter"),
    **dict.fromkeys(("index_put", "_index_put_impl"), "gather_backward"),
    **dict.fromkeys(("sum", "mean", "amax", "amin", "max", "min", "argmax", "argmin", "var", "std", "var_mean", "any",
                     "all", "topk", "sort", "cumsum", "linalg_vector_norm", "mse_loss"),
                    "reduction"),
    **dict.fromkeys(("gelu", "gelu_backward"), "gelu"),
    **dict.fromkeys(("tanh", "sigmoid", "silu", "silu_backward", "exp", "log", "erf", "sin", "cos", "mish", "softplus",
                     "elu"), "transcendental"),
    **dict.fromkeys(("bernoulli", "native_dropout", "uniform", "normal", "random", "rand", "randn", "rand_like",
                     "randn_like", "multinomial", "randperm", "exponential"), "random"),
}  # fmt: skip


class Operation(NamedTuple):
    """What is known of an operation before it is called."""

    kind: KernelKind
    flops: Formula
    composite: bool = False
    """Whether it is taken apart, and its parts are seen instead."""
    causal_at: int | None = None
    """Which argument of an attention says that later positions are masked."""
    moved_bytes: Callable[[Sequence[Any], Any], int] | None = None
    """From arguments and result, of an operation that does not read all of what it is given."""


def operation_of(func: OpOverload) -> Operation | None:
    """Return what is known of an operation; None for one that is free."""
    packet = func.overloadpacket
    name = packet.__name__
    if func.namespace in _FREE_NAMESPACES or name in _FREE or name.startswith("sym_"):
        return None
    if any(value.alias_info is not None and not value.alias_info.is_write for value in func._schema.returns):
        return _VIEW
    kind = _kind(func, name)
    names = [argument.name for argument in func._schema.arguments]
    causal_at = names.index("is_causal") if "is_causal" in names else None
    moved = _MOVED.get(name) or _MOVED.get(kind)
    formula = flop_registry.get(packet)
    if formula is not None:
        return Operation(kind if kind in BY_FLOPS else "matmul", _by_formula(formula), causal_at=causal_at)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func._name, "CompositeImplicitAutograd")
    return Operation(kind, _no_flops, composite, causal_at, moved)


def _kind(func: OpOverload, name: str) -> KernelKind:
    for part, forward, backward in _BY_PART:
        if part in name:
            return backward if "backward" in name else forward
    plain = name.rstrip("_").removeprefix("_foreach_")
    if plain in _BY_NAME:
        return _BY_NAME[plain]
    if name.startswith("_foreach_") and plain != "copy":
        return "update" if name.endswith("_") else "elementwise"
    if torch.Tag.pointwise in func.tags and plain not in ("clone", "copy"):
        return "update" if name != plain else "elementwise"
    return "elementwise" if name.endswith("_backward") and not name.startswith(_SCATTERED) else "copy"


_SCATTERED = ("slice", "select", "diagonal", "unfold", "nll_loss")
"""Operations whose backward passes write part of what is zero elsewhere."""


def _by_formula(formula: Callable[..., Any]) -> Formula:
    of_shapes = getattr(formula, "__wrapped__", None)
    if of_shapes is None:
        return lambda args, kwargs, result: float(formula(*args, out_val=result, **kwargs))

    def flops(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
        named = {name: _shape(value) for name, value in kwargs.items()}
        return float(of_shapes(*map(_shape, args), out_shape=_shape(result), **named))

    return flops


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape
    return tuple(map(_shape, value)) if isinstance(value, tuple) else value


def _no_flops(args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    return 0.0


def size_bytes(values: Any) -> int:
    """Return the size of all tensors among the values."""
    if isinstance(values, Tensor):
        return values.nbytes if values.layout is torch.strided else 0
    total = 0
    if isinstance(values, tuple | list):
        for value in values:
            if type(value) is Tensor or type(value) is torch.nn.Parameter:
                total += value.nbytes
            elif isinstance(value, Tensor | tuple | list):
                total += size_bytes(value)
    return total


_VIEW = Operation("view", _no_flops)

_MOVED: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "gather": lambda args, result: 2 * size_bytes(result),
    "lookup": lambda args, result: 2 * size_bytes(result),
    "fill": lambda args, result: size_bytes(result),
    "nll_loss_forward": lambda args, result: 2 * size_bytes(args[1]),
    "max_pool2d_with_indices_backward": lambda args, result: (
        size_bytes(args) - size_bytes(args[1]) + size_bytes(result)
    ),
}
"""By operations or kinds that do not read all tensors that they are given."""


class Kernel(NamedTuple):
    """One kernel that was launched."""

    kind: KernelKind
    flops: float
    moved_bytes: float
    dtype: str
    rows: float = 0.0
    """What is summed up, normalised, or copied as one: sums, channels, rows. 0: rows do not matter to
    kernels of this kind."""


VIEW = Kernel("view", 0.0, 0.0, "float32")


def _indices(args: Sequence[Any], result: Any) -> float:
    return max((value.numel() for value in _tensors(args) if not value.dtype.is_floating_point), default=0)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)


def _means(values: Sequence[Any]) -> float:
    """Return how many numbers a normalisation keeps for its backward pass, one for each row."""
    return next((value.numel() for value in _tensors(values)), 0)


def _channels(args: Sequence[Any], result: Any) -> float:
    return args[0].shape[1] if args[0].dim() > 1 else 0


def _vectors(args: Sequence[Any], result: Any) -> float:
    """Return the number of vectors that a softmax is over."""
    dimension = next((value for value in args if isinstance(value, int)), -1)
    return args[0].numel() / max(1, args[0].shape[dimension]) if args[0].dim() else 1


_ROWS: dict[KernelKind, Callable[[Sequence[Any], Any], float]] = {
    "batch_norm": _channels,
    "batch_norm_backward": _channels,
    "norm": lambda args, result: _means(result[1:]),
    "norm_backward": lambda args, result: _means(args[2:]),
    "softmax": _vectors,
    "softmax_backward": _vectors,
    "reduction": lambda args, result: _means([result]),
    "gather": _indices,
    "gather_backward": _indices,
    "lookup": _indices,
    "lookup_backward": _indices,
    "scatter": _indices,
}


def kernel_of(operation: Operation, flops: float, moved_bytes: float, args: Sequence[Any], result: Any) -> Kernel:
    """Return the kernel of a call, from its FLOPs by torch's table and the bytes of all its tensors."""
    if operation.moved_bytes is not None:
        moved_bytes = operation.moved_bytes(args, result)
    elif not flops and operation.kind in _UNTABLED:
        flops = _UNTABLED[operation.kind](args)
    if operation.causal_at is not None and len(args) > operation.causal_at and args[operation.causal_at] is True:
        flops /= 2
    kind = operation.kind
    if kind == "convolution" and args[_GROUPS] > 1:
        kind, flops = _by_window("grouped_convolution", args[1]), _grouped_flops(result, args[1])
    elif kind == "convolution_backward" and args[_GROUPS + 1] > 1:
        kind = _by_window("grouped_convolution_backward", args[2])
        flops = _grouped_flops(args[0], args[2]) * sum(args[-1][:2])
    elif kind == "convolution" or kind == "convolution_backward":
        kind = _by_weight(kind, args[1 if kind == "convolution" else 2])
    rows = _ROWS[kind](args, result) if kind in _ROWS else 0.0
    return Kernel(kind, flops, moved_bytes, dtype_of(result) or dtype_of(args) or "float32", float(rows))


_GROUPS = 8
"""The number of groups among the arguments of a convolution; its backward pass has it one later."""


_FEW_CHANNELS = 8
_THIN: dict[KernelKind, KernelKind] = {
    "convolution": "thin_convolution",
    "convolution_backward": "thin_convolution_backward",
}
_POINTWISE: dict[KernelKind, KernelKind] = {
    "convolution": "pointwise_convolution",
    "convolution_backward": "pointwise_convolution_backward",
}
_SMALL_WINDOW = 9
_WIDE: dict[KernelKind, KernelKind] = {
    "grouped_convolution": "wide_grouped_convolution",
    "grouped_convolution_backward": "wide_grouped_convolution_backward",
}


def _by_window(kind: KernelKind, weight: Tensor) -> KernelKind:
    """Libraries have kernels of their own for windows of up to 3 × 3; the others are several times slower."""
    return _WIDE[kind] if weight[0, 0].numel() > _SMALL_WINDOW else kind


def _by_weight(kind: KernelKind, weight: Tensor) -> KernelKind:
    """Convolutions of single pixels are products, and those of few channels leave most of a vector unit idle."""
    if min(weight.shape[:2]) < _FEW_CHANNELS:
        return _THIN[kind]
    return _POINTWISE[kind] if weight[0, 0].numel() == 1 else kind


def _grouped_flops(outputs: Tensor, weight: Tensor) -> float:
    """Two for each output and each weight that it depends on; torch's table takes no notice of groups."""
    return 2.0 * outputs.numel() * weight[0].numel()


def _recurrent_flops(args: Sequence[Any]) -> float:
    """Two for each weight and each sample of each step."""
    given = [value for part in args[1:3] for value in (part if isinstance(part, list | tuple) else [part])]
    weights = sum(value.numel() for value in given if isinstance(value, Tensor) and value.dim() == 2)
    return float(2 * weights * args[0].numel() / args[0].shape[-1])


def _attention_flops(query: Tensor, key: Tensor) -> float:
    """Those of two products, of queries and keys and of the result and the values, counted in full."""
    return 4.0 * query.numel() * key.shape[-2]


_UNTABLED: dict[str, Callable[[Sequence[Any]], float]] = {
    "recurrent": _recurrent_flops,
    "recurrent_backward": lambda args: 2.0 * _recurrent_flops(args),
    "attention": lambda args: _attention_flops(args[0], args[1]),
    "attention_backward": lambda args: 2.5 * _attention_flops(args[1], args[2]),  # the scores are computed again
}
"""FLOPs of kinds, of operations that torch's table leaves out."""


_NAMES: dict[torch.dtype, str] = {}


def dtype_of(values: Any) -> str:
    """Return the dtype of the first tensor among the values: "float32"; "" without any."""
    while isinstance(values, tuple | list):
        values = next((value for value in values if isinstance(value, Tensor | tuple | list)), None)
    if values is None:
        return ""
    name = _NAMES.get(values.dtype)
    if name is None:
        name = _NAMES[values.dtype] = str(values.dtype).removeprefix("torch.")
    return name


class KernelTally:
    """Kernels summed up by kind, dtype and size: those of one group are less than a factor of two apart."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int, int, int, str, str], list[float]] = {}
        self._of_step: Counter[str] = Counter()

    def add(self, kernel: Kernel, signature: str = "") -> None:
        kind, flops, moved_bytes, dtype, rows = kernel
        bits = int(flops).bit_length(), int(moved_bytes).bit_length(), int(rows).bit_length()
        self._of_step[kind] += 1
        sums = self._groups.setdefault((kind, *bits, dtype, signature), [0, 0.0, 0.0, 0.0, 0.0])
        sums[0] += 1
        sums[1] += flops
        sums[2] += moved_bytes
        sums[3] += rows
        sums[4] += self._of_step[kind] ** -0.5

    def step_ended(self) -> None:
        """Count the next kernels as those of another step."""
        self._of_step.clear()

    def take(self) -> tuple[KernelGroup, ...]:
        """Return the groups, and begin anew."""
        groups = tuple(
            KernelGroup(kind, flops / count, moved_bytes / count, int(count), dtype, signature, rows / count, colds)
            for (kind, *_, dtype, signature), (count, flops, moved_bytes, rows, colds) in self._groups.items()
        )
        self._groups.clear()
        return groups


def signature_of(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any] | None) -> str:
    """Return the operation's name, and the shapes and settings that it is called with."""
    named = "".join(f" {name}={_described(value)}" for name, value in (kwargs or {}).items())
    return f"{func.overloadpacket.__name__}.{func._overloadname}{_described(args)}{named}"


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        strided = "" if value.is_contiguous() else f"/{'x'.join(map(str, value.stride()))}"
        return "x".join(map(str, value.shape)) + strided
    if isinstance(value, tuple | list):
        return f"({' '.join(map(_described, value))})"
    return str(value) if isinstance(value, bool | int) or value is None else ""


class KernelMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation that launches a kernel, in the forward and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._operations: dict[OpOverload, Operation | None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper would cost as much as we do

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types:
            if _among(types, _MADE_OF_OTHERS):
                return NotImplemented
            if _among(types, _WITHOUT_DATA):
                return func(*args, **(kwargs or {}))
        try:
            operation = self._operations[func]
        except KeyError:
            operation = self._operations[func] = operation_of(func)
        if operation is None or operation is _VIEW:
            if operation is not None:
                self.viewed()
            return func(*args, **kwargs) if kwargs else func(*args)
        if operation.composite:
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return self.launch(func, operation, args, kwargs or {})

    def viewed(self) -> None:
        """Notice a view."""

    def launch(self, func: OpOverload, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the operation, and return its result."""
        raise NotImplementedError


def _among(types: Sequence[type], names: Sequence[str]) -> bool:
    return any(kind.__name__ in names for kind in types)
