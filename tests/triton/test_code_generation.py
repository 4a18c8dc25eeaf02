"""Every kernel becomes machine code for NVIDIA and AMD devices, with no device in this machine."""

import importlib.util
import re
import subprocess
from dataclasses import dataclass, replace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="triton is not installed")

TARGETS = {
    "sm_80": ("cuda", 80, 32),
    "sm_89": ("cuda", 89, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "sm_120": ("cuda", 120, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
}
CONVERTS = ("sm_89", "sm_90", "sm_100", "sm_120", "gfx950")  # float32 to float8_e4m3fn, in one instruction
LOADED_EARLY = ("sm_90", "sm_100", "sm_120")
MODULES = {
    "rms_norm_kernel": "norms",
    "add_rms_norm_kernel": "norms",
    "rms_norm_groups_kernel": "norms",
    "add_rms_norm_groups_kernel": "norms",
    "gated_kernel": "gated",
    "gated_rows_kernel": "gated",
    "gates_apart_kernel": "gated",
    "rotary_kernel": "rotary",
    "rotate_half_kernel": "rotate_half",
    "cache_kernel": "kv_cache",
    "rotary_cache_kernel": "kv_cache",
    "activation_kernel": "activations",
    "group_codes_kernel": "group_codes",
    "largest_kernel": "group_codes",
    "tensor_codes_kernel": "group_codes",
    "nvfp4_kernel": "nvfp4",
    "rms_norm_nvfp4_kernel": "nvfp4",
    "add_rms_norm_nvfp4_kernel": "nvfp4",
    "routing_kernel": "routing",
    "decode_kernel": "decoding",
    "shares_kernel": "decoding",
    "latent_kernel": "latent",
    "sum_norm_kernel": "sums",
    "gated_product_of_one_kernel": "products",
    "gated_product_kernel": "products",
}
TENSORS = (
    "x", "x_residual", "weight", "y", "residual",
    "query", "key", "value", "cache", "query_weight", "key_weight", "query_out", "key_out", "key_cache", "value_cache",
    "alpha_p", "alpha_n", "query_rope", "x_up", "cos", "sin",
)  # fmt: skip
VALUES, STATIC, DYNAMIC, INT8 = range(4)
AROUND_ONE = 2
SILU, GELU, GELU_TANH, NO_GATE = range(4)
GELU_NEW, GELU_FAST, QUICK_GELU, RELU2, XIELU, MUL_SILU, FATRELU, SWIGLUOAI = range(8)


@dataclass(frozen=True)
class Case:
    kernel: str
    warps: int
    constants: dict[str, Any]
    stages: int = 0

    def __str__(self) -> str:
        return self.kernel + "".join(f"-{name}={value}" for name, value in self.constants.items())

    def on(self, target: str) -> "Case":
        """The case as it is launched there."""
        constants = self.constants | {"early": target in LOADED_EARLY}
        if "codes" in constants:
            constants["hardware"] = target in CONVERTS and constants["codes"] in (STATIC, DYNAMIC)
        elif "hardware" in constants:
            constants["hardware"] = target in CONVERTS
        return replace(self, constants=constants)


def grouped(kernel: str, hidden: int, **more: Any) -> Case:
    """A norm that ends in codes of groups."""
    whole = rows(kernel, hidden, VALUES, hardware=True, has_weight=True, **more)
    return replace(whole, constants={k: v for k, v in whole.constants.items() if k not in ("codes", "resident")})


def summed(hidden: int, codes: int, **more: Any) -> Case:
    """A norm of a sum over processes."""
    whole = rows("sum_norm_kernel", hidden, codes, hardware=True, **more)
    return replace(whole, constants={k: v for k, v in whole.constants.items() if k not in ("tail", "resident")})


def nvfp4(kernel: str, hidden: int, has_weight: bool = True) -> Case:
    """A norm that ends in NVFP4."""
    whole = rows(kernel, hidden, VALUES, has_weight=has_weight)
    return replace(whole, constants={k: v for k, v in whole.constants.items() if k not in ("codes", "resident")})


def rows(kernel: str, hidden: int, codes: int, **more: Any) -> Case:
    """A kernel that reduces rows, with the tile it has for rows of a length."""
    from irframework_triton_kernels import tiles

    kinds = {"rms_norm_kernel": tiles.NORM, "add_rms_norm_kernel": tiles.ADD_NORM}
    kinds |= {"rms_norm_groups_kernel": tiles.NORM, "add_rms_norm_groups_kernel": tiles.ADD_NORM}
    kinds |= {"rms_norm_nvfp4_kernel": tiles.NORM, "add_rms_norm_nvfp4_kernel": tiles.ADD_NORM}
    kinds |= {"sum_norm_kernel": tiles.ADD_NORM}
    gated = tiles.CODES if more.get("activation") == NO_GATE else tiles.GATED_CODES
    tile = tiles.row_tile(hidden, kinds.get(kernel, gated), many=True)
    constants = {"codes": codes, "tile_rows": tile.rows, "block": tile.block, "tail": tile.tail, "whole": tile.whole}
    return Case(kernel, tile.warps, {**constants, "resident": 0, **more})


NORM = {"has_weight": True, "partial": False}
ELEMENTS = {"tile_rows": 1, "block": 1024}
IN_A_ROW = {**ELEMENTS, "blocks": 0}
NORMLESS = {"normed": False, "has_query_weight": False, "has_key_weight": False}
NORMED = {"normed": True, "has_query_weight": True, "has_key_weight": True}
ROTARY = {"has_key": True, "tile_heads": 16, "block": 64, **NORMLESS}
COPIED = {"value_tile_heads": 8, "value_block": 128}
CACHED = {"tile_heads": 16, "block": 64, **COPIED, **NORMLESS}
GROUPS = {"activation": NO_GATE, "hardware": True, "group_size": 128, "tile_rows": 16, "block": 128}
PRODUCT = {"length": 4096, "hidden": 14336}
FEW_PRODUCTS = {"tile_rows": 16, "columns": 64, "block": 128, "turn": 5}
CASES = [
    rows("rms_norm_kernel", 4096, VALUES, **NORM),
    rows("rms_norm_kernel", 100_000, VALUES, has_weight=True, partial=True),
    rows("rms_norm_kernel", 128, VALUES, has_weight=False, partial=False),
    rows("rms_norm_kernel", 5120, STATIC, **NORM),
    rows("rms_norm_kernel", 8192, DYNAMIC, **NORM),
    rows("rms_norm_kernel", 100_000, DYNAMIC, **NORM),
    rows("add_rms_norm_kernel", 4096, VALUES, **NORM),
    rows("add_rms_norm_kernel", 100_000, VALUES, **NORM),
    rows("add_rms_norm_kernel", 8192, STATIC, **NORM),
    rows("add_rms_norm_kernel", 5120, DYNAMIC, **NORM),
    *(Case("gated_kernel", 4, {"activation": a, "codes": VALUES, **IN_A_ROW}) for a in (SILU, GELU, GELU_TANH)),
    Case("gated_kernel", 4, {"activation": SILU, "codes": STATIC, **IN_A_ROW, "blocks": 4}),
    Case("gated_kernel", 4, {"activation": NO_GATE, "codes": STATIC, **IN_A_ROW, "block": 2048}),
    rows("gated_rows_kernel", 14336, DYNAMIC, activation=SILU),
    rows("gated_rows_kernel", 5120, DYNAMIC, activation=NO_GATE),
    rows("gated_rows_kernel", 100_000, DYNAMIC, activation=SILU),
    Case("rotary_kernel", 4, {**ROTARY, "is_neox": True, "rest_block": 0}),
    Case("rotary_kernel", 4, {**ROTARY, "is_neox": False, "rest_block": 32, "has_key": False}),
    Case("cache_kernel", 4, {"key_tile_heads": 8, "key_block": 128, **COPIED}),
    Case("rotary_cache_kernel", 4, {**CACHED, "is_neox": True, "rest_block": 0}),
    Case("rotary_cache_kernel", 4, {**CACHED, "is_neox": False, "rest_block": 32}),
    *(Case("activation_kernel", 4, {"activation": a, **ELEMENTS}) for a in (QUICK_GELU, XIELU, FATRELU)),
    Case("activation_kernel", 4, {"activation": SWIGLUOAI, **ELEMENTS, "block": 512}),
    rows("rms_norm_kernel", 4096, VALUES, has_weight=AROUND_ONE, partial=False),
    rows("add_rms_norm_kernel", 4096, VALUES, has_weight=AROUND_ONE, partial=False),
    rows("gated_rows_kernel", 4096, INT8, activation=NO_GATE),
    Case("group_codes_kernel", 4, {**GROUPS, "column_major": False, "power_of_two": False}),
    Case("group_codes_kernel", 4, {**GROUPS, "column_major": True, "power_of_two": True}),
    Case("group_codes_kernel", 4, {**GROUPS, "activation": SILU, "column_major": False, "power_of_two": True}),
    Case("largest_kernel", 8, {"tile_rows": 1, "block": 4096}),
    Case("tensor_codes_kernel", 4, {**ELEMENTS, "block": 2048, "parts": 512, "hardware": True}),
    grouped("rms_norm_groups_kernel", 7168, group_size=128, column_major=False, power_of_two=False),
    grouped("rms_norm_groups_kernel", 5120, group_size=64, column_major=True, power_of_two=True),
    grouped("add_rms_norm_groups_kernel", 7168, group_size=128, column_major=True, power_of_two=True),
    grouped("add_rms_norm_groups_kernel", 4096, group_size=64, column_major=False, power_of_two=False),
    grouped("add_rms_norm_groups_kernel", 100_000, group_size=32, column_major=False, power_of_two=False),
    Case("gates_apart_kernel", 4, {"activation": SILU, **IN_A_ROW}),
    Case("gates_apart_kernel", 4, {"activation": GELU_TANH, **IN_A_ROW}),
    Case("rotate_half_kernel", 4, {"tile_heads": 16, "block": 64}),
    Case("nvfp4_kernel", 4, {"activation": NO_GATE, "tile_rows": 1, "block": 2048}),
    Case("nvfp4_kernel", 4, {"activation": SILU, **ELEMENTS}),
    nvfp4("rms_norm_nvfp4_kernel", 4096),
    nvfp4("rms_norm_nvfp4_kernel", 5120),
    nvfp4("add_rms_norm_nvfp4_kernel", 7168),
    nvfp4("add_rms_norm_nvfp4_kernel", 100_000, False),
]
# Tokens of 256 experts, and of 256 in 8 groups: they are not what memory is read for, so how it is read is not tested.
ROUTING = {"top_k": 8, "top_block": 8, "renormalize": True, "tile_rows": 2}
DECODE = {
    "kv_heads": 8, "group": 4, "block_size": 16, "tile_heads": 16, "tile_keys": 64, "head_size": 128,
    "value_size": 128, "head_block": 128, "value_block": 128,
}  # fmt: skip
LATENT = {  # DeepSeek's
    "heads": 128, "rank": 512, "rope": 64, "block_size": 64, "rank_block": 512, "rope_block": 64,
}  # fmt: skip
SUMMED = {"has_weight": True, "rank": 1, "size": 2, "size_block": 2}
NO_CODES, CODED = {"has_codes": False, "hardware": True}, {"has_codes": True, "hardware": True}
PLAIN = {"has_cap": False, "has_window": False, "has_sinks": False, **NO_CODES}
FANCY = {"has_cap": True, "has_window": True, "has_sinks": True, **NO_CODES}
FEW = [
    nvfp4("rms_norm_nvfp4_kernel", 128),
    Case("nvfp4_kernel", 4, {"activation": NO_GATE, "tile_rows": 128, "block": 16}),
    grouped("rms_norm_groups_kernel", 512, group_size=128, column_major=True, power_of_two=False),
    Case("decode_kernel", 4, {**DECODE, **PLAIN, "shared": True}),
    Case("decode_kernel", 4, {**DECODE, **FANCY, "shared": False}),
    Case("decode_kernel", 4, {**DECODE, **PLAIN, **CODED, "shared": False}),
    Case("shares_kernel", 4, {"has_sinks": True, **NO_CODES, "share_block": 32, "value_block": 128}),
    Case("shares_kernel", 4, {**CODED, "has_sinks": False, "share_block": 32, "value_block": 128}),
    Case("latent_kernel", 4, {**LATENT, **NO_CODES, "shared": True, "tile_heads": 16, "tile_keys": 32}, stages=2),
    Case("latent_kernel", 8, {**LATENT, **NO_CODES, "shared": True, "tile_heads": 32, "tile_keys": 64}, stages=2),
    Case("latent_kernel", 8, {**LATENT, **CODED, "shared": False, "tile_heads": 64, "tile_keys": 64}, stages=1),
    Case("shares_kernel", 8, {"has_sinks": False, **NO_CODES, "share_block": 32, "value_block": 512}),
    Case("rotary_kernel", 4, {**ROTARY, **NORMED, "is_neox": True, "rest_block": 0}),
    Case("rotary_kernel", 4, {**ROTARY, **NORMED, "is_neox": False, "rest_block": 32}),
    Case("rotary_cache_kernel", 4, {**CACHED, **NORMED, "is_neox": True, "rest_block": 0}),
    Case("rotary_cache_kernel", 4, {**CACHED, **NORMED, "is_neox": False, "rest_block": 32}),
    Case("routing_kernel", 2, {
        **ROUTING, "groups": 1, "members": 256, "top_groups": 0, "counted": 1, "by_logits": True, "has_bias": False,
        "scoring": 0, "group_block": 1, "member_block": 256,
    }),
    Case("routing_kernel", 2, {
        **ROUTING, "groups": 8, "members": 32, "top_groups": 4, "counted": 2, "by_logits": False, "has_bias": True,
        "scoring": 1, "group_block": 8, "member_block": 32,
    }),
    summed(4096, VALUES, has_residual=True, **SUMMED),
    summed(100_000, VALUES, has_residual=False, **SUMMED),
    summed(4096, STATIC, has_residual=True, **SUMMED | {"size": 6, "size_block": 8}),
    Case("gated_product_of_one_kernel", 4, {**PRODUCT, "codes": VALUES, "block": 2048}),
    Case("gated_product_of_one_kernel", 4, {**PRODUCT, "codes": STATIC, "block": 2048}),
    Case("gated_product_kernel", 4, {**PRODUCT, "codes": VALUES, **FEW_PRODUCTS}, stages=3),
    Case("gated_product_kernel", 4, {**PRODUCT, "codes": STATIC, **FEW_PRODUCTS, "tile_rows": 64}, stages=3),
]  # fmt: skip
# One of each kernel and of what it stores: for the devices that are close relatives of another.
MAIN = list({(case.kernel, case.constants.get("codes")): case for case in reversed(CASES + FEW)}.values())
STAYING = [replace(case, constants=case.constants | {"resident": 1}) for case in (CASES[4], CASES[9])]


def kernel_of(case: Case) -> Any:
    module = importlib.import_module(f"irframework_triton_kernels.kernels.{MODULES[case.kernel]}")
    return getattr(module, case.kernel)


def compiled(
    case: Case,
    target: str,
    element: str = "bf16",
    number: str = "i32",
    aligned: bool = False,
    kernel: Any = None,
    epsilon: str = "fp32",
):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    case = case.on(target)
    kernel = kernel or kernel_of(case)
    types = dict.fromkeys(kernel.arg_names, number) | dict.fromkeys(TENSORS, f"*{element}")
    types |= {"code_scale": "*fp32", "epsilon": epsilon, "positions": "*i64", "slots": "*i64"}
    types |= {"first": epsilon, "second": epsilon}
    types |= {"most": "*i32", "logits": "*bf16", "bias": "*fp32", "weights": "*fp32", "ids": "*i32", "factor": epsilon}
    types |= dict.fromkeys(("offsets", "lengths", "table"), "*i32") | dict.fromkeys(("scale", "soft_cap"), epsilon)
    types |= dict.fromkeys(("largest", "total", "parts", "sinks"), "*fp32")
    types |= {"places": "*i64", "counts": "*i32"}
    types["out"] = "*fp32" if case.constants.get("shared") else f"*{element}"
    if case.constants.get("has_codes"):
        types["out"] = "*fp8e4nv" if case.constants["hardware"] else "*u8"
    if case.constants.get("codes", "hardware" in case.constants):
        types["y"] = "*fp8e4nv" if case.constants["hardware"] else "*u8"
    if case.constants.get("codes") == INT8:
        types["y"] = "*i8"
    types |= {"global_scale": "*fp32", "packed": "*u8", "x_scale": "*fp32", "weight_scale": "*fp32"}
    if MODULES[case.kernel] == "products" and case.constants["codes"]:
        types |= dict.fromkeys(("x", "weight"), "*fp8e4nv")
    types["block_scale"] = "*fp8e4nv" if target in CONVERTS else "*u8"
    types |= dict.fromkeys({"hardware": False} | case.constants, "constexpr")
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in case.constants.items()},
        # What Triton finds out about real arguments: multiples of 16.
        attrs={
            (position,): [["tt.divisibility", 16]]
            for position, name in enumerate(kernel.arg_names)
            if aligned
            and (types[name] == "i32" or types[name].startswith("*"))
            and name not in ("rows", "batches", "positions_count", "slot_count", "positions", "slots", "tokens")
        },
    )
    options = {"num_warps": case.warps, **({"num_stages": case.stages} if case.stages else {})}
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


@pytest.fixture(autouse=True, scope="module")
def cold_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


def of_codes(case: Case) -> bool:
    """Whether a kernel reads codes, which only devices do that make them."""
    return MODULES[case.kernel] == "products" and bool(case.constants["codes"])


def on(*targets: str) -> list[Any]:
    """All cases for the first of some targets, the main ones for its relatives."""
    pairs = [
        (case, target)
        for target in targets
        for case in (CASES + FEW if target == targets[0] else MAIN)
        if target in CONVERTS or not of_codes(case)
    ]
    return [pytest.param(case, target, id=f"{target}-{case}") for case, target in pairs]


@pytest.mark.parametrize(("case", "target"), on("sm_90", "sm_80", "sm_100"))
def test_every_kernel_becomes_a_cubin(case, target):
    asm = compiled(case, target, aligned=True).asm
    assert f".target {target}" in asm["ptx"]
    assert asm["cubin"][:4] == b"\x7fELF"


@pytest.mark.parametrize(("case", "target"), on("gfx942", "gfx90a", "gfx950"))
def test_every_kernel_becomes_a_code_object(case, target):
    asm = compiled(case, target).asm
    assert target in asm["amdgcn"]
    assert asm["hsaco"][:4] == b"\x7fELF"


DEVICES = {  # multiprocessors, and bytes of shared memory for a program at most
    "sm_80": (108, 166912), "sm_89": (128, 101376), "sm_90": (132, 232448), "sm_100": (148, 232448),
    "sm_120": (170, 101376), "gfx90a": (104, 65536), "gfx942": (304, 65536), "gfx950": (256, 163840),
}  # fmt: skip
ROWS = [(512, "bf16", 1), (512, "bf16", 8192), (256, "bf16", 8192), (64, "fp16", 8192), (512, "fp32", 8192)]
LATENT_ROWS = [
    (target, *row)
    for target in DEVICES
    # Close relatives of others, and machine code that takes half a minute to make.
    for row in (ROWS if target in ("sm_80", "sm_90", "sm_100", "gfx942") else ROWS[:2])
]


@pytest.mark.parametrize(("target", "rank", "element", "parts"), LATENT_ROWS)
def test_what_a_device_would_take_of_latent_attention_fits_its_shared_memory(target, rank, element, parts):
    from irframework_triton_kernels.tiles import latent_tile

    size = 4 if element == "fp32" else 2
    tile = latent_tile(128, rank, 64, size, *DEVICES[target], parts)
    sizes = {"rank": rank, "rank_block": rank, "tile_heads": tile.rows, "tile_keys": tile.block, "shared": parts == 1}
    kernel = compiled(Case("latent_kernel", tile.warps, {**LATENT, **NO_CODES, **sizes}, tile.stages), target, element)
    assert 0 < kernel.metadata.shared <= DEVICES[target][1]


@pytest.mark.parametrize(
    ("case", "element"),
    [
        *((case, "bf16") for case in CASES),  # compiled above
        *((case, "fp16") for case in CASES if case.kernel == "rotate_half_kernel"),
    ],
    ids=str,
)
def test_no_product_that_is_rounded_is_contracted_with_a_sum(case, element):
    ptx = compiled(case, "sm_90", element=element, aligned=True).asm["ptx"]
    assert not re.search(r"\bfma\.rn\.(?:bf16|f16)", ptx)


# But for parameters and shared memory, which no other kernel touches: there the units of sm_100 say where products are.
MEMORY = r"\b(?:ld|st|atom|red|cp|prefetch)\.(?!param|shared)"


@pytest.mark.parametrize(("case", "target"), [*on("sm_90", "sm_100"), *((case, "sm_90") for case in STAYING)])
def test_every_program_waits_for_what_came_before_it_touches_memory(case, target):
    ptx = compiled(case, target, aligned=True).asm["ptx"]
    body = ptx[ptx.index("{", ptx.index(".entry")) :]
    before, behind = body.split("griddepcontrol.wait")
    assert not re.search(MEMORY, before)
    assert not re.search(r"\bbra\b|@%p\d+\s*$", before)  # no program goes around it
    assert behind.index("griddepcontrol.launch_dependents") < re.search(MEMORY, behind).start()


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_machine_code_waits_before_it_touches_memory(case, tmp_path):
    """The assembler may move instructions, too."""
    (tmp_path / "kernel.cubin").write_bytes(compiled(case, "sm_90", aligned=True).asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "-sass", tmp_path / "kernel.cubin"]
    code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert code.index("ACQBULK") < min(code.index(access) for access in ("LDG", "STG"))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_devices_that_load_no_kernel_early_get_no_wait(case):
    assert "griddepcontrol" not in compiled(case, "sm_80").asm["ptx"]


@pytest.mark.parametrize("number", [0, 1, 6, 9])
def test_epsilon_is_rounded_to_float32_before_it_is_added(number):
    """Inductor passes it as float64, in which the norm would then be computed."""
    ptx = compiled(CASES[number], "sm_90", epsilon="fp64").asm["ptx"]
    assert set(re.findall(r"[\w.]+\.f64\b", ptx)) == {"cvt.rn.f32.f64"}


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_codes_are_made_by_the_device_where_it_can(target):
    assert ("e4m3x2" in compiled(CASES[13], target).asm["ptx"]) == (target in CONVERTS)


@pytest.mark.parametrize("element", ["fp32", "fp16"])
def test_the_other_dtypes_compile(element):
    assert compiled(CASES[0], "sm_90", element).asm["cubin"]


def test_sizes_and_strides_of_64_bits_compile():
    assert compiled(CASES[6], "sm_90", number="i64").asm["cubin"]


ONES = {
    "rms_norm_kernel": ("hidden", "variance_size", "x_stride"),
    "add_rms_norm_kernel": ("hidden", "variance_size", "x_stride", "x_residual_stride"),
    "rms_norm_groups_kernel": ("hidden", "batches", "x_stride"),
    "add_rms_norm_groups_kernel": ("hidden", "batches", "x_stride", "x_residual_stride"),
    "gated_kernel": ("length", "x_stride"),
    "gated_rows_kernel": ("length", "x_stride"),
    "gates_apart_kernel": ("length", "x_stride", "x_up_stride"),
    "rotary_kernel": ("query_heads", "key_heads", "half", "query_head_stride", "positions_count"),
    "rotate_half_kernel": ("tokens", "heads", "half", "x_head_stride", "cos_token_stride", "sin_token_stride"),
    "cache_kernel": ("key_heads", "key_size", "value_heads", "value_size", "key_stride", "slot_count"),
    "rotary_cache_kernel": ("query_heads", "key_heads", "value_heads", "value_size", "half", "slot_count"),
    "activation_kernel": ("length", "x_stride"),
    "group_codes_kernel": ("groups", "batches", "x_stride"),
    "largest_kernel": ("length", "x_stride"),
    "routing_kernel": ("logits_stride",),
    "decode_kernel": ("batch", "table_width", "blocks", "query_stride", "table_stride", "window", "shares"),
    "shares_kernel": ("shares", "heads", "value_size"),
    "latent_kernel": ("batch", "table_width", "blocks", "query_stride", "rope_head_stride", "table_stride", "shares"),
    "tensor_codes_kernel": ("length", "x_stride"),
    "nvfp4_kernel": ("x_stride",),
    "rms_norm_nvfp4_kernel": ("x_stride",),
    "add_rms_norm_nvfp4_kernel": ("x_stride", "x_residual_stride"),
    "sum_norm_kernel": ("hidden", "x_stride", "x_residual_stride"),
    "gated_product_of_one_kernel": ("weight_stride",),
    "gated_product_kernel": ("x_stride", "weight_stride"),
}


@pytest.mark.parametrize("case", [*(CASES[number] for number in (1, 5, 16, 17, 20)), *MAIN], ids=str)
def test_sizes_and_strides_of_one_compile(case):
    """Triton makes a number that is 1 a constant, which is another type in its language."""
    assert compiled(replace(case, constants=case.constants | dict.fromkeys(ONES[case.kernel], 1)), "sm_90").asm["cubin"]


# But for rotation in pairs, and for a soft cap: 8 bytes. Latent attention with 64 heads to a program spills 440 bytes;
# over 256 sequences of 1024 keys it takes an H200 474 us, and 631 and 764 us with 32 and 16, which spill none.
def all_in_registers(case: Case) -> bool:
    plain = case.constants.get("is_neox", True) and not case.constants.get("has_cap")
    return plain and not (case.kernel == "latent_kernel" and case.constants["tile_heads"] == 64)


VECTORS = {"ld.global.v4.b32", "st.global.v4.b32"}
# The tail of a row has half as much for each thread; codes have half the bytes; single numbers: a scale, a position.
NARROWER = {"ld.global.v2.b32", "st.global.v2.b32", "st.global.b32", "ld.global.b32", "ld.global.b64"}


@pytest.mark.parametrize("case", [case for case in CASES if case.constants.get("is_neox", True)], ids=str)
def test_rows_of_aligned_tensors_are_read_and_written_16_bytes_at_a_time(case):
    kernel = compiled(case, "sm_90", aligned=True)
    found = re.findall(r"\b(?:ld|st)\.global[\w.]*", kernel.asm["ptx"])
    if case.kernel == "largest_kernel":
        assert set(found) == {"ld.global.v4.b32", "st.global.b32"}
    elif "nvfp4" in case.kernel:  # four bits for each, and the tail of a row half as many for a thread; scales
        assert VECTORS - {"st.global.v4.b32"} <= set(found) <= VECTORS | {
            "ld.global.v2.b32", "ld.global.b32", "st.global.b32", "st.global.b16", "st.global.b8"
        }  # fmt: skip
        assert found.count("ld.global.b32") == 1  # the scale of the tensor
        assert ("st.global.v4.b32" in found) == case.kernel.startswith("add")  # the sum
        assert ("st.global.b16" in found) == bool(case.constants.get("tail"))
    elif case.constants.get("codes") or "hardware" in case.constants or case.constants.get("tail"):
        assert "ld.global.v4.b32" in found
        assert set(found) <= VECTORS | NARROWER
        if not case.constants.get("tail"):
            assert found.count("st.global.b32") <= 1  # the scale of a row
            assert "st.global.v2.b32" in found
            assert "ld.global.v2.b32" not in found
    else:
        # Single numbers: a position, the alphas of xIELU. Pairs of gate and up become half as many numbers.
        pairs = case.constants.get("activation") == SWIGLUOAI
        found = {"st.global.v4.b32" if pairs and kind == "st.global.v2.b32" else kind for kind in found}
        assert found - {"ld.global.b64", "ld.global.b16"} == VECTORS
    exchanged = re.findall(r"ttg.convert_layout .*: (tensor<\w+)", kernel.asm["ttgir"])
    parts = [case.constants[part] for part in ("block", "tail") if case.constants.get(part)]
    if "groups_kernel" in case.kernel:
        assert exchanged == [f"tensor<1x{part // case.constants['group_size']}xf32" for part in parts]
    elif "nvfp4" in case.kernel:
        assert exchanged == [f"tensor<1x{part // 16}xf8E4M3FN" for part in parts]
    else:
        assert exchanged == ["tensor<16xi32"] * (case.kernel == "group_codes_kernel")  # the largest of each group


@pytest.mark.parametrize("case", [case for case in CASES + FEW if all_in_registers(case)], ids=str)
def test_registers_are_not_spilled(case, tmp_path):
    (tmp_path / "kernel.cubin").write_bytes(compiled(case, "sm_90", aligned=True).asm["cubin"])
    tool = triton.knobs.nvidia.cuobjdump.path
    usage = subprocess.run(
        [tool, "-res-usage", tmp_path / "kernel.cubin"], capture_output=True, text=True, check=True
    ).stdout
    assert "STACK:0 " in usage
    assert "LOCAL:0 " in usage


def test_the_norm_sums_in_float32():
    ptx = compiled(CASES[0], "sm_90").asm["ptx"]
    assert "fma.rn.f32" in ptx
    assert not any(f"{op}.bf16" in ptx for op in ("fma.rn", "add", "sub"))  # a lone product of two is rounded once


@pytest.mark.parametrize("case", MAIN, ids=str)
def test_what_inductor_copies_of_a_kernel_is_all_that_it_needs(case, tmp_path):
    """Inductor copies a kernel's source, and what that refers to, into a module of its own."""
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code

    text = str(user_defined_triton_kernel_transitive_closure_source_code(kernel_of(case)))
    path = tmp_path / f"copy_of_{case.kernel}.py"
    path.write_text("import triton\nimport triton.language as tl\n\n@triton.jit\n" + text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    assert compiled(case, "sm_90", kernel=getattr(copy, case.kernel)).asm["cubin"]


@pytest.mark.parametrize("case", CASES + FEW, ids=str)
def test_strides_are_multiplied_in_64_bits(case):
    """A stride of less than 2**31 is an argument of 32 bits; what it is multiplied by makes more of it."""
    ttir = compiled(case, "sm_90", aligned=True).asm["ttir"]
    narrow = set(re.findall(r"%\w*stride\w*(?=: i32)", ttir))
    for name, op, rest in re.findall(r"(%\w+) = ([\w.]+) (.*)", ttir):
        if narrow & set(re.findall(r"%\w+", rest)):
            if op in ("tt.splat", "tt.expand_dims", "tt.broadcast"):
                narrow.add(name)
            assert op != "arith.muli" or "i64" in rest, f"{name} = {op} {rest}"
