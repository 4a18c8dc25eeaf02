"""Declaring ops."""

import copy
import inspect
import pickle
from typing import Optional

import pytest
import torch
from torch import Tensor

import irframework as ir
from irframework import errors
from irframework.registry import all_ops, find_op, registry
from irframework.torch_ops import op_of


def test_op_is_an_attribute_of_ops_and_of_torch_ops(declare):
    op = declare()
    assert getattr(ir.ops, op.name) is op
    assert op.torch_op is getattr(torch.ops.irframework, op.name).default


def test_schema_states_types_and_defaults(declare):
    assert declare().schema == "(Tensor x, Tensor? weight=None, float epsilon=1e-06) -> Tensor"


def test_optional_spelled_the_old_way_is_the_same_type(declare):
    def native(x: Tensor, w: Optional[Tensor] = None) -> Tensor:  # noqa: UP045 - the rule is about this spelling
        return x * 2

    op = declare(native)
    assert op.tensors == ("x", "w")
    assert torch.equal(op(torch.ones(2)), torch.full((2,), 2.0))


def test_activations_default_to_tensors_named_x(declare):
    def native(x: Tensor, weight: Tensor, x_residual: Tensor, xs: float) -> Tensor:
        return x * weight + x_residual

    assert declare(native).activations == ("x", "x_residual")


def test_activations_can_be_named(declare):
    def native(query: Tensor, weight: Tensor) -> Tensor:
        return query * weight

    assert declare(native, activations=["query"], allow_inplace=True).activations == ("query",)


def test_activation_that_is_no_tensor_is_refused(declare):
    with pytest.raises(errors.InvalidOpError, match=r"epsilon.*not a tensor"):
        declare(activations=["epsilon"])


def test_allow_inplace_without_an_activation_is_refused(declare):
    def native(query: Tensor) -> Tensor:
        return query + 1

    with pytest.raises(errors.InvalidOpError, match="activations="):
        declare(native, allow_inplace=True)


def test_maybe_inplace_of_an_op_without_it_says_what_to_call(declare):
    op = declare()
    with pytest.raises(errors.InplaceError, match=rf"ir\.ops\.{op.name}\("):
        op.maybe_inplace(torch.ones(1))


@pytest.mark.parametrize("name", ["a-b", "class", "_private", "1a", "", "a.b"])
def test_name_that_is_no_public_identifier_is_refused(name):
    def native(x: Tensor) -> Tensor:
        return x + 1

    with pytest.raises(errors.InvalidOpError, match="identifier"):
        ir.register_op(name=name or " ")(native)


def test_lambda_needs_a_name():
    with pytest.raises(errors.InvalidOpError, match="identifier"):
        ir.register_op(lambda x: x)


@pytest.mark.parametrize("name", ["donate", "rotary", "layernorm", "activation", "name"])
def test_name_that_could_not_be_reached_is_refused(name):
    def native(x: Tensor) -> Tensor:
        return x + 1

    with pytest.raises(errors.ReservedNameError, match=name):
        ir.register_op(name=name)(native)
    assert name not in registry.ops


def test_every_public_name_in_ops_is_an_op_or_reserved():
    from irframework.declaration import _RESERVED_OPS

    # pytest rewrites modules of distributions with a plugin for it, and adds names such as "@py_builtins".
    public = {n for n in vars(ir.ops) if n.isidentifier() and not n.startswith("_")}
    assert public - set(registry.ops) <= set(_RESERVED_OPS)


def test_decorator_used_with_a_name_instead_of_a_function_says_how():
    with pytest.raises(errors.InvalidOpError, match="name="):
        ir.register_op("my_op")


def no_annotation(x):
    return x


def no_result(x: Tensor):
    return x


def nothing(x: Tensor) -> None:
    return None


def number_out(x: Tensor) -> float:
    return 1.0


def tensor_and_number_out(x: Tensor) -> tuple[Tensor, int]:
    return x + 1, 1


def by_flag(x: Tensor, two: bool) -> Tensor | tuple[Tensor, Tensor]:
    return (x + 1, x + 2) if two else x + 1


def optional_out(x: Tensor) -> Tensor | None:
    return x


def star(x: Tensor, *more: Tensor) -> Tensor:
    return x


def unknown_name(x: "Nowhere") -> Tensor:  # noqa: F821
    return x


def positional_only(x: Tensor, /) -> Tensor:
    return x


@pytest.mark.parametrize(
    "native",
    [no_annotation, no_result, nothing, number_out, tensor_and_number_out, by_flag, optional_out, star, unknown_name,
     positional_only],
)  # fmt: skip
def test_declaration_without_a_schema_is_refused_and_leaves_nothing(native):
    with pytest.raises(errors.InvalidOpError, match="refused_op"):
        ir.register_op(name="refused_op")(native)
    assert "refused_op" not in registry.ops
    assert not hasattr(torch.ops.irframework, "refused_op")


def test_parameter_without_a_torch_type_gets_advice(declare):
    def native(x: Tensor, options: dict[str, int]) -> Tensor:
        return x + 1

    with pytest.raises(errors.InvalidOpError, match=r"options has unsupported type .*Every parameter is annotated as"):
        declare(native)


@pytest.mark.parametrize("native", [by_flag, optional_out])
def test_varying_number_of_outputs_gets_advice(native):
    with pytest.raises(errors.InvalidOpError, match="always the same number"):
        ir.register_op(name="refused_op")(native)


@pytest.mark.parametrize("parameter", ["self", "torch", "_hidden"])
def test_parameter_name_that_generated_code_uses_is_refused(parameter):
    scope = {"Tensor": Tensor}
    exec(f"def native(x: Tensor, {parameter}: Tensor) -> Tensor:\n    return x + {parameter}\n", scope)
    with pytest.raises(errors.InvalidOpError, match=parameter):
        ir.register_op(name="refused_op")(scope["native"])


@pytest.mark.parametrize(
    "parameter", ["op", "y", "y0", "result", "ok", "error", "args", "donated", "Tensor", "unusual", "CONTEXT",
                  "form", "fn", "reasons", "torch_op", "current_context", "own_outputs", "modes_active"]
)  # fmt: skip
@pytest.mark.parametrize("inplace", [False, True])
def test_parameter_may_have_any_other_name(declare, parameter, inplace):
    scope = {"T": Tensor}
    exec(f"def native(x: T, {parameter}: T) -> T:\n    return x + {parameter}\n", scope)
    exec(f"def provided(x, {parameter}):\n    return x.add_({parameter})\n", scope)
    op = declare(scope["native"], allow_inplace=True)

    def predicate(*values):
        return values[0].dtype is torch.float32

    scope["predicate"] = predicate
    exec(f"def asked(x, {parameter}):\n    return predicate(x, {parameter})\n", scope)
    conditions = ir.supports(dtype=torch.float32, same_shape=("x", parameter)) & scope["asked"]
    op.register_impl("p", inplace=inplace, supports_args=conditions)(scope["provided"] if inplace else scope["native"])
    with ir.priority({op.name: "p"}):
        for _ in range(3):
            x, other = torch.ones(2), torch.ones(2)
            assert op(x, **{parameter: other}).tolist() == [2, 2]
            assert x.tolist() == other.tolist() == [1, 1]
            assert op.maybe_inplace(x, other).tolist() == [2, 2]
            assert op.explain(x, other).provider == "p"
        assert op(torch.ones(2).double(), torch.ones(2).double()).dtype == torch.float64


def test_second_declaration_is_refused_and_names_both_places(declare):
    op = declare()
    with pytest.raises(errors.DuplicateOpError, match=r"conftest\.py:\d+.*test_op\.py:\d+"):
        ir.register_op(name=op.name)(lambda x: x)


def test_declaring_the_same_function_twice_gives_the_same_op():
    def native(x: Tensor) -> Tensor:
        return x + 1

    first = ir.register_op(name="declared_twice")(native)
    assert ir.register_op(name="declared_twice")(native) is first


def test_declaring_the_same_function_again_with_other_options_is_refused():
    def native(x: Tensor) -> Tensor:
        return x + 1

    ir.register_op(name="declared_otherwise")(native)
    with pytest.raises(errors.DuplicateOpError, match="allow_inplace"):
        ir.register_op(name="declared_otherwise", allow_inplace=True)(native)


def test_unknown_op_is_an_attribute_error_with_the_closest_name():
    with pytest.raises(errors.UnknownOpError, match="'rms_norm'") as raised:
        _ = ir.ops.rms_nrom
    assert isinstance(raised.value, AttributeError)
    assert not hasattr(ir.ops, "no_such_op")


def test_find_op_and_all_ops_know_the_standard_ops():
    assert find_op("rms_norm") is ir.ops.rms_norm
    assert {"rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding"} <= set(all_ops())


def test_dir_lists_ops(declare):
    assert {"rms_norm", declare().name} <= set(dir(ir.ops))


def test_op_of_knows_both_overloads_and_nothing_else(declare):
    op = declare(allow_inplace=True)
    assert op_of(op.torch_op) == (op, False)
    assert op_of(op.maybe_inplace.torch_op) == (op, True)
    assert op_of(torch.ops.aten.add.Tensor) is None
    assert op_of(torch.ops.irframework.donate.default) is None
    assert op_of(len) is None


def test_op_shows_the_declared_signature_and_docstring():
    assert list(inspect.signature(ir.ops.rms_norm).parameters) == ["x", "weight", "epsilon", "variance_size"]
    assert ir.ops.rms_norm.__doc__.startswith("Divide each row")
    assert ir.ops.rms_norm.__name__ == "rms_norm"


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda op: pickle.loads(pickle.dumps(op))])
def test_copies_of_an_op_are_the_op(clone):
    assert clone(ir.ops.rms_norm) is ir.ops.rms_norm


def test_pickled_maybe_inplace_is_the_same_object():
    form = ir.ops.fused_add_rms_norm.maybe_inplace
    assert pickle.loads(pickle.dumps(form)) is form


def test_deepcopied_maybe_inplace_is_the_same_object():
    form = ir.ops.fused_add_rms_norm.maybe_inplace
    assert copy.deepcopy(form) is form


def test_bind_fills_in_defaults(declare):
    op = declare()
    assert op.bind((1,), {"epsilon": 2.0}) == (1, None, 2.0)


@pytest.mark.parametrize("kwargs", [{"nonsense": 1}, {}, {"x": 1, "weight": 2, "epsilon": 3, "more": 4}])
def test_wrong_arguments_are_a_type_error(declare, kwargs):
    op = declare()
    with pytest.raises(TypeError):
        op(**kwargs)
    with pytest.raises(TypeError):
        op.explain(**kwargs)


def test_keyword_only_parameters_work(declare):
    def native(x: Tensor, *, factor: float = 2.0) -> Tensor:
        return x * factor

    op = declare(native, allow_inplace=True)
    op.register_impl("p")(lambda x, *, factor=2.0: x * factor * 10)
    x = torch.ones(2)
    assert op(x, factor=3.0).tolist() == [30, 30]
    with ir.priority({op.name: "native"}):
        for call in (op, op.torch_op, op.maybe_inplace, op.maybe_inplace.torch_op):
            assert call(x, factor=3.0).tolist() == [3, 3]
            assert call(x).tolist() == [2, 2]
        assert op(x.to("meta"), factor=3.0).shape == (2,)
        y = torch.ones(2, requires_grad=True)
        for call in (op, op.maybe_inplace):
            (gradient,) = torch.autograd.grad(call(y, factor=3.0).sum(), y)
            assert gradient.tolist() == [3, 3]
    with pytest.raises(TypeError):
        op(x, 3.0)


def test_keyword_only_tensor_is_refused(declare):
    def native(x: Tensor, *, weight: Tensor) -> Tensor:
        return x * weight

    with pytest.raises(errors.InvalidOpError, match="'weight' must not be keyword-only"):
        declare(native)


@pytest.mark.parametrize("name", ["registry", "sys", "Any", "copy"])
def test_op_may_have_the_name_of_anything_else(name):
    def native(x: Tensor) -> Tensor:
        return x + 1

    op = ir.register_op(name=name)(native)
    assert getattr(ir.ops, name) is op


def test_list_of_numbers_is_a_parameter(declare):
    def native(x: Tensor, dims: list[int], scales: list[float] | None = None) -> Tensor:
        return x.sum(dims) * (scales or [1.0])[0]

    op = declare(native)
    op.register_impl("p")(lambda x, dims, scales=None: native(x, dims, scales) * 10)
    for _ in range(3):
        for call in (op, op.torch_op):
            assert call(torch.ones(2, 3), [0]).tolist() == [20, 20, 20]
            assert call(torch.ones(2, 3), (0, 1), scales=[2.0]).item() == 120


def test_default_that_torch_cannot_read_is_refused(declare):
    def native(x: Tensor, word: str = 'a "quoted" word') -> Tensor:
        return x + 1

    with pytest.raises(errors.InvalidOpError, match="cannot read"):
        declare(native)


def test_list_of_tensors_is_a_parameter_and_a_result(declare):
    def native(xs: list[Tensor], factor: float) -> list[Tensor]:
        return [x * factor for x in xs]

    op = declare(native)
    got = op([torch.ones(1), torch.ones(2)], 3.0)
    assert [t.tolist() for t in got] == [[3], [3, 3]]
    assert [t.tolist() for t in op.torch_op([torch.ones(1)], 2.0)] == [[2]]


def test_input_generator_makes_arguments(declare):
    op = declare()
    with pytest.raises(errors.InvalidOpError, match="register_input_generator"):
        op.generate_inputs()
    op.register_input_generator(lambda shape, dtype, device: (torch.ones(shape, dtype=dtype, device=device),))
    x, weight, epsilon = op.generate_inputs(shape=(2, 3), dtype=torch.float16)
    assert (x.shape, x.dtype, weight, epsilon) == ((2, 3), torch.float16, None, 1e-6)


@pytest.mark.parametrize("name", ir.ops.__all__)
@pytest.mark.parametrize("shape", [(8, 64), (0, 64), (2, 3, 64)])
def test_standard_ops_generate_inputs_for_the_shapes_they_take(name, shape):
    op = find_op(name)
    try:
        args = op.generate_inputs(shape=shape, dtype=torch.bfloat16)
        outputs = op.impls["native"].apply(args)
    except errors.ArgumentError:
        assert shape != (8, 64)
        return
    assert all(
        output.is_floating_point() or output.dtype != torch.bool for output in torch.utils._pytree.tree_leaves(outputs)
    )


def test_tolerance_can_be_overridden_per_dtype(declare):
    op, other = declare(), declare()
    before = other.get_tolerance(torch.float32)
    op.override_tolerance(torch.float32, atol=1.0, rtol=0.5)
    assert op.get_tolerance(torch.float32) == ir.Tolerance(1.0, 0.5)
    assert other.get_tolerance(torch.float32) == before
    assert op.get_tolerance(torch.int32) == ir.Tolerance(0.0, 0.0)


def test_shape_function_replaces_native_on_fake_tensors_only(declare):
    op = declare()
    op.register_fake(lambda x, weight=None, epsilon=1e-6: x.new_empty(7))
    assert op(torch.ones(2)).shape == (2,)
    assert op.torch_op(torch.ones(2, device="meta")).shape == (7,)


def test_shape_function_needs_the_ops_signature(declare):
    with pytest.raises(errors.SignatureError, match="shape function"):
        declare().register_fake(lambda x, w=None: x)


@pytest.mark.parametrize(
    "options",
    [
        {"name": 5},
        {"name": ""},
        {"activations": 5},
        {"allow_inplace": "yes"},
        {"fuse": "yes"},
    ],
)
def test_option_of_the_wrong_kind_is_refused(options):
    def function(x: Tensor) -> Tensor:
        return x + 1

    with pytest.raises(errors.InvalidOpError):
        ir.register_op(**{"name": "test_never_declared", **options})(function)


def test_callable_without_a_name_needs_one():
    class Callable:
        def __call__(self, x: Tensor) -> Tensor:
            return x + 1

    with pytest.raises(errors.InvalidOpError, match="name="):
        ir.register_op(Callable())


def test_coroutine_is_no_op():
    async def function(x: Tensor) -> Tensor:
        return x

    with pytest.raises(errors.InvalidOpError, match="coroutine"):
        ir.register_op(function)


@pytest.mark.parametrize("op", [5, None])
def test_explain_wants_an_op(op):
    with pytest.raises(errors.ArgumentError, match=r"ir\.explain expects an op"):
        ir.explain(op, torch.ones(2))
