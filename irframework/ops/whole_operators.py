"""When a part of native is one torch operator, and when it is torch's own ops.

Parts whose form follows from the sizes (rounds over blocks, layouts of segments) are operators of the namespace
`irframework_native`: Inductor keeps them whole, and compiles what is around them. Owns when they must be seen through.
Does not hold them.
"""

import torch


def seen_through() -> bool:
    """Whether torch's own ops are wanted: transforms and forward-mode derivatives know no others."""
    from irframework.execution import transformed

    return not torch.compiler.is_dynamo_compiling() and transformed()
