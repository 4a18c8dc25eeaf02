"""A stage either completes or leaves the module the graph it had; what failed is said, and can be read in a file.

Owns the copies of the graph that are kept meanwhile, the restoring, and the file. Does not own the passes.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.fx import Graph, GraphModule, Node

from irframework.compiler.materialize import COPY, KERNEL
from irframework.compiler.pass_checks import BrokenGraph
from irframework.compiler.report import FailedPass, Report, graph_text, location
from irframework.errors import DonationError, IrError, VerifyError
from irframework.torch_ops import op_of

_numbers = itertools.count(1)


@dataclass(slots=True)
class Attempt:
    """One stage at work on one graph.

    Attributes:
        graph: The graph that is rewritten in place.
        report: Knows the node that the running pass is at, and gets the failure.
        before: The graph as it was before the stage.
        modules: The graph's module, and inner ones that the stage rewrites, each with its graph before the stage.
    """

    graph: Graph
    report: Report
    before: Graph
    modules: list[tuple[GraphModule, Graph]]

    @classmethod
    def at(cls, graph: Graph, report: Report, *, nested: bool = False) -> Attempt:
        """Begin a stage.

        Args:
            graph: The graph that its passes will rewrite.
            report: Where they say what they do.
            nested: Whether they rewrite graphs of inner modules (branches, checkpoints) as well.
        """
        before = copy.deepcopy(graph)
        owner = graph.owning_module
        modules: list[tuple[GraphModule, Graph]] = []
        if isinstance(owner, GraphModule) and owner.graph is graph:
            modules.append((owner, before))
            if nested:
                inner = [each for each in owner.modules() if isinstance(each, GraphModule) and each is not owner]
                modules += [(each, copy.deepcopy(each.graph)) for each in inner]
        return cls(graph, report, before, modules)

    @contextmanager
    def step(
        self, name: str, *, first: bool = False, optional: bool = True, origin: str | None = None
    ) -> Iterator[None]:
        """Run one pass; if it fails, give the module its graph back and say what failed, and where.

        Args:
            name: The pass.
            first: Whether it is the first one of the stage, so that the graph need not be copied again.
            optional: Whether it can be switched off.
            origin: Who brought it, if it is not ours.

        Raises:
            IrError: Whatever the pass raised, with the place of the graph's text; anything else as `VerifyError`.
        """
        before = self.before if first else copy.deepcopy(self.graph)
        self.report.visiting = None
        try:
            yield
        except DonationError:  # the program is wrong, not the pass
            self.restore()
            raise
        except Exception as error:
            failed = self._describe(name, before, error)
            self.report.failed = failed
            self.restore()
            ending = f"\n  The graph before pass {name!r}: {failed.file}" if failed.file else ""
            said = f" It is of {origin}." if origin else ""
            advice = f" IRFRAMEWORK_DISABLE_PASSES={name} switches it off." if optional else ""
            if isinstance(error, IrError):
                raised = f"\n  Raised in compiler pass {name!r}.{said}{advice}" if origin else ""
                error.args = (f"{error}{raised}{ending}", *error.args[1:])
                raise
            if isinstance(error, BrokenGraph):
                raise VerifyError(f"Compiler pass {name!r} broke the graph: {error}.{said}{advice}{ending}") from error
            at = f" at {failed.where}" if failed.where else ""
            raise VerifyError(
                f"Compiler pass {name!r} failed{at}: {type(error).__name__}: {error}.{said}{advice}{ending}"
            ) from error
        finally:
            self.report.visiting = None

    def restore(self) -> None:
        """Give the modules the graphs that they had before the stage."""
        for module, graph in self.modules:
            module.graph = graph

    def _describe(self, name: str, before: Graph, error: Exception) -> FailedPass:
        node = self.report.visiting
        where = "" if node is None else f"{_op_text(node)}node {node.name}{location(node)}"
        text = f"pass {name!r} failed{' at ' if where else ''}{where}\n{type(error).__name__}: {error}\n\n"
        return FailedPass(name, where, str(error), _write(name, text + graph_text(before) + "\n"))


def _op_text(node: Node) -> str:
    found = op_of(node.target) if node.op == "call_function" else None
    made_for = node.meta.get(COPY) or node.meta.get(KERNEL)
    op = found[0].name if found is not None else (made_for[0] if made_for else None)
    return f"op {op!r}, " if op else ""


def _write(name: str, text: str) -> str | None:
    """Write the text of a graph to a file of its own; None where nothing can be written."""
    from irframework.compiler import hooks

    try:
        folder = hooks.own_folder() / "failed"
        folder.mkdir(parents=True, exist_ok=True)
        safe = re.sub(r"[^\w.-]", "_", name)
        path = folder / f"{os.getpid()}-{next(_numbers)}-{safe}.txt"
        path.write_text(text, encoding="utf-8")
    except OSError:
        return None
    return str(path)
