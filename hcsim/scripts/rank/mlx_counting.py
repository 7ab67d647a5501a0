"""Counts the kernels, FLOPs and bytes of an MLX script, as `counting` does for torch.

MLX is lazy: what a script computes is known when it evaluates arrays (see `hcsim.mlx.graph`). Compiled functions have
no graph that says it. Here `mx.compile` runs them as they are: each of their primitives is a kernel, where MLX would
fuse some. A custom function has none either inside a transformation, where it is refused. What numpy evaluates when it
converts an array is not counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import Any

import mlx.core as mx

from hcsim.errors import UsageError
from hcsim.mlx.graph import kernels
from hcsim.scripts.rank.counting import WorkCounter

_EVALUATING = ("item", "tolist", "__bool__", "__float__", "__int__", "__repr__")
_TRANSFORMING = ("grad", "value_and_grad", "vjp", "jvp")
_IN_COMPILE = "[eval] Attempting to eval an array during function transformations like compile or vmap is not allowed."


class GraphCounter:
    """Counts what each evaluation computes."""

    def __init__(self, work: WorkCounter) -> None:
        self._work = work
        self._transforming = 0
        self._compiling = 0

    def install(self) -> None:
        """Replace the functions of MLX that evaluate, differentiate and compile."""
        for name in ("eval", "async_eval"):
            setattr(mx, name, self._evaluating(getattr(mx, name)))
        for name in _EVALUATING:
            setattr(mx.array, name, self._evaluating(getattr(mx.array, name)))
        for name in _TRANSFORMING:
            setattr(mx, name, self._transform(getattr(mx, name)))
        mx.compile = self._compile
        mx.custom_function = partial(_CustomFunction, mx.custom_function, lambda: self._transforming > 0)

    def _evaluating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def evaluate(*arguments: Any, **named: Any) -> Any:
            if self._compiling:
                raise ValueError(_IN_COMPILE)
            # Arrays inside a transformation keep their graph, and are counted with what is made of them.
            if not self._transforming and threading.current_thread() is threading.main_thread():
                self._count(list(_arrays(arguments)))
            return original(*arguments, **named)

        return evaluate

    def _transform(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def transform(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            @wraps(function)
            def inside(*given: Any, **options: Any) -> Any:
                self._transforming += 1
                try:
                    return function(*given, **options)
                finally:
                    self._transforming -= 1

            return original(inside, *arguments, **named)

        return transform

    def _compile(self, fun: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        @wraps(fun)
        def inside(*given: Any, **options: Any) -> Any:
            self._compiling += 1
            try:
                return fun(*given, **options)
            finally:
                self._compiling -= 1

        return inside

    def _count(self, arrays: list[Any]) -> None:
        try:
            work = kernels(arrays)
        except ValueError as error:
            if "CustomTransforms" not in str(error):
                raise
            raise UsageError(
                "what mx.grad makes of mx.custom_function, of mx.checkpoint, and of a collective inside it cannot"
                " be counted on a virtual cluster: leave them out there, or run the script on real ranks"
            ) from None
        for flops, moved_bytes in work:
            self._work.add(flops, moved_bytes)


class _CustomFunction:
    """A custom function that is one only where something is made of it."""

    def __init__(
        self, original: Callable[..., Any], transforming: Callable[[], bool], function: Callable[..., Any]
    ) -> None:
        self._custom = original(function)
        self._plain = function
        self._transforming = transforming

    def __call__(self, *given: Any, **named: Any) -> Any:
        return (self._custom if self._transforming() else self._plain)(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._custom, name)


def _arrays(values: Any) -> Iterator[Any]:
    """Yield the arrays of a tree."""
    if isinstance(values, mx.array):
        yield values
    elif isinstance(values, Mapping):
        for value in values.values():
            yield from _arrays(value)
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _arrays(value)
