"""Where the passes are put into Inductor, and everything that differs between torch versions.

Owns `install`, the configuration the backend compiles with, and what is asked of Inductor while it compiles. Does not
own the passes.

Read in torch 2.11 and 2.13. 2.13: each hook of `torch._inductor.config` takes a pass or a list of passes, and
`pre_grad_custom_pass` belongs to the cache key unless `pre_grad_pass_timing` is "early". 2.11: each hook takes one
pass, `pre_grad_custom_pass` is a plain callable that always runs before the key is made, and passes are not told
whether the graph is for inference. The guard builder's `guard_manager.root.add_lambda_guard`,
`add_python_lambda_leaf_guard_to_root` and `_get_closure_vars` are the same in both, and so are
`_dynamo.utils.counters`, `_inductor.list_mode_options`, `_inductor.virtualized.V.aot_compilation`,
`_inductor.runtime.cache_dir_utils.cache_dir` and the settings `fx_graph_cache` and `force_disable_caches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from torch._guards import Guard
from torch._inductor import config
from torch.fx import Graph

from irframework.compiler.foreign_passes import Given
from irframework.compiler.pipeline import InferenceAwarePass, PostPass, PreGradPass, PrePass

_PRE_GRAD, _PRE, _POST = "pre_grad_custom_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"


@cache
def _takes_lists() -> bool:
    return hasattr(config, "pre_grad_pass_timing")


class PassSequence(InferenceAwarePass):  # type: ignore[misc]
    """Several passes in a hook that takes one."""

    def __init__(self, passes: Sequence[Any]) -> None:
        self.passes = list(passes)

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Run all passes on a graph, in place."""
        for each in self.passes:
            if isinstance(each, (PrePass, PostPass)):
                each(graph, is_inference)
            else:
                each(graph)

    def uuid(self) -> Any | None:
        """All uuids in order; None (no caching) if one pass has none."""
        uuids = [each.uuid() if hasattr(each, "uuid") else None for each in self.passes]
        return None if None in uuids else tuple(uuids)


def _as_list(hook: Any) -> list[Any]:
    if hook is None:
        return []
    if isinstance(hook, PassSequence):
        return list(hook.passes)
    return list(hook) if isinstance(hook, (list, tuple)) else [hook]


def _with(hook: Any, ours: Any, *, first: bool) -> Any:
    others = [each for each in _as_list(hook) if type(each) is not type(ours)]
    passes = [ours, *others] if first else [*others, ours]
    if _takes_lists():
        return passes
    return passes[0] if len(passes) == 1 else PassSequence(passes)


def _holds(hook: Any, kind: type) -> bool:
    return type(hook) is kind or any(type(each) is kind for each in _as_list(hook))


def install() -> None:
    """Put the passes into stock Inductor, for this thread and context (Inductor's configuration is per context).

    Passes that others put there stay: pre-grad and pre passes of ours run before them, the post pass after them.
    Calling it again changes nothing.
    """
    if not _holds(config.pre_grad_custom_pass, PreGradPass):
        config.pre_grad_custom_pass = _with(config.pre_grad_custom_pass, PreGradPass(), first=True)
        if _takes_lists() and config.pre_grad_pass_timing == "default":
            config.pre_grad_pass_timing = "early"  # which inputs share memory is in no key; the rewritten graph is
    if not _holds(config.post_grad_custom_pre_pass, PrePass):
        config.post_grad_custom_pre_pass = _with(config.post_grad_custom_pre_pass, PrePass(), first=True)
    if not _holds(config.post_grad_custom_post_pass, PostPass):
        config.post_grad_custom_post_pass = _with(config.post_grad_custom_post_pass, PostPass(), first=False)


def donation_is_in_the_key() -> bool:
    """Whether the pre-grad pass runs before the cache key is made, so that it may decide by what shares memory."""
    return not _takes_lists() or config.pre_grad_pass_timing == "early"


def configuration(
    options: Mapping[str, Any], option_priority: Mapping[str, Any] | None, passes: Given = ()
) -> dict[str, Any]:
    """Inductor options for one compile: the user's own, with our passes beside theirs.

    Args:
        options: Inductor options by name.
        option_priority: The compile option `ir_op_priority`.
        passes: The compile option `ir_passes`.
    """
    patches: dict[str, Any] = {key.replace("-", "_"): value for key, value in options.items()}
    for name, ours, first in (
        (_PRE_GRAD, PreGradPass(), True),
        (_PRE, PrePass(option_priority, passes), True),
        (_POST, PostPass(option_priority, passes), False),
    ):
        hook = patches[name] if name in patches else getattr(config, name)
        patches[name] = _with(hook, ours, first=first)
    if _takes_lists():
        patches.setdefault("pre_grad_pass_timing", "early")
    return patches


def add_lambda_guard(builder: Any, test: Callable[[object], bool], text: str, guard: Guard) -> None:
    """Add a test of the whole frame to Dynamo's guards."""
    builder.guard_manager.root.add_lambda_guard(test, [text], guard.user_stack)


def add_expression_guard(builder: Any, expression: str, text: str, names: dict[str, Any]) -> None:
    """Add a Python expression over the frame's sources to Dynamo's guards; it runs after all others have passed."""
    from torch._dynamo.guards import _get_closure_vars

    builder.add_python_lambda_leaf_guard_to_root([expression], [text], {**_get_closure_vars(), **names})


def name_of(source: Any) -> str:
    """The Python expression of a Dynamo source (a property in 2.13, a method in 2.11)."""
    name = source.name
    return name if isinstance(name, str) else str(name())


def mode_options(mode: str | None) -> dict[str, Any]:
    """The Inductor options that a `mode=` of `torch.compile` stands for."""
    if mode is None or mode == "default":
        return {}
    from torch._inductor import list_mode_options

    return dict(list_mode_options(mode))


def cache_hits() -> int:
    """How many compiled graphs came from a cache so far, in this process."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"])


def own_folder() -> Path:
    """The framework's folder in Inductor's cache. It may not be there yet."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "irframework"


def caches_graphs() -> bool:
    """Whether Inductor keeps compiled graphs on disk."""
    return bool(config.fx_graph_cache) and not config.force_disable_caches


def compiles_ahead_of_time() -> bool:
    """Whether Inductor makes a package now (AOTInductor), which nothing compiles again."""
    from torch._inductor.virtualized import V

    return bool(V.aot_compilation)
