"""Which bytes of a storage a tensor takes."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from irframework.memory import Region, share_a_byte, storage_key

regions = st.builds(
    Region,
    st.integers(0, 40),
    st.lists(st.integers(0, 4), max_size=3).map(lambda sizes: (*sizes, 2)),
    st.lists(st.integers(0, 12), min_size=3, max_size=3).map(tuple),
).map(lambda region: Region(region.start, region.sizes, (*region.strides[: len(region.sizes) - 1], 1)))


def bytes_of(region: Region) -> set[int]:
    found = {region.start}
    for size, stride in zip(region.sizes, region.strides, strict=True):
        found = {start + index * stride for start in found for index in range(size)}
    return found


@given(regions, regions)
def test_regions_share_a_byte_exactly_when_they_do(a: Region, b: Region) -> None:
    assert share_a_byte(a, b) == bool(bytes_of(a) & bytes_of(b))


def test_a_region_counts_bytes() -> None:
    x = torch.zeros(4, 8)
    assert not share_a_byte(Region.of(x[:, ::2]), Region.of(x[:, 1::2]))
    assert share_a_byte(Region.of(x.view(torch.float64)[2:]), Region.of(x[3:]))
    assert not share_a_byte(Region.of(x.view(torch.float64)[2:]), Region.of(x[:2]))


def test_what_takes_too_long_counts_as_shared() -> None:
    many = Region(0, (1000,) * 6, (7, 11, 13, 17, 19, 23))
    assert share_a_byte(many, Region(1, (1000,) * 6, (14, 22, 26, 34, 38, 46)))


def test_a_storage_has_one_key_whatever_lies_on_it() -> None:
    x = torch.zeros(4, 8)
    assert storage_key(x) == storage_key(x[2:].view(torch.int32)) != storage_key(x.clone())
    assert storage_key(torch.zeros(2, 2).to_sparse()) is None
