"""Tiles of products with a gate: they fit what a device has, and few of its multiprocessors are idle. Nothing runs."""

import pytest
from test_code_generation import CONVERTS, DEVICES, STATIC, VALUES, Case, compiled  # a compiler, and what it is for

pytest.importorskip("triton", reason="triton is not installed")

ROWS = (1, 2, 16, 17, 32, 33, 64, 65, 128)
SIZES = ((576, 1536), (4096, 1792), (4096, 14336), (8192, 28672), (100, 7))  # elements of a row, columns
MEMORY = (65536, 101376, 166912, 232448)
PROCESSORS = (84, 108, 132, 304)


def chosen(rows: int, length: int, hidden: int, element: int, processors: int, memory: int):
    from irframework_triton_kernels.product_tiles import product_tile

    return product_tile(rows, length, hidden, element, processors, memory)


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("memory", MEMORY)
def test_tiles_have_all_rows_and_their_stages_fit_into_shared_memory(processors, memory):
    for rows in ROWS:
        for length, hidden in SIZES:
            for element in (1, 2):
                tile = chosen(rows, length, hidden, element, processors, memory)
                if tile is None:
                    assert rows > 16
                    continue
                assert tile.rows >= rows
                stage = tile.block * element * (tile.rows + 2 * tile.columns)
                assert rows == 1 or (tile.stages >= 1 and tile.stages * stage <= memory)
                assert tile.block * element >= 16 or rows == 1


@pytest.mark.parametrize(
    ("hidden", "element", "columns"),
    [
        (14336, 2, {1: 1, 16: 128, 32: 128, 64: 128, 128: 128}),
        (28672, 2, {1: 1, 16: 128, 32: 128, 64: 128, 128: 128}),
        (1792, 2, {1: 1, 16: 16, 32: None, 64: None, 128: None}),
        (14336, 1, {1: 1, 16: 64, 32: 32, 64: 32, 128: 64}),
        (28672, 1, {1: 1, 16: 64, 32: 32, 64: 32, 128: 64}),
        (1792, 1, {1: 1, 16: 16, 32: None, 64: None, 128: None}),
    ],
)
def test_an_h200_has_the_tiles_that_were_measured(hidden, element, columns):
    tiles = {rows: chosen(rows, 4096, hidden, element, 132, 232448) for rows in columns}
    assert {rows: tile and tile.columns for rows, tile in tiles.items()} == columns


@pytest.mark.parametrize("element", [1, 2])
@pytest.mark.parametrize("processors", PROCESSORS)
def test_three_of_five_multiprocessors_have_a_program_unless_it_has_as_few_columns_as_can_be(processors, element):
    for rows in ROWS[1:]:
        for hidden in (*range(16, 3000, 80), 14336, 18944, 28672):
            for memory in MEMORY:
                tile = chosen(rows, 4096, hidden, element, processors, memory)
                if tile is not None:
                    assert tile.columns == 16 or -(-hidden // tile.columns) >= 0.6 * processors


@pytest.mark.parametrize("element", [1, 2])
@pytest.mark.parametrize("memory", MEMORY)
def test_many_rows_have_no_tile(memory, element):
    from irframework_triton_kernels.product_tiles import MOST_PRODUCT_ROWS

    for length, hidden in SIZES:
        assert chosen(MOST_PRODUCT_ROWS + 1, length, hidden, element, 132, memory) is None


@pytest.mark.parametrize("element", [1, 2])
@pytest.mark.parametrize("length", [1, 100, 576, 2048, 2064, 4096, 5120, 14336])
def test_one_row_is_read_in_parts_that_divide_it_or_are_no_longer_than_a_warp_reads(length, element):
    tile = chosen(1, length, 14336, element, 132, 232448)
    assert tile.rows == tile.columns == 1
    assert length % tile.block == 0 or tile.block * element <= 1024
    assert tile.block < 2 * length


@pytest.mark.parametrize(
    ("target", "element"), [(target, size) for target in DEVICES for size in (1, 2) if size == 2 or target in CONVERTS]
)
def test_what_triton_makes_of_a_tile_fits_into_shared_memory(monkeypatch, tmp_path, target, element):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    length, hidden, compiles = 4096, 14336, 0
    for rows in (16, 64, 128):
        tile = chosen(rows, length, hidden, element, *DEVICES[target])
        if tile is None:  # torch multiplies so many there
            continue
        numbers = {"length": length, "hidden": hidden, "codes": STATIC if element == 1 else VALUES}
        numbers |= {"tile_rows": tile.rows, "columns": tile.columns, "block": tile.block, "turn": tile.turn}
        kernel = compiled(Case("gated_product_kernel", tile.warps, numbers, stages=tile.stages), target, aligned=True)
        assert 0 < kernel.metadata.shared <= DEVICES[target][1]
        compiles += 1
    assert compiles
