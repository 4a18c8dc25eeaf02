"""Small calls of the standard ops in float64, and providers that autograd cannot look into.

Owns the arguments, the fake providers and the reference gradients of the training tests. Does not own what is tested.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import irframework as ir

_numbers = itertools.count()


@dataclass(frozen=True)
class Case:
    """A call of a standard op.

    Attributes:
        op: The op.
        make: Its arguments: numbers, and tensors in float64; always the same.
    """

    op: Any
    make: Callable[[], tuple[Any, ...]]

    def arguments(self, dtype: torch.dtype = torch.float32) -> list[Any]:
        torch.manual_seed(0)
        return [a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in self.make()]


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def _rotary(*lead: int, heads: int = 2, key: bool = True, neox: bool = True) -> tuple[Any, ...]:
    positions = torch.arange(torch.Size(lead).numel()).view(lead) % 5
    return positions, randn(*lead, 8 * heads), randn(*lead, 8) if key else None, randn(5, 6), 8, neox


CASES = {
    "rms_norm": Case(ir.ops.rms_norm, lambda: (randn(2, 6), randn(6), 1e-3)),
    "rms_norm-no_weight": Case(ir.ops.rms_norm, lambda: (randn(2, 1, 6), None, 1e-3)),
    "rms_norm-part": Case(ir.ops.rms_norm, lambda: (randn(2, 6), randn(6), 1e-3, 4)),
    "fused_add_rms_norm": Case(ir.ops.fused_add_rms_norm, lambda: (randn(2, 6), randn(2, 6), randn(6), 1e-3)),
    "fused_add_rms_norm-no_weight": Case(ir.ops.fused_add_rms_norm, lambda: (randn(2, 6), randn(2, 6), None, 1e-3)),
    "silu_and_mul": Case(ir.ops.silu_and_mul, lambda: (randn(2, 6),)),
    "gelu_and_mul": Case(ir.ops.gelu_and_mul, lambda: (randn(2, 6),)),
    "gelu_and_mul-tanh": Case(ir.ops.gelu_and_mul, lambda: (randn(2, 6), "tanh")),
    "rotary_embedding": Case(ir.ops.rotary_embedding, lambda: _rotary(3)),
    "rotary_embedding-pairs": Case(ir.ops.rotary_embedding, lambda: _rotary(2, 2, heads=1, neox=False)),
    "rotary_embedding-no_key": Case(ir.ops.rotary_embedding, lambda: _rotary(3, key=False)),
}
# Their outputs are float8, which has no finite differences, and no exact gradients.
QUANTISING = {
    op: Case(getattr(ir.ops, op), lambda op=op: getattr(ir.ops, op).generate_inputs(shape=(4, 8)))
    for op in (
        "static_quant_fp8",
        "dynamic_quant_fp8",
        *(
            f"{op}_{kind}_quant_fp8"
            for op in ("rms_norm", "fused_add_rms_norm", "silu_and_mul")
            for kind in ("static", "dynamic")
        ),
    )
}
OPS = tuple(dict.fromkeys((*(name.partition("-")[0] for name in CASES), *QUANTISING)))
FAKES = ("t_overwriting", "t_nested", "t_writing")
PROVIDERS = ("native", "vllm_c", *FAKES)


def ran_by(case: Case, provider: str) -> bool:
    """Whether a provider takes the call."""
    with prefer(provider):
        return bool(case.op.dispatch(*case.arguments()).provider == provider)


def prefer(*providers: str) -> Any:
    """Prefer providers for every standard op that they implement, then native."""
    ops = [getattr(ir.ops, name) for name in OPS]
    wanted = dict.fromkeys((*providers, "native"))
    return ir.priority({op.name: [p for p in wanted if p in op.impls] for op in ops})


def named(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def backends(*values: Any) -> pytest.MarkDecorator:
    """Run a test for these backends; None is eager mode."""
    return pytest.mark.parametrize("backend", values, ids=named)


def compiled(function: Callable[..., Any], backend: Any, **options: Any) -> Callable[..., Any]:
    """The compiled function; the function itself for None."""
    return function if backend is None else torch.compile(function, backend=backend, **options)


def installed(provider: str) -> bool:
    impl = ir.ops.rms_norm.impls.get(provider)
    return provider != "vllm_c" or (impl is not None and impl.supported)


def need(provider: str) -> None:
    if not installed(provider):
        pytest.skip("needs the kernels of irframework-vllm-c for the CPU")


@contextlib.contextmanager
def fake_providers() -> Iterator[None]:
    """Register the providers.

    * `t_overwriting` works in place, through a torch op that overwrites its arguments;
    * `t_writing` lets a torch op write to fresh outputs;
    * `t_nested` calls other IR ops, or the same one with fewer arguments.
    """
    namespace = f"training_{next(_numbers)}"
    library = torch.library.Library(namespace, "DEF")
    library.define("put_(Tensor(a!) target, Tensor value) -> ()")

    def put_kernel(target: Tensor, value: Tensor) -> None:
        target.copy_(value)

    library.impl("put_", put_kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::put_", lambda target, value: None, lib=library)
    library.define("add_norm_(Tensor(a!) x, Tensor(b!) r, Tensor? w, float e, int? size) -> ()")

    def add_norm_kernel(x: Tensor, r: Tensor, w: Tensor | None, e: float, size: int | None) -> None:
        r.add_(x)
        x.copy_(ir.ops.rms_norm.native(r, w, e, size))

    library.impl("add_norm_", add_norm_kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::add_norm_", lambda x, r, w, e, size: None, lib=library)
    put, add_norm = getattr(torch.ops, namespace).put_, getattr(torch.ops, namespace).add_norm_

    def writing(op: Any) -> Callable[..., Any]:
        def into_fresh(*args: Any) -> Any:
            def written(result: Tensor | None) -> Tensor | None:
                if result is None:
                    return None
                put(fresh := torch.empty_like(result), result)
                return fresh

            results = op.native(*args)
            return written(results) if isinstance(results, Tensor) else tuple(map(written, results))

        return into_fresh

    norm, add, rotary = ir.ops.rms_norm, ir.ops.fused_add_rms_norm, ir.ops.rotary_embedding
    into_fresh = {name: writing(getattr(ir.ops, name)) for name in OPS}

    @norm.register_impl("t_writing")
    def norm_writing(x: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> Any:
        return into_fresh["rms_norm"](x, weight, epsilon, variance_size)

    @add.register_impl("t_writing")
    def add_writing(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> Any:
        return into_fresh["fused_add_rms_norm"](x, x_residual, weight, epsilon, variance_size)

    @ir.ops.silu_and_mul.register_impl("t_writing")
    def silu_writing(x: Any) -> Any:
        return into_fresh["silu_and_mul"](x)

    @ir.ops.gelu_and_mul.register_impl("t_writing")
    def gelu_writing(x: Any, approximate: str = "none") -> Any:
        return into_fresh["gelu_and_mul"](x, approximate)

    @rotary.register_impl("t_writing")
    def rotary_writing(
        positions: Any, query: Any, key: Any, cos_sin_cache: Any, head_size: int, is_neox: bool = True
    ) -> Any:
        return into_fresh["rotary_embedding"](positions, query, key, cos_sin_cache, head_size, is_neox)

    @add.register_impl("t_overwriting", inplace=True)
    def add_overwriting(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> Any:
        add_norm(x, x_residual, weight, epsilon, variance_size)
        return x, x_residual

    @add.register_impl("t_nested")
    def add_nested(x: Any, x_residual: Any, weight: Any, epsilon: float, variance_size: int | None = None) -> Any:
        r = x + x_residual
        return norm(r, weight, epsilon, variance_size), r

    @rotary.register_impl(
        "t_nested", supports_args=lambda positions, query, key, cos_sin_cache, head_size, is_neox=True: key is not None
    )
    def rotary_nested(
        positions: Any, query: Any, key: Any, cos_sin_cache: Any, head_size: int, is_neox: bool = True
    ) -> Any:
        return tuple(rotary(positions, part, None, cos_sin_cache, head_size, is_neox)[0] for part in (query, key))

    for name in QUANTISING:
        _register_writing(getattr(ir.ops, name), into_fresh[name])

    try:
        yield
    finally:
        for name in OPS:
            for provider in FAKES:
                getattr(ir.ops, name).unregister_impl(provider)
        library._destroy()


def _register_writing(op: Any, into_fresh: Callable[..., Any]) -> None:
    """Register `t_writing` through a function with the op's own parameters, which an implementation must have."""
    parameters = ", ".join(op.signature.parameters)
    namespace: dict[str, Any] = {"into_fresh": into_fresh}
    exec(f"def writing({parameters}): return into_fresh({parameters})", namespace)
    op.register_impl("t_writing")(namespace["writing"])


def present(results: Any) -> tuple[Tensor, ...]:
    """The outputs of a call that are tensors."""
    return (results,) if isinstance(results, Tensor) else tuple(r for r in results if r is not None)


def differentiable(arguments: Sequence[Any]) -> list[int]:
    return [i for i, a in enumerate(arguments) if isinstance(a, Tensor) and a.is_floating_point()]


def loss(outputs: Any) -> Tensor:
    """A number that depends on every element of every output, on each differently."""
    total = torch.zeros((), dtype=torch.float64)
    for output in present(outputs):
        factors = torch.arange(1.0, output.numel() + 1, dtype=torch.float64).view(output.shape)
        total = total + (output.double() * torch.cos(factors) + 0.5 * output.double().pow(2)).sum()
    return total


def gradients(call: Callable[..., Any], arguments: Sequence[Any], wanted: Sequence[int] | None = None) -> list[Tensor]:
    """The gradients of `loss` of a call with regard to the wanted arguments; the others ask for none."""
    wanted = differentiable(arguments) if wanted is None else wanted
    given = [
        a.detach().clone().requires_grad_(i in wanted) if isinstance(a, Tensor) and a.is_floating_point() else a
        for i, a in enumerate(arguments)
    ]
    return list(torch.autograd.grad(loss(call(*given)), [given[i] for i in wanted]))


def exact(case: Case, wanted: Sequence[int] | None = None) -> list[Tensor]:
    """The gradients of native in float64, by torch's own autograd."""
    return gradients(case.op.native, case.arguments(torch.float64), wanted)


def near(got: Sequence[Tensor], want: Sequence[Tensor], tolerance: float = 2e-5) -> None:
    """Equal up to the rounding of float32, gradients of outputs of order one."""
    assert len(got) == len(want)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w.double(), atol=tolerance, rtol=tolerance)
