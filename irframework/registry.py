"""The one table of ops and layers, and transactions over it.

Owns which ops and layers exist, finding an op by name, and the undo journal that makes a plugin's registrations
all-or-nothing. Does not know what an op, an implementation or a layer is.
"""

import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from irframework.errors import UnknownOpError, suggest

if TYPE_CHECKING:
    from irframework.op import IrOp


@dataclass(slots=True)
class Transaction:
    """What one plugin registered, newest last, with how to undo it."""

    plugin: str
    undo: list[Callable[[], None]] = field(default_factory=list)
    ops: set[str] = field(default_factory=set)
    providers: set[str] = field(default_factory=set)

    def roll_back(self) -> None:
        """Undo everything, newest first."""
        while self.undo:
            self.undo.pop()()
        self.ops.clear()
        self.providers.clear()


@dataclass(slots=True)
class Registry:
    """The ops by name, and a number that grows with every change that can alter a decision.

    Attributes:
        ops: The ops by name.
        layers: Classes of layers by the name that they were registered under.
        replacements: Classes by the class name of the layer that they stand in for.
        generation: Grows with every registration or configuration.
        transaction: The plugin that is registering in this thread's load, if any.
    """

    ops: dict[str, "IrOp"] = field(default_factory=dict)
    layers: dict[str, type] = field(default_factory=dict)
    replacements: dict[str, type] = field(default_factory=dict)
    generation: int = 0
    transaction: Transaction | None = None
    lock: threading.RLock = field(default_factory=threading.RLock)

    def changed(self) -> None:
        """Say that decisions may differ from now on: every generated dispatcher is made anew at its next call."""
        with self.lock:
            self.generation += 1
            for op in self.ops.values():
                op.reset_dispatch()

    def current(self, op: "IrOp") -> "IrOp":
        """Return the op that has an op's name now: after a roll-back another one may have taken it over."""
        return self.ops.get(op.name, op)

    def record(self, undo: Callable[[], None]) -> None:
        """Remember how to undo a registration, if a plugin is registering."""
        if self.transaction is not None:
            self.transaction.undo.append(undo)

    @contextmanager
    def registering(self, transaction: Transaction) -> Iterator[None]:
        """Attribute every registration inside to a plugin; undo all of them if the block raises."""
        with self.lock:
            outer, self.transaction = self.transaction, transaction
            try:
                yield
            except BaseException:
                self.transaction = None
                transaction.roll_back()
                raise
            finally:
                self.transaction = outer


registry = Registry()


def _reset_in_child() -> None:
    """After a fork: another thread may have held the lock."""
    registry.lock = threading.RLock()
    registry.transaction = None


os.register_at_fork(after_in_child=_reset_in_child)


def find_op(name: str) -> "IrOp":
    """Return the op with a name, loading the standard ops and the plugins if need be.

    Raises:
        UnknownOpError: Nobody declared it; the message lists the closest names.
    """
    op = registry.ops.get(name)
    if op is None:
        importlib.import_module("irframework.ops")
        op = registry.ops.get(name)
    if op is None:
        load_plugins()
        op = registry.ops.get(name)
    if op is None:
        raise UnknownOpError(f"There is no op {name!r}.{suggest(name, registry.ops)}", name=name)
    return op


def all_ops() -> dict[str, "IrOp"]:
    """Return all ops by name: the standard ones and those of plugins and of the program."""
    importlib.import_module("irframework.ops")
    load_plugins()
    return dict(sorted(registry.ops.items()))


def load_plugins() -> bool:
    """Load the plugins if they were not loaded yet, and return whether they are; cheap afterwards."""
    plugins = sys.modules.get("irframework.plugins") or importlib.import_module("irframework.plugins")
    return bool(plugins.load_plugins())
