"""Every kernel becomes machine code for NVIDIA and AMD devices, with no device in this machine."""

import re
from dataclasses import dataclass

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

TARGETS = {"sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}
NUMBERS = [
    "rows",
    "hidden",
    "length",
    "variance_size",
    "x_stride",
    "x_residual_stride",
    "y_stride",
    "residual_stride",
    "positions_count",
    "query_heads",
    "key_heads",
    "head_size",
    "half",
    "query_stride",
    "query_head_stride",
    "key_stride",
    "key_head_stride",
    "cache_stride",
]
TENSORS = ["x", "x_residual", "weight", "y", "residual", "query", "key", "cache", "query_out", "key_out"]


@dataclass(frozen=True)
class Case:
    kernel: str
    warps: int
    constants: dict[str, object]

    def __str__(self) -> str:
        return self.kernel + "".join(f"-{name}={value}" for name, value in self.constants.items())


NORM = {"has_weight": True, "partial": False, "tile_rows": 1, "block": 4096}
ROTARY = {"has_key": True, "tile_heads": 16, "block": 64}
CASES = [
    Case("rms_norm_kernel", 8, {**NORM, "whole": True}),
    Case("rms_norm_kernel", 8, {**NORM, "whole": False, "partial": True}),
    Case("rms_norm_kernel", 4, {**NORM, "whole": True, "has_weight": False, "tile_rows": 16, "block": 128}),
    Case("add_rms_norm_kernel", 8, {**NORM, "whole": True}),
    Case("add_rms_norm_kernel", 8, {**NORM, "whole": False}),
    *(Case("gated_kernel", 4, {"activation": number, "tile_rows": 1, "block": 1024}) for number in range(3)),
    Case("rotary_kernel", 4, {**ROTARY, "is_neox": True, "rest_block": 0}),
    Case("rotary_kernel", 4, {**ROTARY, "is_neox": False, "rest_block": 32, "has_key": False}),
]


def compiled(case: Case, target: tuple, element: str, number: str = "i32", aligned: bool = False):
    from irframework_triton_kernels import kernels
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(kernels, case.kernel)
    types = dict.fromkeys(NUMBERS, number) | dict.fromkeys(TENSORS, f"*{element}")
    types |= {"epsilon": "fp32", "positions": "*i64"} | dict.fromkeys(case.constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in case.constants.items()},
        # What Triton finds out about real arguments: multiples of 16.
        attrs={
            (position,): [["tt.divisibility", 16]]
            for position, name in enumerate(kernel.arg_names)
            if aligned and types[name] in ("i32", "*bf16") and name not in ("rows", "positions_count")
        },
    )
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": case.warps}).asm


@pytest.fixture(autouse=True)
def cold_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_becomes_a_cubin(case):
    asm = compiled(case, TARGETS["sm_90"], "bf16")
    assert ".target sm_90" in asm["ptx"]
    assert asm["cubin"][:4] == b"\x7fELF"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_kernel_becomes_a_code_object(case):
    asm = compiled(case, TARGETS["gfx942"], "bf16")
    assert "gfx942" in asm["amdgcn"]
    assert asm["hsaco"][:4] == b"\x7fELF"


@pytest.mark.parametrize("element", ["fp32", "fp16"])
def test_the_other_dtypes_compile(element):
    assert compiled(CASES[0], TARGETS["sm_90"], element)["cubin"]


def test_sizes_and_strides_of_64_bits_compile():
    assert compiled(CASES[3], TARGETS["sm_90"], "bf16", number="i64")["cubin"]


ONES = {
    "rms_norm_kernel": ("hidden", "variance_size", "x_stride", "y_stride"),
    "gated_kernel": ("length", "x_stride", "y_stride"),
    "rotary_kernel": ("query_heads", "key_heads", "half", "query_head_stride", "positions_count"),
}


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[5], CASES[8], CASES[9]], ids=str)
def test_sizes_and_strides_of_one_compile(case):
    """Triton makes a number that is 1 a constant, which is another type in its language."""
    constants = case.constants | dict.fromkeys(ONES[case.kernel], 1)
    assert compiled(Case(case.kernel, case.warps, constants), TARGETS["sm_90"], "bf16")["cubin"]


@pytest.mark.parametrize("case", [case for case in CASES if case.constants.get("is_neox", True)], ids=str)
def test_rows_of_aligned_tensors_are_read_and_written_16_bytes_at_a_time(case):
    ptx = compiled(case, TARGETS["sm_90"], "bf16", aligned=True)["ptx"]
    accesses = set(re.findall(r"\b(?:ld|st)\.global[\w.]*", ptx)) - {"ld.global.b64"}  # a position
    assert accesses == {"ld.global.v4.b32", "st.global.v4.b32"}


def test_the_norm_sums_in_float32():
    ptx = compiled(CASES[0], TARGETS["sm_90"], "bf16")["ptx"]
    assert "fma.rn.f32" in ptx
    assert not any(f"{op}.bf16" in ptx for op in ("fma.rn", "add", "sub"))  # a lone product of two is rounded once
