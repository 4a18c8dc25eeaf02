"""The platform's own compiler in the place of Inductor: `torch.compile(model, backend="standin")`."""

from torch._dynamo.backends.common import aot_autograd

import irframework as ir


def compile_for_device(gm, example_inputs):
    """`gm` holds torch ops and kernels only, once it is lowered. A real one would generate code for the device here."""
    return ir.compiler.lower(gm, example_inputs).forward


_aot = aot_autograd(fw_compiler=compile_for_device)


def standin(gm, example_inputs):
    return _aot(ir.compiler.run_pre_grad_stage(gm), example_inputs)
