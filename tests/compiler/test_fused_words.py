"""Words and whole numbers that a fused op hands to the ops it is made of are what the program hands to them."""

import itertools

import pytest
import torch
from compiler_support import run
from torch import Tensor

import irframework as ir
from irframework.errors import ArgumentError

_numbers = itertools.count()
MODES = {"up": 1.0, "down": -1.0}


@pytest.fixture
def family():
    """An op that is steered by a word and a number, and a fused op that hands both on to it."""
    number = next(_numbers)

    @ir.register_op(name=f"fw_turn_{number}")
    def turn(x: Tensor, mode: str, times: int) -> Tensor:
        if times > 9:
            raise ArgumentError("times must be at most 9.")
        return x * MODES[mode] * times

    @ir.register_op(name=f"fw_turn_exp_{number}", fuse=True)
    def turn_exp(x: Tensor, mode: str, times: int) -> Tensor:
        return turn(x, mode, times).exp()

    @turn_exp.register_input_generator
    def _inputs(shape, **options):
        yield torch.randn(shape, **options), "up", 1

    turn_exp.register_impl("k")(turn_exp.native)
    return turn, turn_exp


@pytest.mark.parametrize(("mode", "times"), [("up", 1), ("down", 1), ("up", 7), ("down", 3)])
def test_they_are_read_off_the_program(family, configured, mode, times):
    turn, turn_exp = family
    others = [name for name in ir.ops.__all__ if getattr(ir.ops, name).fuse]
    configured(disable_fusions=others)
    x = torch.randn(3, 12)
    got = run(lambda x: turn(x, mode, times).exp(), x)
    assert ir.last_report().fusions == {turn_exp.name: 1}
    torch.testing.assert_close(got, (x * MODES[mode] * times).exp())


def test_a_candidate_that_the_definition_refuses_is_no_error_in_the_log(family, configured, caplog):
    turn, turn_exp = family

    @ir.register_op(name=f"{turn_exp.name}_sized", fuse=True)
    def sized(x: Tensor, times: int) -> Tensor:
        return turn(x, "up", 2 * times).exp()  # what the program shows is tried: a size of 12, which is refused

    @sized.register_input_generator
    def _inputs(shape, **options):
        yield torch.randn(shape, **options), 2

    sized.register_impl("k")(sized.native)
    others = [name for name in ir.ops.__all__ if getattr(ir.ops, name).fuse]
    configured(disable_fusions=[*others, turn_exp.name])
    run(lambda x: turn(x, "up", 7).exp(), torch.randn(3, 12))
    assert ir.last_report().fusions == {}
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []
