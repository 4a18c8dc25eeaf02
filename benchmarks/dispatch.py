"""Cost of deciding a call: what calling an op costs above calling the implementation directly.

Each cell is (time of the call - time of the implementation called directly) / time of a call of a torch.library op
(define + impl, returns its input) in the same process and grad mode; a tiny tensor, one thread. All variants are
interleaved in every round; the table gives the median over the rounds and the spread between the quartiles.

    python benchmarks/dispatch.py [--rounds 15] [--calls 20000] [--json]
    python benchmarks/dispatch.py --kernels [--rounds 15] [--calls 20000] [--json]

With `--kernels`: calls of the CPU kernels of `vllm_c` through irframework over calls of the provider's functions, and
the difference in microseconds. Tensors are made in the mode that they are used in, the weight outside.
"""

import argparse
import contextlib
import functools
import inspect
import itertools
import json
import platform
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir

GOALS = {
    ("python predicate", 1): 0.25,
    ("python predicate", 3): 0.40,
    ("python predicate", 6): 0.65,
    ("ir.supports", 1): 0.25,
    ("ir.supports", 3): 0.30,
    ("ir.supports", 6): 0.40,
}
GRAD_MODE_MAY_ADD = 0.06
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad mode": contextlib.nullcontext,
}
RESULT = torch.ones(1, 16)
_numbers = itertools.count()


def implementation(x: Tensor, weight: Tensor | None, epsilon: float = 1e-6) -> Tensor:
    return RESULT


def native(x: Tensor, weight: Tensor | None, epsilon: float = 1e-6) -> Tensor:
    return x * weight if weight is not None else x + 0


def accept(x: Tensor, weight: Tensor | None, epsilon: float = 1e-6) -> bool:
    return x.dtype is torch.float32


def refuse(x: Tensor, weight: Tensor | None, epsilon: float = 1e-6) -> bool:
    return x.dtype is torch.float16


def make_op(kind: str, providers: int) -> Callable[..., Tensor]:
    """Declare an op with `providers` implementations, of which the last takes the call."""
    op = ir.register_op(name=f"bench_{next(_numbers)}")(native)
    names = [f"p{i}" for i in range(providers)]
    for position, name in enumerate(names):
        last = position == providers - 1
        if kind == "ir.supports":
            condition: Any = ir.supports(dtype=torch.float32 if last else torch.float16)
        else:
            condition = accept if last else refuse
        op.register_impl(name, supports_args=condition, device_types=("cpu",))(implementation)
    ir.configure(ir.KernelConfig(ir_op_priority={**ir.current_config().ir_op_priority, op.name: names}))
    return op


def torch_library_op() -> Callable[..., Tensor]:
    library = torch.library.Library("bench_dispatch", "DEF")
    library.define("same(Tensor x, Tensor? weight, float epsilon=1e-6) -> Tensor")
    library.impl("same", lambda x, weight, epsilon=1e-6: x, "CompositeExplicitAutograd")
    torch_library_op.keep = library  # type: ignore[attr-defined]
    return torch.ops.bench_dispatch.same.default


def custom_op() -> Callable[..., Tensor]:
    @torch.library.custom_op("bench_dispatch_custom::fresh", mutates_args=())
    def fresh(x: Tensor, weight: Tensor | None, epsilon: float = 1e-6) -> Tensor:
        return x.clone()

    return fresh


def singledispatch() -> Callable[..., Tensor]:
    @functools.singledispatch
    def call(x: Any, weight: Any, epsilon: float = 1e-6) -> Tensor:
        raise TypeError

    call.register(Tensor)(implementation)
    return call


def naive_loop(providers: int) -> Callable[..., Tensor]:
    table = [(refuse, implementation)] * (providers - 1) + [(accept, implementation)]

    def call(*args: Any, **kwargs: Any) -> Tensor:
        for predicate, function in table:
            if predicate(*args, **kwargs):
                return function(*args, **kwargs)
        raise RuntimeError

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--kernels", action="store_true", help="ratios for kernels instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.kernels:
        kernels(options)
        return
    subjects: dict[tuple[str, int], Callable[..., Tensor]] = {
        (kind, count): make_op(kind, count) for kind in ("python predicate", "ir.supports") for count in (1, 3, 6)
    }
    subjects["torch.library.custom_op", 0] = custom_op()
    subjects["functools.singledispatch", 0] = singledispatch()
    for count in (1, 3, 6):
        subjects["naive loop over predicates", count] = naive_loop(count)
    unit, x, weight = torch_library_op(), torch.randn(1, 16), torch.nn.Parameter(torch.randn(16), requires_grad=False)
    shares: dict[tuple[str, int, str], list[float]] = {}
    for mode, context in MODES.items():
        with context():
            for _ in range(options.rounds):
                direct = timed(implementation, x, weight, options.calls)
                whole = timed(unit, x, weight, options.calls)
                for (kind, count), subject in subjects.items():
                    share = (timed(subject, x, weight, options.calls) - direct) / whole
                    shares.setdefault((kind, count, mode), []).append(share)
    report(shares, options.json)


def kernels(options: argparse.Namespace) -> None:
    weight = torch.nn.Parameter(torch.randn(64), requires_grad=False)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for mode in ("inference_mode", "no_grad"):
        with MODES[mode]():
            x, residual, scale = torch.randn(1, 64), torch.randn(1, 64), torch.tensor(0.5)
            arguments: dict[str, tuple[Any, ...]] = {
                "rms_norm": (x, weight, 1e-6),
                "fused_add_rms_norm": (x, residual, weight, 1e-6),
                "silu_and_mul": (x,),
                "rms_norm_static_quant_fp8": (x, weight, scale, 1e-6),
                "rms_norm_dynamic_quant_fp8": (x, weight, 1e-6),
                "silu_and_mul_static_quant_fp8": (x, scale),
                "silu_and_mul_dynamic_quant_fp8": (x,),
            }
            for _ in range(options.rounds):
                for name, args in arguments.items():
                    op = getattr(ir.ops, name)
                    impl = op.impls["vllm_c"]
                    forms = {name: (op, impl.functional or impl)}
                    if op.allow_inplace:
                        forms[f"{name}.maybe_inplace"] = op.maybe_inplace, impl
                    for what, (form, direct) in forms.items():
                        without = (None,) * (len(inspect.signature(direct.fn).parameters) - len(args))
                        through = timed_with(form, args, options.calls)
                        alone = timed_with(direct.fn, (*args, *without), options.calls)
                        found.setdefault((what, mode), []).append((through / alone, (through - alone) * 1e6))
    rows = []
    for (what, mode), pairs in found.items():
        ratios, own = ([pair[index] for pair in pairs] for index in (0, 1))
        quartiles = statistics.quantiles(ratios, n=4)
        rows.append({"call": what, "mode": mode, "quartiles": quartiles, "own_us": statistics.median(own)})
    if options.json:
        print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "rows": rows}, indent=1))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}; time of a call over the function's own")
    for row in rows:
        low, middle, high = row["quartiles"]
        print(f"{row['mode']:15} {row['call']:40} {middle:5.2f} [{low:.2f}, {high:.2f}] {row['own_us']:6.2f} us more")


def timed_with(function: Callable[..., Any], args: tuple[Any, ...], calls: int) -> float:
    """As `timed`, with the arguments written out: `*args` would spare an object what a call of it costs."""
    names = {f"a{i}": value for i, value in enumerate(args)}
    timer = timeit.Timer(f"f({', '.join(names)})", timer=time.thread_time, globals={"f": function, **names})
    return min(timer.repeat(3, calls // 3)) / (calls // 3)


def timed(function: Callable[..., Tensor], x: Tensor, weight: Tensor, calls: int) -> float:
    """Return the best time of one call, in seconds, of three batches, in CPU time: what else runs counts little."""
    best = float("inf")
    for _ in range(3):
        repeat = itertools.repeat(None, calls // 3)
        start = time.thread_time()
        for _ in repeat:
            function(x, weight, 1e-6)
        best = min(best, (time.thread_time() - start) / (calls // 3))
    return best


def report(shares: dict[tuple[str, int, str], list[float]], as_json: bool) -> None:
    rows = []
    for (kind, count, mode), values in shares.items():
        low, middle, high = statistics.quantiles(values, n=4)
        goal = GOALS.get((kind, count))
        if goal is not None and mode == "grad mode":
            goal += GRAD_MODE_MAY_ADD
        rows.append(
            {"what": kind, "providers": count, "mode": mode, "share": middle, "low": low, "high": high, "goal": goal}
        )
    if as_json:
        print(json.dumps({"torch": torch.__version__, "python": platform.python_version(), "rows": rows}, indent=1))
        return
    print(f"torch {torch.__version__}, Python {platform.python_version()}; share of one torch.library op call")
    for row in rows:
        goal = row["goal"]
        verdict = "" if goal is None else f"goal {goal:.2f} {'met' if row['share'] <= goal else 'MISSED'}"
        name = f"{row['what']} x{row['providers']}" if row["providers"] else str(row["what"])
        print(f"{row['mode']:15} {name:32} {row['share']:6.3f} [{row['low']:.3f}, {row['high']:.3f}]  {verdict}")


if __name__ == "__main__":
    sys.exit(main())
