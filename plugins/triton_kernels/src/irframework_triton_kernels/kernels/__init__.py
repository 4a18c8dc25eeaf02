"""The kernels, one module per family. They own the arithmetic, and which element of which tensor a program reads.

Every kernel computes in float32 and rounds where the op's meaning rounds (`irframework.ops`): values are widened after
each load and narrowed before each store, never computed with in a 16-bit type. Row numbers are 64-bit, so that offsets
are. Outputs are contiguous. They do not choose tiles (`tiles`) or launch (`launch`), and know nothing of irframework.

The functions are in Triton's language: their parameters have no Python types.
"""
