"""The registration functions for plugins and the types that they need: `from hcsim.plugins import
register_compressor, …`.

A plugin is a module outside the package that calls these functions when it is imported. A scenario or a
sweep names it (`plugins = ["ternary.py"]`), a command does (`--plugin ternary.py`), a program imports it, or it
is installed (see `hcsim.registry`). Its names can then be written, listed, swept and simulated like
built-in ones; `hcsim.testing` checks that they behave alike. Examples are in `examples/plugins`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hcsim.collectives.algorithms import register_algorithm
from hcsim.compressors.codec import FlatCompressor
from hcsim.compressors.registry import register as register_compressor
from hcsim.config import Machine
from hcsim.config.faults import FAULTS, Fault
from hcsim.config.home import MEDIA, OWN_MEDIA, AnyMedium
from hcsim.config.machine import CATALOGUE
from hcsim.errors import UsageError
from hcsim.registry import load_plugin
from hcsim.training.memory import Held
from hcsim.training.optimizer import AdamW, Sgd
from hcsim.training.recoverable import Periodic, Recoverable, Replicated
from hcsim.training.strategies import STRATEGIES, FixedRanks, Strategy, one_level, optimizer
from hcsim.training.task import TaskSpec
from hcsim.training.tasks import TASKS, TaskFactory
from hcsim.virtual.environment import NS
from hcsim.virtual.faults.apply import FaultProcess, apply, lasting

if TYPE_CHECKING:
    from hcsim.virtual.world import World

__all__ = [
    "NS",
    "AdamW",
    "Fault",
    "FaultProcess",
    "FixedRanks",
    "FlatCompressor",
    "Held",
    "Periodic",
    "Recoverable",
    "Replicated",
    "Sgd",
    "Strategy",
    "TaskSpec",
    "lasting",
    "load_plugin",
    "one_level",
    "optimizer",
    "register_algorithm",
    "register_compressor",
    "register_fault",
    "register_machine",
    "register_medium",
    "register_strategy",
    "register_task",
]


def register_strategy(name: str, kind: type[Any]) -> None:
    """Register a strategy: a frozen `msgspec.Struct`, whose fields are set by a spec.

    With `open(self, settings, learner)`, which returns a `Recoverable`, it trains fixed ranks and clusters;
    with `async def train(self, run)` fixed ranks only."""
    trains = any(callable(getattr(kind, method, None)) for method in ("open", "train"))
    if not trains or not hasattr(kind, "__struct_fields__"):
        raise UsageError(f"strategy {name}: expected a msgspec.Struct with a method open or train, not {kind!r}")
    STRATEGIES.add(name, kind)


def register_task(name: str, make: TaskFactory) -> None:
    """Register a task; `make` is called on its first use. A `TaskSpec` has figures that a spec sets."""
    TASKS.add(name, make)


def register_machine(machine: Machine) -> None:
    """Register a machine, which nodes of a scenario can then name."""
    CATALOGUE.add(machine.name, machine)


def register_medium(kind: type[AnyMedium]) -> None:
    """Register a medium: a subclass of `Ethernet`, `Wifi` or `Thunderbolt` with its own tag and figures."""
    tag = kind.__struct_config__.tag
    if not issubclass(kind, OWN_MEDIA) or tag is None:
        raise UsageError(f"medium {kind.__name__}: expected a tagged subclass of Ethernet, Wifi or Thunderbolt")
    MEDIA.add(str(tag), kind)


def register_fault(kind: type[Fault], strike: Callable[[Any, World], FaultProcess | None]) -> None:
    """Register a fault: a tagged subclass of `Fault`, and its effect on the world, as a SimPy process or
    immediate."""
    tag = kind.__struct_config__.tag
    if not issubclass(kind, Fault) or tag is None:
        raise UsageError(f"fault {kind.__name__}: expected a tagged subclass of Fault")
    FAULTS.add(str(tag), kind)
    apply.register(kind)(strike)
