"""`ir.supports`: conditions as data."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import irframework as ir
from irframework import errors


def three(x: Tensor, w: Tensor | None, factor: float = 1.0, mode: str = "a") -> Tensor:
    return x.to(torch.float32) * 2


@pytest.fixture(scope="module")
def op() -> ir.IrOp:
    return ir.register_op(name="test_conditions_op", activations=["x"])(three)


def reason_of(op, conditions, *args, **kwargs):
    """Register, ask the three views of a decision, check that they agree, and return the reason."""
    impl = op.register_impl("p", supports_args=conditions)(
        lambda x, w, factor=1.0, mode="a": torch.full_like(x, 77.0, dtype=torch.float32)
    )
    try:
        with ir.priority({op.name: "p"}):
            candidate = op.explain(*args, **kwargs).candidates[0]
            for _ in range(3):  # first by the resolver, then by the generated dispatcher
                got = op(*args, **kwargs)
                assert candidate.accepted is bool((got == 77).all()), "eager and explain disagree"
            assert op.dispatch(*args, **kwargs).provider == ("p" if candidate.accepted else "native")
        answer = impl.supports_args(*args, **kwargs)
        assert (answer is True) is candidate.accepted
        assert candidate.reason == (None if candidate.accepted else answer.reason)
        return candidate.reason
    finally:
        op.unregister_impl("p")


X = torch.ones(2, 16)


@pytest.mark.parametrize(
    ("conditions", "args", "reason"),
    [
        ({"dtype": torch.float16}, (X.half(), None), None),
        ({"dtype": torch.float16}, (X, None), "x is float32, needs float16"),
        ({"dtype": (torch.float16, torch.bfloat16)}, (X, None), "x is float32, needs float16, bfloat16"),
        ({"dtype": {"w": torch.float32}}, (X, X.half()), "w is float16, needs float32"),
        ({"dtype": {"w": torch.float32}}, (X, None), None),
        ({"same_dtype": ("x", "w")}, (X, X.half()), "w is float16, needs the dtype of x, float32"),
        ({"same_dtype": ("x", "w")}, (X, X), None),
        ({"same_dtype": ("w", "x")}, (X, None), None),
        ({"none": "w"}, (X, None), None),
        ({"none": ("w",)}, (X, X), "w must be None, is a tensor of shape (2, 16)"),
        ({"contiguous": ("x",)}, (X.t(), None), "x must be contiguous, has strides (1, 16)"),
        ({"contiguous": "x"}, (X, None), None),
        ({"row_contiguous": ("x",)}, (X[:, ::2], None), "last dimension of x must have stride 1"),
        ({"row_contiguous": ("x",)}, (X[:, :8], None), None),
        ({"row_contiguous": ("x",)}, (torch.ones(()), None), "last dimension of x must have stride 1"),
        ({"row_contiguous": ("x",)}, (torch.ones(4, 2)[:, ::2], None), None),
        ({"ndim": 2}, (X, None), None),
        ({"ndim": 3}, (X, None), "x has 2 dimensions, needs 3"),
        ({"ndim": (1, 3)}, (X, None), "x has 2 dimensions, needs 1 or 3"),
        ({"ndim": {"w": 1}}, (X, X), "w has 2 dimensions, needs 1"),
        ({"same_shape": ("x", "w")}, (X, X[:1]), "w has shape (1, 16), needs the shape of x, (2, 16)"),
        ({"same_shape": ("w", "x")}, (X, None), None),
        ({"last_dim_of": {"w": "x"}}, (X, X[0]), None),
        ({"last_dim_of": {"w": "x"}}, (X, None), None),
        ({"last_dim_of": {"w": "x"}}, (X, X), "w has shape (2, 16), needs a vector as long as the last dimension of x"),
        ({"last_dim_of": {"w": "x"}}, (X, X[0, :8]), "w has shape (8,), needs a vector"),
        ({"last_dim_of": {"x": "w"}}, (X[0], None), None),
        ({"multiple_of": {"x": 8}}, (X, None), None),
        ({"multiple_of": {"x": 5}}, (X, None), "x has shape (2, 16), its last dimension must be a multiple of 5"),
        ({"multiple_of": {"x": 8}}, (torch.ones(()), None), "multiple of 8"),
        ({"max_last_dim": 16}, (X, None), None),
        ({"max_last_dim": {"x": 8}}, (X, None), "its last dimension may be at most 8"),
        ({"one_element": ("w",)}, (X, X[0, 0]), None),
        ({"one_element": ("w",)}, (X, X[:1, :1]), None),
        ({"one_element": ("x", "w")}, (X[0, 0], X[0]), "w has shape (16,), needs one element"),
        ({"one_element": ("w",)}, (X, None), None),
        ({"one_of": {"mode": ("a", "b")}}, (X, None, 1.0, "c"), "mode is 'c', needs one of 'a', 'b'"),
        ({"one_of": {"mode": "a"}}, (X, None), None),
        ({"one_of": {"factor": (1.0, 2.0)}}, (X, None, 3.0), "factor is 3.0, needs one of 1.0, 2.0"),
        ({"one_of": {"mode": ("torch.tanh", "x.dtype")}}, (X, None, 1.0, "torch.tanh"), None),
    ],
)
def test_condition_decides_and_gives_its_reason(op, conditions, args, reason):
    found = reason_of(op, ir.supports(**conditions), *args)
    assert (found is None) if reason is None else (reason in found)


def test_all_failed_conditions_are_named(op):
    found = reason_of(op, ir.supports(dtype=torch.float16, ndim=1, none=("w",)), X, X)
    assert found.split("; ") == [
        "x is float32, needs float16",
        "w must be None, is a tensor of shape (2, 16)",
        "x has 2 dimensions, needs 1",
    ]


def test_conditions_and_a_function_both_count(op):
    asked = []

    def even_rows(x, w, factor=1.0, mode="a"):
        asked.append(1)
        return x.shape[0] % 2 == 0 or ir.reject("odd rows")

    for conditions in (ir.supports(ndim=2) & even_rows, even_rows & ir.supports(ndim=2)):
        assert reason_of(op, conditions, X, None) is None
        assert reason_of(op, conditions, X[:1], None) == "odd rows"
        asked.clear()
        assert reason_of(op, conditions, X[0], None) == "x has 1 dimensions, needs 2"
        assert asked == [], "the function is asked only when the conditions hold"


def test_several_functions_are_asked_in_order(op):
    conditions = (
        ir.supports()
        & (lambda x, w, factor=1.0, mode="a": ir.reject("first"))
        & (lambda x, w, factor=1.0, mode="a": ir.reject("second"))
    )
    assert reason_of(op, conditions, X, None) == "first"


def test_two_sets_of_conditions_compose(op):
    both = ir.supports(ndim=2) & ir.supports(none=("w",))
    assert reason_of(op, both, X, None) is None
    assert reason_of(op, both, X[0], X) == "x has 1 dimensions, needs 2; w must be None, is a tensor of shape (2, 16)"


def test_one_condition_stated_on_both_sides_is_refused():
    with pytest.raises(errors.ConditionError, match="ndim"):
        ir.supports(ndim=2) & ir.supports(ndim=3)


def test_composition_with_anything_else_is_a_type_error():
    with pytest.raises(TypeError):
        ir.supports(ndim=2) & 3


@pytest.mark.parametrize(
    ("conditions", "problem"),
    [
        ({"same_dtype": ("x", "weight")}, "'weight', which the op does not have. Known: factor, mode, w, x"),
        ({"same_dtype": ("weight",)}, "'weight'"),
        ({"contiguous": ("y",)}, "'y'"),
        ({"dtype": {"y": torch.float16}}, "'y'"),
        ({"dtype": "float16"}, "torch dtypes"),
        ({"dtype": ()}, "torch dtypes"),
        ({"dtype": {"factor": torch.float16}}, "'factor', which is not a tensor"),
        ({"ndim": {"mode": 1}}, "'mode', which is not a tensor"),
        ({"last_dim_of": {"w": "mode"}}, "'mode', which is not a tensor"),
        ({"one_of": {"x": (1,)}}, "'x', which is a tensor"),
        ({"one_of": {"mode": (object(),)}}, "one_of"),
        ({"one_of": {"factor": (float("inf"),)}}, "one_of"),
        ({"multiple_of": {"x": 0}}, "multiple_of"),
        ({"multiple_of": {"x": 1.5}}, "multiple_of"),
        ({"multiple_of": 8}, "multiple_of"),
        ({"max_last_dim": "big"}, "max_last_dim"),
        ({"ndim": "2"}, "ndim"),
    ],
)
def test_condition_that_cannot_be_checked_is_refused_at_registration(declare, conditions, problem):
    op = declare(three)
    with pytest.raises(errors.ConditionError, match=problem.replace("(", "\\(")):
        op.register_impl("p", supports_args=ir.supports(**conditions))(lambda x, w, factor=1.0, mode="a": x)
    assert "p" not in op.impls


def test_domain_of_a_fused_op_is_checked_at_its_declaration(declare):
    with pytest.raises(errors.ConditionError, match=r"fuse=.*'weigth'.*Did you mean 'weight'"):
        declare(fuse=ir.supports(none=("weigth",)))


def test_one_set_of_conditions_serves_ops_whose_parameters_differ_in_type(declare):
    def first(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def second(a: float, b: Tensor) -> Tensor:
        return b + a

    conditions = ir.supports(dtype=torch.float32)
    one, two = declare(first), declare(second)
    one.register_impl("p", supports_args=conditions)(lambda a, b: a * 100)
    two.register_impl("p", supports_args=conditions)(lambda a, b: b * 100)
    assert two(1.0, torch.ones(1)).item() == 100
    assert two(1.0, torch.ones(1).double()).item() == 2


def test_conditions_given_as_a_generator_serve_two_ops(declare):
    conditions = ir.supports(dtype=(d for d in (torch.float32, torch.float64)))
    for op in (declare(), declare()):
        op.register_impl("p", supports_args=conditions)(lambda x, weight=None, epsilon=1e-6: x * 100)
        assert op(torch.ones(1)).item() == 100
        assert op(torch.ones(1).half()).item() == 2


DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 8, 16]), max_size=3))
    tensor = torch.ones(shape, dtype=draw(st.sampled_from(DTYPES)))
    change = draw(st.sampled_from(["", "t", "half", "expand"]))
    if change == "t" and tensor.dim() >= 2:
        return tensor.transpose(-1, -2)
    if change == "half" and tensor.dim() >= 1:
        return tensor[..., ::2]
    if change == "expand" and tensor.dim() >= 1:
        return tensor[:1].expand(3, *tensor.shape[1:])
    return tensor


dtype_sets = st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3, unique=True)
pairs = st.permutations(["x", "w"])
condition_sets = st.fixed_dictionaries(
    {},
    optional={
        "dtype": dtype_sets | st.fixed_dictionaries({}, optional={"x": dtype_sets, "w": dtype_sets}),
        "same_dtype": pairs,
        "none": st.sampled_from(["w", ("w",)]),
        "contiguous": st.sampled_from([("x",), ("w",), ("x", "w")]),
        "row_contiguous": st.sampled_from([("x",), ("w",), ("x", "w")]),
        "ndim": st.integers(0, 3) | st.fixed_dictionaries({"w": st.lists(st.integers(0, 3), min_size=1)}),
        "same_shape": pairs,
        "last_dim_of": st.sampled_from([{"w": "x"}, {"x": "w"}]),
        "multiple_of": st.fixed_dictionaries({}, optional={"x": st.integers(1, 8), "w": st.integers(1, 8)}),
        "max_last_dim": st.integers(1, 16) | st.fixed_dictionaries({"w": st.integers(1, 16)}),
        "one_element": st.sampled_from([("x",), ("w",), ("x", "w")]),
        "one_of": st.sampled_from([{"mode": ("a", "b")}, {"factor": (1.0,)}, {"mode": "c", "factor": (2.0, 1.0)}]),
    },
)


def plainly(conditions, x, w, factor, mode):
    """What the documentation of `ir.supports` says, evaluated without generating anything."""
    given = {"x": x, "w": w, "factor": factor, "mode": mode}

    def per(value):
        return value if isinstance(value, dict) else {"x": value}

    def many(value):
        return value if isinstance(value, (list, tuple)) else [value]

    def present(names):
        return [given[n] for n in many(names) if given[n] is not None]

    def last(t):
        return t.shape[-1] if t.dim() else None

    for name, value in conditions.items():
        if name == "dtype":
            ok = all(t.dtype in many(d) for n, d in per(value).items() for t in present(n))
        elif name == "same_dtype":
            ok = len({t.dtype for t in present(value)}) <= 1
        elif name == "none":
            ok = not present(value)
        elif name == "contiguous":
            ok = all(t.is_contiguous() for t in present(value))
        elif name == "row_contiguous":
            ok = all(t.dim() and (t.stride(-1) == 1 or t.shape[-1] == 1) for t in present(value))
        elif name == "ndim":
            ok = all(t.dim() in many(d) for n, d in per(value).items() for t in present(n))
        elif name == "same_shape":
            ok = len({t.shape for t in present(value)}) <= 1
        elif name == "last_dim_of":
            ok = all(
                len(present([n, of])) < 2 or (given[n].dim() == 1 and last(given[of]) == given[n].shape[0])
                for n, of in value.items()
            )
        elif name == "multiple_of":
            ok = all(last(t) is not None and last(t) % f == 0 for n, f in value.items() for t in present(n))
        elif name == "max_last_dim":
            ok = all(last(t) is not None and last(t) <= m for n, m in per(value).items() for t in present(n))
        elif name == "one_element":
            ok = all(t.numel() == 1 for t in present(value))
        else:
            ok = all(given[n] in many(choices) for n, choices in value.items())
        if not ok:
            return False
    return True


@settings(max_examples=150, deadline=None)
@given(
    conditions=condition_sets,
    x=tensors(),
    w=st.none() | tensors(),
    factor=st.sampled_from([1.0, 2.0]),
    mode=st.sampled_from(["a", "b", "c"]),
)
def test_inlined_dispatcher_explain_and_plain_evaluation_agree(op, conditions, x, w, factor, mode):
    found = reason_of(op, ir.supports(**conditions), x, w, factor, mode)
    assert (found is None) is plainly(conditions, x, w, factor, mode)


@pytest.mark.parametrize(
    "conditions",
    [
        {"ndim": True},
        {"multiple_of": {"x": True}},
        {"multiple_of": {"x": (8, 16)}},
        {"max_last_dim": (1, 2)},
        {"one_of": {"mode": ()}},
    ],
)
def test_value_that_no_check_can_use_is_refused(op, conditions):
    with pytest.raises(errors.ConditionError):
        reason_of(op, ir.supports(**conditions), X, None)


def test_names_must_be_names():
    with pytest.raises(errors.ConditionError, match="names of parameters"):
        ir.supports(same_dtype=5)
