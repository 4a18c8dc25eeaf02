"""Value checks: the same error for every implementation, before anything is written."""

import pytest
import torch
from torch import Tensor

import irframework as ir
from irframework import errors
from irframework.settings import settings


def put(x: Tensor, slots: Tensor, value: float = 1.0) -> Tensor:
    return x.index_fill(0, slots.clamp(0, x.shape[0] - 1), value)


@pytest.fixture
def op(declare):
    op = declare(put, allow_inplace=True)

    @op.register_value_check
    def look(x, slots, value=1.0):
        if slots.numel() and int(slots.max()) >= x.shape[0]:
            raise errors.ArgumentError(f"slot {int(slots.max())} is behind the end")

    return op


def in_place(x, slots, value=1.0):
    return x.index_fill_(0, slots.clamp(0, x.shape[0] - 1), value)


GOOD, BAD = torch.tensor([0, 2]), torch.tensor([0, 3])


@pytest.mark.parametrize("provider", ["native", "p"])
def test_a_wrong_value_is_refused_whoever_would_run(op, provider):
    op.register_impl("p", inplace=True)(in_place)
    x = torch.zeros(3)
    with ir.priority({op.name: [provider]}):
        for _ in range(3):
            assert op(x, GOOD).tolist() == [1, 0, 1]
            with pytest.raises(errors.ArgumentError, match="slot 3"):
                op(x, BAD)
            with pytest.raises(errors.ArgumentError, match="slot 3"):
                op.maybe_inplace(x, BAD)
            assert x.tolist() == [0, 0, 0]


def test_an_implementation_that_looks_itself_is_not_looked_after(op):
    op.register_impl("p", checks_values=True)(lambda x, slots, value=1.0: x + 5)
    with ir.priority({op.name: ["p"]}):
        for _ in range(3):
            assert op(torch.zeros(3), BAD).tolist() == [5, 5, 5]


def test_what_it_refuses_is_said_in_the_ops_words(op):
    def refuse(x, slots, value=1.0):
        raise RuntimeError("kernel: bad slot")

    op.register_impl("p", checks_values=True)(refuse)
    with ir.priority({op.name: ["p"]}):
        for _ in range(3):
            with pytest.raises(errors.ArgumentError, match="slot 3 is behind the end"):
                op(torch.zeros(3), BAD)


def test_meta_tensors_have_no_values_to_look_at(op):
    assert op(torch.zeros(3, device="meta"), BAD.to("meta")).shape == (3,)


def test_fake_tensors_have_no_values_to_look_at(op):
    with torch._subclasses.FakeTensorMode():
        assert op(torch.zeros(3), torch.zeros(2, dtype=torch.int64)).shape == (3,)


def test_elsewhere_looking_is_asked_for(op, monkeypatch):
    looked = []
    op.register_value_check(lambda x, slots, value=1.0: looked.append(x.device.type))
    monkeypatch.setenv("IRFRAMEWORK_CHECK_VALUES", "1")
    settings.cache_clear()
    try:
        op(torch.zeros(3, device="meta"), BAD.to("meta"))
    finally:
        monkeypatch.undo()
        settings.cache_clear()
    assert looked == ["meta"]


def test_a_value_check_has_the_ops_signature(op):
    with pytest.raises(errors.SignatureError, match="value check"):
        op.register_value_check(lambda y: None)
