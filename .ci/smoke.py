"""Runs in a fresh environment that holds only the built wheels: do they work together?

Owns the smallest proof of that: the plugin is found, its kernels load, and they compute what native does.
"""

import sys

import torch

import irframework as ir


def main() -> int:
    """Print what was found; 1 if the kernels of the wheel do not run."""
    from irframework_vllm_c import instruction_set

    print("irframework", ir.__version__, "at", ir.__file__)
    print("instruction set:", instruction_set())
    x, weight = torch.randn(4, 64), torch.randn(64)
    print(ir.explain("rms_norm", x, weight, 1e-6))
    chosen = ir.ops.rms_norm.dispatch(x, weight, 1e-6).provider
    tolerance = ir.ops.rms_norm.get_tolerance(x.dtype)
    torch.testing.assert_close(
        ir.ops.rms_norm(x, weight, 1e-6),
        ir.ops.rms_norm.native(x, weight, 1e-6),
        atol=tolerance.atol,
        rtol=tolerance.rtol,
    )
    return 0 if chosen == "vllm_c" else 1


if __name__ == "__main__":
    sys.exit(main())
