"""The convolutions: against sums in float64 written out by hand, and torch's own."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, check_compiled, check_compiled_gradients, check_derivatives, close, f64

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

NAMES = ("conv2d", "conv3d")
OPS = {"conv2d": (2, F.conv2d), "conv3d": (3, F.conv3d)}


def sizes(name, *numbers):
    """The first numbers, as many as an op's spatial dimensions."""
    return numbers[: OPS[name][0]]


def exact(x, weight, bias, stride, padding, dilation, groups):
    """Every element of the result as a sum of its own."""
    x, weight = x.double(), weight.double()
    dims = x.dim() - 2
    padded = x.new_zeros(*x.shape[:2], *(s + 2 * p for s, p in zip(x.shape[2:], padding, strict=True)))
    inside = tuple(slice(p, p + s) for s, p in zip(x.shape[2:], padding, strict=True))
    padded[(slice(None), slice(None), *inside)] = x
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, weight.shape[2:], strict=True)]
    out_sizes = [(padded.shape[2 + i] - reach[i]) // stride[i] + 1 for i in range(dims)]
    out = x.new_zeros(x.shape[0], weight.shape[0], *out_sizes)
    channels = weight.shape[1]
    for o in range(weight.shape[0]):
        first = o // (weight.shape[0] // groups) * channels
        for place in itertools.product(*map(range, out_sizes)):
            window = tuple(
                slice(place[i] * stride[i], place[i] * stride[i] + reach[i], dilation[i]) for i in range(dims)
            )
            part = padded[(slice(None), slice(first, first + channels), *window)]
            out[(slice(None), o, *place)] = (part * weight[o]).flatten(1).sum(-1)
    return out if bias is None else out + bias.double().view(-1, *[1] * dims)


CASES = {
    "plain": {},
    "bias": {"bias": True},
    "stride": {"stride": (2, 1, 2)},
    "padding": {"padding": (1, 2, 0), "bias": True},
    "dilation": {"dilation": (1, 2, 2), "padding": (0, 1, 1)},
    "groups": {"groups": 2, "bias": True},
    "each channel on its own": {"groups": 4},
    "all": {"stride": (2, 2, 1), "padding": (1, 1, 2), "dilation": (2, 1, 2), "groups": 2, "bias": True},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", NAMES)
def test_convolutions_are_exact_to_roundings(name, case, dtype):
    given = dict(CASES[case])
    groups = given.get("groups", 1)
    x = torch.randn(2, 4, *sizes(name, 5, 6, 4)).to(dtype)
    weight = torch.randn(4, 4 // groups, *sizes(name, 2, 3, 2)).to(dtype)
    bias = torch.randn(4).to(dtype) if given.pop("bias", False) else None
    lists = {k: list(sizes(name, *v)) for k, v in given.items() if k != "groups"}
    got = getattr(ir.ops, name)(x, weight, bias, groups=groups, **lists)
    ones, zeros = [1] * OPS[name][0], [0] * OPS[name][0]
    steps = (lists.get("stride", ones), lists.get("padding", zeros), lists.get("dilation", ones))
    wanted = exact(x, weight, bias, *steps, groups)
    close(got.flatten(1), wanted.flatten(1), dtype, ulps=16)
    torch.testing.assert_close(got, OPS[name][1](x, weight, bias, *steps, groups))


@pytest.mark.parametrize("name", NAMES)
def test_patches_that_do_not_overlap_are_a_linear_layer(name):
    patch = sizes(name, 2, 3, 2)
    x, weight = torch.randn(5, 3, *patch), torch.randn(7, 3, *patch)
    got = getattr(ir.ops, name)(x, weight, None, list(patch))
    torch.testing.assert_close(got.flatten(1), ir.ops.linear(x.flatten(1), weight.flatten(1)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parameter", ["stride", "padding", "dilation"])
@pytest.mark.parametrize("form", ["eager", "torch_op"])
@pytest.mark.parametrize("kind", [list, tuple])
def test_one_number_serves_all_dimensions(name, parameter, form, kind):
    op = getattr(ir.ops, name)
    op = op.torch_op if form == "torch_op" else op
    x, weight = torch.randn(2, 3, *sizes(name, 6, 6, 6)), torch.randn(4, 3, *sizes(name, 2, 2, 2))
    one, all_of_them = (op(x, weight, **{parameter: kind([2] * count)}) for count in (1, OPS[name][0]))
    assert torch.equal(one, all_of_them)
    assert not torch.equal(one.flatten(), op(x, weight).flatten()[: one.numel()])


@pytest.mark.parametrize("name", NAMES)
def test_an_image_without_a_batch_gives_one(name):
    x, weight = torch.randn(3, *sizes(name, 5, 6, 4)), torch.randn(4, 3, *sizes(name, 2, 2, 2))
    op = getattr(ir.ops, name)
    torch.testing.assert_close(op(x, weight), op(x[None], weight)[0])


@pytest.mark.parametrize("name", NAMES)
def test_no_images_give_none(name):
    got = getattr(ir.ops, name)(torch.ones(0, 3, *sizes(name, 5, 6, 4)), torch.ones(4, 3, *sizes(name, 2, 2, 2)))
    assert got.shape == (0, 4, *sizes(name, 4, 5, 3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"x": "long"}, "'x' must have a floating-point"),
        ({"x": (4,)}, "'x' must be"),
        ({"x": (2, 2, 4, 4, 4, 4)}, "'x' must be"),
        ({"x": "fewer channels"}, "'x' has 3 channels.* takes 4"),
        ({"weight": "half"}, "'weight' has dtype torch.float16"),
        ({"weight": (4, 4, 2)}, "'weight' must be"),
        ({"weight": "empty kernel"}, "'weight' must be"),
        ({"bias": torch.ones(4).half()}, "'bias' has dtype torch.float16"),
        ({"bias": torch.ones(5)}, "'bias' must be a vector of the 4 output channels"),
        ({"groups": 0}, "groups=0"),
        ({"groups": 3}, "groups=3 .*divide the 4"),
        ({"groups": 2}, "'x' has 4 channels.* takes 8"),
        ({"stride": [0]}, "stride must be a list of [23] numbers .*at least 1"),
        ({"stride": [1, 1, 1, 1]}, "stride must be a list"),
        ({"stride": []}, "stride must be a list"),
        ({"stride": 2}, "stride must be a list"),
        ({"padding": [-1]}, "padding must be a list of [23] numbers .*at least 0"),
        ({"padding": "same"}, "padding must be a list"),
        ({"dilation": [0]}, "dilation must be a list"),
        ({"dilation": [5]}, "kernel reaches over 6 elements of spatial dimension 0, where 'x' .* has 5"),
    ],
)
def test_convolutions_name_the_argument_that_does_not_fit(name, wrong, problem):
    x, weight = torch.ones(2, 4, *sizes(name, 5, 6, 7)), torch.ones(4, 4, *sizes(name, 2, 2, 2))
    made = {
        "long": x.long(),
        "fewer channels": x[:, :3],
        "half": weight.half(),
        "empty kernel": weight[..., :0],
    }
    good = {"x": x, "weight": weight}
    getattr(ir.ops, name)(**good)
    ((key, value),) = wrong.items()
    value = (
        torch.ones(value) if isinstance(value, tuple) else made.get(value, value) if isinstance(value, str) else value
    )
    with pytest.raises(errors.ArgumentError, match=f"{name}.*{problem}"):
        getattr(ir.ops, name)(**good | {key: value})


@pytest.mark.parametrize("name", NAMES)
def test_first_and_second_derivatives_are_right(name):
    x, weight = f64(1, 2, *sizes(name, 3, 2, 1)), f64(2, 1, *sizes(name, 2, 2, 1))
    check_derivatives(getattr(ir.ops, name), (x, weight, f64(2), [2], list(sizes(name, 1, 0, 0)), None, 2))


def test_one_graph_serves_any_number_of_images():
    check_compiled(NAMES)


def test_gradients_through_a_graph_are_those_of_eager_mode():
    check_compiled_gradients(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_image_sizes_may_be_symbolic(name):
    op = getattr(ir.ops, name)
    weight = torch.randn(4, 3, *sizes(name, 2, 2, 2))
    torch._dynamo.reset()
    function = torch.compile(lambda x: op(x, weight, None, [2], [1]), backend="aot_eager", fullgraph=True, dynamic=True)
    for size in (6, 9, 7):
        x = torch.randn(2, 3, *sizes(name, size, size + 3, size + 1))
        torch.testing.assert_close(function(x), op(x, weight, None, [2], [1]))


@pytest.mark.parametrize("name", NAMES)
def test_a_compiled_call_raises_the_ops_own_error(name):
    op = getattr(ir.ops, name)
    x, weight = torch.ones(2, 4, *sizes(name, 5, 6, 7)), torch.ones(4, 3, *sizes(name, 2, 2, 2))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="'x' has 4 channels"):
        torch.compile(lambda x: op(x, weight), backend="aot_eager", fullgraph=True)(x)
