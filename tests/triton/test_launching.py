"""How kernels are launched: which compiled kernel, of how many programs. A recorder stands in for the device."""

import itertools
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")


def kernels():
    from irframework_triton_kernels.kernels import (
        activations,
        decoding,
        gated,
        group_codes,
        kv_cache,
        latent,
        norms,
        nvfp4,
        products,
        rotary,
        rotate_half,
        routing,
        sums,
    )

    return (
        norms.rms_norm_kernel,
        norms.add_rms_norm_kernel,
        norms.rms_norm_groups_kernel,
        norms.add_rms_norm_groups_kernel,
        gated.gated_kernel,
        gated.gated_rows_kernel,
        gated.gates_apart_kernel,
        rotary.rotary_kernel,
        rotate_half.rotate_half_kernel,
        kv_cache.cache_kernel,
        kv_cache.rotary_cache_kernel,
        activations.activation_kernel,
        group_codes.group_codes_kernel,
        group_codes.largest_kernel,
        group_codes.tensor_codes_kernel,
        nvfp4.nvfp4_kernel,
        nvfp4.rms_norm_nvfp4_kernel,
        nvfp4.add_rms_norm_nvfp4_kernel,
        routing.routing_kernel,
        decoding.decode_kernel,
        decoding.shares_kernel,
        latent.latent_kernel,
        products.gated_product_of_one_kernel,
        products.gated_product_kernel,
        sums.sum_norm_kernel,
    )


class Device:
    """Triton's driver of an H100 without one: kernels are compiled, and launches of them noted."""

    def __init__(self) -> None:
        self.launches: list[tuple[int, int, bool]] = []  # programs, which machine code, whether it may start early
        self.codes: dict[bytes, int] = {}
        self.target(90)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0
        properties = {"max_shared_mem": 232448, "multiprocessor_count": 3}
        self.utils = SimpleNamespace(load_binary=self.load, get_device_properties=lambda device: properties)
        self.launcher_cls = self.launcher

    def target(self, capability: int) -> None:
        """Be another device."""
        from irframework_triton_kernels.launch import call
        from triton.backends.compiler import GPUTarget

        self.get_current_target = lambda: GPUTarget("cuda", capability, 32)
        call._compiled.clear()
        call.abilities.cache_clear()
        for kernel in kernels():
            kernel.device_caches.clear()

    def load(self, name: str, code: bytes, *more: object) -> tuple[int, int, int, int, int]:
        return 0, self.codes.setdefault(code, len(self.codes)), 32, 0, 1024

    def launcher(self, source: object, metadata: SimpleNamespace):
        def launch(x: int, y: int, z: int, stream: int, function: int, *more: object) -> None:
            self.launches.append((x, function, metadata.launch_pdl))

        return launch


@pytest.fixture
def device(monkeypatch, tmp_path):
    from irframework_triton_kernels.launch import call

    device = Device()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", device)
    monkeypatch.setattr(call, "_compiled", {})
    for cached in (call.abilities, call.multiprocessors, call.shared_memory):
        cached.cache_clear()
    yield device
    for cached in (call.abilities, call.multiprocessors, call.shared_memory):
        cached.cache_clear()
    for kernel in kernels():
        kernel.device_caches.clear()


@pytest.fixture
def launch():
    from irframework_triton_kernels import launch

    return launch


def rows(count: int, hidden: int, dtype: torch.dtype = torch.bfloat16, start: int = 0, gap: int = 0) -> torch.Tensor:
    memory = torch.zeros(count * (hidden + gap) + start, dtype=dtype)
    return memory[start:].view(count, hidden + gap)[:, :hidden]


KINDS = {
    "usual": rows(4, 128),
    "wider": rows(4, 136),
    "odd": rows(4, 127),
    "one": rows(4, 1),
    "float32": rows(4, 128, torch.float32),
    "elsewhere": rows(4, 128, start=1),
    "odd stride": rows(4, 128, gap=1),
    "more rows": rows(400, 128),
}


def test_what_is_launched_without_triton_is_what_triton_would_launch(device, launch, monkeypatch):
    from irframework_triton_kernels.launch import call

    def launched() -> list[tuple[int, int, bool]]:
        device.launches.clear()
        for x in KINDS.values():
            for weight in (None, torch.zeros(x.shape[1]), torch.zeros(x.shape[1] + 1)[1:]):
                launch.rms_norm(x, weight, 1e-6, None)
            launch.dynamic_quant_fp8(x)
        return list(device.launches)

    with monkeypatch.context() as patch:
        patch.setattr(call, "CompiledKernel", type(None))  # so that none is kept
        by_triton = launched()
    assert launched() == by_triton
    monkeypatch.setattr(call, "_by_triton", lambda *arguments: pytest.fail("asked Triton again"))
    assert launched() == by_triton
    assert len({code for _, code, _ in by_triton}) > 12


def test_a_kernel_that_is_launched_again_is_given_what_triton_gives_it(device, launch, monkeypatch):
    from irframework_triton_kernels.launch import call

    given = []
    monkeypatch.setattr(device, "launcher_cls", lambda source, metadata: lambda *arguments: given.append(arguments))
    x, weight = rows(4, 128), torch.zeros(128)
    results = [launch.rms_norm(x, weight, 1e-6, None) for _ in range(2)]  # the second time without Triton
    monkeypatch.setattr(call, "_compiled", {})
    monkeypatch.setattr(call, "_READ_TRITON", False)
    results += [launch.rms_norm(x, weight, 1e-6, None) for _ in range(2)]
    own = [result.data_ptr() for result in results]
    for arguments in given:
        assert arguments[:6] == given[0][:6]  # programs, stream, function, metadata
        for one, other in zip(arguments[9:], given[0][9:], strict=True):
            assert type(one) is type(other)
            assert one.data_ptr() in own or one is other if isinstance(one, torch.Tensor) else one == other


def test_hooks_are_told_of_launches(device, launch):
    def hook(metadata):
        raise AssertionError("the stand-in for the launcher does not call hooks")

    seen = []
    device.launcher_cls = lambda source, metadata: lambda *arguments: seen.append(arguments[6:9])
    enter = triton.knobs.runtime.launch_enter_hook
    for _ in range(2):
        launch.rms_norm(rows(4, 128), None, 1e-6, None)
    assert seen[-1] == (None, None, None)
    enter.add(hook)
    try:
        launch.rms_norm(rows(4, 128), None, 1e-6, None)
    finally:
        enter.remove(hook)
    assert seen[-1][0].get()["name"] == "rms_norm_kernel"
    assert seen[-1][1] is enter


def test_the_number_of_rows_and_epsilon_need_no_kernel_of_their_own(device, launch):
    for count, epsilon in itertools.product((1, 16, 17), (1, 1.0, 1e-5)):
        launch.rms_norm(rows(count, 128), None, epsilon, None)
    assert {code for _, code, _ in device.launches} == {0}


def test_a_kernel_is_loaded_early_if_its_tile_says_so_and_the_device_can(device, launch):
    from irframework_triton_kernels.tiles import Tile

    def launched():
        device.launches.clear()
        for early in (True, False, True, False):
            launch.rms_norm(rows(4, 128), None, 1e-6, None, Tile(1, 128, True, 4, early=early))
        return [early for _, _, early in device.launches]

    assert launched() == [True, False, True, False]
    device.target(80)
    assert launched() == [False] * 4


def test_programs_that_stay_are_no_more_than_there_are_tiles(device, launch):
    from irframework_triton_kernels.tiles import Tile

    for count in (4, 100):
        launch.rms_norm(rows(count, 128), None, 1e-6, None, Tile(1, 128, True, 4, resident=2))
    assert [programs for programs, _, _ in device.launches] == [4, 6]


def test_nothing_is_launched_for_no_rows(device, launch):
    launch.rms_norm(rows(0, 128), None, 1e-6, None)
    launch.dynamic_quant_fp8(rows(3, 0))
    launch.gated(rows(0, 8), "silu")
    launch.rms_norm_group_quant_fp8(rows(0, 128), None, 1e-6, 128, False, False)
    launch.fused_add_rms_norm_group_quant_fp8(rows(3, 0), rows(3, 0), None, 1e-6, 128, True, False)
    launch.gated_group_quant_fp8(rows(3, 0), "silu", 128, False, False)
    launch.quant_nvfp4(rows(0, 128), torch.ones(1))
    launch.gated_quant_nvfp4(rows(3, 0), torch.ones(1), "silu")
    launch.rms_norm_quant_nvfp4(rows(3, 0), None, torch.ones(1), 1e-6)
    launch.fused_add_rms_norm_quant_nvfp4(rows(3, 0), rows(3, 0), None, torch.ones(1), 1e-6)
    assert not device.launches


def test_codes_are_bytes_where_the_device_does_not_convert(device, launch):
    from irframework_triton_kernels.launch import call

    assert call.code_dtype(rows(1, 8)) == torch.float8_e4m3fn
    device.target(80)
    assert call.code_dtype(rows(1, 8)) == torch.uint8
    q, scales = launch.dynamic_quant_fp8(rows(2, 8))
    assert (q.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    q, scales = launch.quant_nvfp4(rows(2, 32), torch.ones(1))
    assert (q.dtype, scales.dtype) == (torch.uint8, torch.float8_e4m3fn)


def test_a_tile_covers_a_row_with_an_element_for_every_thread():
    """In place, several threads that held the same element would read what another has overwritten."""
    from irframework_triton_kernels.tiles import ADD_NORM, CODES, GATED_CODES, NORM, row_tile

    lengths = (*range(1, 40), *range(2000, 20000, 37), 5120, 8192, 16384, 10**6)
    for length, kind, many in itertools.product(lengths, (NORM, ADD_NORM, CODES, GATED_CODES), (False, True)):
        tile = row_tile(length, kind, many)
        assert tile.whole == (length <= 16384)
        assert not tile.whole or tile.block + tile.tail >= length
        for part in (tile.block, tile.tail or tile.block):
            assert tile.rows * part >= 64 * tile.warps
            assert part & (part - 1) == 0
        assert not tile.tail or tile.rows == 1


def test_rows_that_are_no_power_of_two_are_worked_on_in_two_parts():
    from irframework_triton_kernels.tiles import NORM, row_tile

    tiles = [row_tile(length, NORM) for length in (4096, 5120, 6144, 7168)]
    assert [(tile.block, tile.tail) for tile in tiles] == [(4096, 0), (4096, 1024), (4096, 2048), (8192, 0)]


def test_the_number_of_rows_changes_no_tile_of_what_is_summed():
    from irframework_triton_kernels.tiles import ADD_NORM, CODES, NORM, row_tile

    for length in (128, 2048, 5120, 6144, 100_000):
        for kind in (NORM, ADD_NORM):
            assert row_tile(length, kind, many=True) == row_tile(length, kind, many=False)
    assert row_tile(5120, CODES, many=True).tail == 1024
    assert row_tile(5120, CODES, many=False).tail == 0


H200 = (132, 232448)  # multiprocessors, bytes of shared memory


def test_few_sequences_have_few_heads_to_a_program_of_latent_attention_and_many_have_many():
    from irframework_triton_kernels.tiles import latent_tile

    def chosen(heads: int, parts: int | None, device: tuple[int, int] = H200) -> tuple[int, int, int, int]:
        tile = latent_tile(heads, 512, 64, 2, *device, parts)
        return tile.rows, tile.block, tile.warps, tile.stages

    assert [chosen(128, parts) for parts in (None, 256)] == [(64, 64, 8, 1)] * 2
    assert chosen(128, 33) == (32, 64, 8, 2)  # two programs for each of 64 heads, where four still run at once
    assert chosen(128, 34) == (64, 64, 8, 1)
    assert chosen(128, 16) == (16, 64, 8, 2)
    assert [chosen(16, parts) for parts in (None, 256, 32)] == [(16, 32, 4, 2), (16, 32, 4, 2), (16, 64, 8, 2)]
    assert [chosen(heads, None)[0] for heads in (1, 16, 17, 20, 32, 33, 64, 65)] == [16, 16, 32, 32, 32, 64, 64, 64]
    assert chosen(128, None, (108, 166912)) == (32, 32, 4, 2)  # less shared memory
    assert chosen(128, 16, (128, 101376)) == (16, 32, 8, 2)
    assert chosen(128, 1, (304, 65536)) == (16, 32, 8, 2)


def test_tiles_of_latent_attention_are_what_matrix_instructions_take():
    from irframework_triton_kernels.tiles import latent_tile

    ranks, memory = (16, 64, 128, 256, 512), (65536, 101376, 166912, 232448)
    heads, parts = (1, 20, 128), (None, 0, 1, 7, 64, 10**6)
    for count, rank, rope, element, size, many in itertools.product(heads, ranks, (16, 256), (2, 4), memory, parts):
        tile = latent_tile(count, rank, rope, element, 132, size, many)
        assert tile.rows in (16, 32, 64)
        assert tile.block in (16, 32, 64)
        assert tile.rows == 16 or tile.rows < 2 * count
        assert tile.warps in (4, 8)


def test_sequences_are_shared_out_until_no_multiprocessor_is_idle():
    from irframework_triton_kernels.launch.latent import shares_among

    assert [shares_among(16, parts, 132) for parts in (0, 1, 8, 9, 32, 66, 67, 132, 133, 5000)] == [
        16, 16, 16, 14, 4, 2, 1, 1, 1, 1
    ]  # fmt: skip
    assert shares_among(1, 1, 132) == 1


def latent(launch, tokens: int, heads: int, bound: int, **more) -> None:
    width = -(-bound // 64)
    given = (torch.zeros(tokens, heads, size, dtype=torch.bfloat16) for size in (512, 64))
    cache, table = torch.zeros(8, 64, 576, dtype=torch.bfloat16), torch.zeros(tokens, width, dtype=torch.int32)
    offsets = torch.arange(tokens + 1, dtype=torch.int32)
    launch.decode_latent_attention(*given, cache, offsets, offsets[1:], table, bound, 0.1, None, **more)


def test_latent_attention_is_launched_as_programs_that_the_device_has_room_for(device, launch):
    """It has three multiprocessors."""
    for tokens, heads, bound in ((5, 128, 8192), (1, 16, 8192), (1, 16, 200), (0, 16, 8192)):
        latent(launch, tokens, heads, bound)
    # Two tiles of heads and one share; six shares, and what adds them up; one share of a short sequence.
    assert [programs for programs, _, _ in device.launches] == [10, 6, 16, 1]


def test_tiles_that_differ_in_stages_only_are_kernels_of_their_own(device, launch):
    from irframework_triton_kernels.tiles import Tile

    for stages in (1, 3, 1, 3):
        latent(launch, 2, 16, 200, tile=Tile(16, 32, False, 4, stages=stages))
    codes = [code for _, code, _ in device.launches]
    assert codes[:2] == codes[2:]
    assert codes[0] != codes[1]


def test_few_rows_of_a_product_are_one_launch_and_many_are_torchs_and_a_gate(device, launch):
    """One launch up to 128 rows, whose kernel is the same for all that a tile has; one row has a kernel of its own."""
    weight = rows(2 * 256, 64)
    for count in (0, 1, 17, 40, 64, 128, 129):
        launch.linear_silu_and_mul(rows(count, 64), weight)
    *few, many = device.launches
    assert [programs for programs, _, _ in few] == [256, 4, 4, 4, 2]  # of 1, 64, 64, 64 and 128 columns
    assert few[2][1] == few[3][1]
    launch.gated(rows(129, 512), "silu")
    assert device.launches[-1] == many


def test_no_kernel_is_loaded_early_of_itself(device, launch):
    """Behind a matrix product, which does not say when the next kernel may be loaded, it would cost time."""
    x, weight, scale = rows(4, 128), torch.zeros(128), torch.ones(1)
    launch.rms_norm(x, weight, 1e-6, None)
    launch.fused_add_rms_norm_dynamic_quant_fp8(x, x, weight, 1e-6)
    launch.gated(x, "silu")
    launch.static_quant_fp8(x, scale)
    launch.silu_and_mul_dynamic_quant_fp8(x)
    launch.rms_norm_group_quant_fp8(x, weight, 1e-6, 64, True, True)
    launch.fused_add_rms_norm_group_quant_fp8(x, x, weight, 1e-6, 64, False, False)
    launch.gated_group_quant_fp8(x, "silu", 64, False, False)
    launch.quant_nvfp4(x, scale)
    launch.gated_quant_nvfp4(x, scale, "silu")
    launch.rms_norm_quant_nvfp4(x, weight, scale, 1e-6)
    launch.fused_add_rms_norm_quant_nvfp4(x, x, weight, scale, 1e-6)
    launch.rotary_embedding(torch.zeros(4, dtype=torch.int64), x, None, torch.zeros(8, 64), 64, True)
    assert {early for _, _, early in device.launches} == {False}
