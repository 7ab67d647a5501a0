"""What can be called: functions under a name, with the types of their arguments and their result."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_type_hints

import msgspec

from hcsim.errors import HcsimError, UsageError
from hcsim.transport.rpc.failures import OUR_ERRORS
from hcsim.transport.rpc.values import fitting

R = TypeVar("R")


class Procedure(Generic[R]):
    """A function's name and types, as callers and servers know it."""

    def __init__(self, name: str, arguments: Mapping[str, Any], result: type[R], defaults: Sequence[Any] = ()) -> None:
        self.name = name
        self.result: Any = result
        required = len(arguments) - len(defaults)
        fields = [
            (argument, kind)
            if place < required
            else (argument, kind, msgspec.field(default=defaults[place - required]))
            for place, (argument, kind) in enumerate(arguments.items())
        ]
        try:
            self.arguments = msgspec.defstruct("arguments", fields, array_like=True, forbid_unknown_fields=True)
            for kind in (self.arguments, result):
                msgspec.msgpack.Decoder(kind, dec_hook=fitting)
        except TypeError as error:
            raise UsageError(f"{name} cannot be called from afar: {error}") from None

    @classmethod
    def of(cls, function: Callable[..., Awaitable[R] | R], name: str = "") -> Procedure[R]:
        """As its annotations say."""
        name = name or function.__name__
        hints = get_type_hints(function)
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.kind not in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
                raise UsageError(f"{name}: arguments are passed by position from afar, so {parameter} is not possible")
            if parameter.name not in hints:
                raise UsageError(f"{name}: what {parameter.name} is has to be annotated")
        if "return" not in hints:
            raise UsageError(f"{name}: what it returns has to be annotated")
        defaults = [parameter.default for parameter in parameters if parameter.default is not parameter.empty]
        return cls(name, {parameter.name: hints[parameter.name] for parameter in parameters}, hints["return"], defaults)

    def __repr__(self) -> str:
        return f"<procedure {self.name}>"


class Registry:
    """The functions that a peer may call, and the errors of ours that travel as themselves.

    An array that a function returns is not copied: it is not to be changed before it is sent."""

    def __init__(self, errors: Sequence[type[HcsimError]] = ()) -> None:
        self.errors = {**OUR_ERRORS, **{error.__name__: error for error in errors}}
        self._served: dict[str, tuple[Procedure[Any], Callable[..., Any]]] = {}

    def add(self, function: Callable[..., Any], name: str = "") -> Procedure[Any]:
        """Serve a function under its name, or another one, with the types of its annotations."""
        return self.serve(Procedure.of(function, name), function)

    def serve(self, procedure: Procedure[R], function: Callable[..., Awaitable[R] | R]) -> Procedure[R]:
        """Serve a known procedure by this function."""
        if procedure.name in self._served:
            raise UsageError(f"{procedure.name} is served already")
        self._served[procedure.name] = (procedure, function)
        return procedure

    def find(self, name: str) -> tuple[Procedure[Any], Callable[..., Any]] | None:
        """What is served under that name."""
        return self._served.get(name)
