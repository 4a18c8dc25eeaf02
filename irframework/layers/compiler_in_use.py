"""Whether the code that Dynamo traces now goes to Inductor.

Owns the question. It is asked while a layer is traced, and its answer is a constant of the compiled code.

Private torch API, read in 2.11 and 2.13: `_dynamo.symbolic_convert.InstructionTranslator.current_tx`, its
`output.compiler_fn`, and the attribute `_compiler_name` of that.
"""

from typing import Any

import torch

_INDUCTOR = ("inductor", "irframework")  # the framework's own backend hands over to Inductor


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def traced_for_inductor() -> bool:
    """Return whether Dynamo traces for Inductor; False outside Dynamo, and for other backends."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        compiler: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:  # not Dynamo that traces
        return False
    return getattr(compiler, "_compiler_name", None) in _INDUCTOR
