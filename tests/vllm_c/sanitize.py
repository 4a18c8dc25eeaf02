"""Calls each CUDA kernel on a few small shapes, for `compute-sanitizer`. Not a test: pytest does not collect it.

    compute-sanitizer --tool memcheck --error-exitcode 1 python tests/vllm_c/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python tests/vllm_c/sanitize.py

Tensors fill their allocations to the last byte, so that what reads or writes past a row is past an allocation, too.
Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1: torch's allocator hides such accesses. A minute under either tool.
"""

import sys

import torch
from irframework_vllm_c import implementations, library

K = torch.ops.irframework_vllm_c
# Rows and columns: one vector, several rows in a warp, odd ones, several warps, a cluster of blocks, too long to hold.
SHAPES = [(3, 8), (5, 128), (2, 33), (3, 1030), (2, 4096), (300, 2048), (2, 40000), (1, 300000)]
PLANS = [
    {},
    {"threads": 64, "vectors": 4, "cluster": 4, "rows_per_block": 1},
    {"threads": 128, "vectors": 4, "blocks_per_sm": 1, "ahead": 1, "rows_per_block": 2},
]


def call_all(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Every kernel once, on fresh tensors."""
    x, gate = (torch.randn(rows, columns * times, device="cuda").to(dtype) for times in (1, 2))
    weight, scale = torch.randn(columns, device="cuda").to(dtype), torch.full((1,), 0.02, device="cuda")
    for each in (weight, weight.float(), None):
        K.rms_norm.default(x, each, 1e-6)
        K.rms_norm_static_quant_fp8.default(x, each, scale, 1e-6)
        K.rms_norm_dynamic_quant_fp8.default(x, each, 1e-6)
        K.fused_add_rms_norm_functional.default(x, x.clone(), each, 1e-6)
        K.fused_add_rms_norm.default(x.clone(), x.clone(), each, 1e-6)
        K.fused_add_rms_norm_static_quant_fp8.default(x, x.clone(), each, scale, 1e-6)
        K.fused_add_rms_norm_dynamic_quant_fp8.default(x, x.clone(), each, 1e-6)
    K.silu_and_mul.default(gate)
    K.gelu_and_mul.default(gate, False)
    K.gelu_and_mul.default(gate, True)
    K.silu_and_mul_static_quant_fp8.default(gate, scale)
    K.silu_and_mul_dynamic_quant_fp8.default(gate)
    K.static_quant_fp8.default(x, scale)
    K.dynamic_quant_fp8.default(x)


def turn(head_size: int, rotary_dim: int, dtype: torch.dtype) -> None:
    """The rotary embedding, both ways."""
    positions, cache = torch.arange(5, device="cuda"), torch.randn(6, rotary_dim, device="cuda")
    query, key = (torch.randn(5, heads * head_size, device="cuda").to(dtype) for heads in (3, 1))
    for is_neox in (True, False):
        K.rotary_embedding.default(positions, query, key, cache, head_size, is_neox)
        K.rotary_embedding_query.default(positions, query, cache.to(dtype), head_size, is_neox)


def main() -> int:
    """0 if every kernel was launched and ended."""
    ready = implementations.cuda_kernels_load()
    if ready is not True:
        print(f"error: the CUDA kernels do not run here: {ready}", file=sys.stderr)
        return 1
    for dtype in (torch.bfloat16, torch.float32):
        for plan in PLANS:
            library.use_cuda_plan(**plan)
            for rows, columns in SHAPES:
                call_all(rows, columns, dtype)
            torch.cuda.synchronize()
        library.use_cuda_plan()
        turn(64, 64, dtype)
        turn(20, 12, dtype)
        torch.cuda.synchronize()
    print("every kernel ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
