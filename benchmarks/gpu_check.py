"""Checks every provider's numerics on a GPU against float64, eager and compiled. Times are `providers_gpu.py`'s.

Run it in the root of the repository, on the machine with the GPU:

    python benchmarks/gpu_check.py                  # a few minutes
    python benchmarks/gpu_check.py --providers triton --no-compile --json check.json

Of this repository nothing needs to be installed: `source_tree` puts it and the sources under plugins/ on the path, so
that entry points are found (the plugins, the backend `irframework`). Needed are torch, pluggy, pydantic and
importlib_metadata; kernels that are compiled (`vllm_c`) take part where their wheel is installed.

Numerics: `units` is the largest error, in units of the dtype's precision relative to the exact value (or to a tenth of
the result's root mean square, where the value is smaller); native's own is beside it. A check fails above
max(8, 2 x native's). Outputs are poisoned with NaN before each call.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from source_tree import make_importable

make_importable()

import torch  # noqa: E402
from gpu_cases import Arguments, Case, cases, gated_case, norm_case  # noqa: E402
from torch import Tensor  # noqa: E402

import irframework as ir  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Check:
    """The outcome of one call."""

    op: str
    case: str
    dtype: str
    provider: str
    how: str
    units: float
    native_units: float
    problem: str = ""


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def copied(arguments: Arguments) -> Arguments:
    """Copies with the same strides."""
    return tuple(
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device).copy_(a)
        if isinstance(a, Tensor) and a.numel() and 0 not in a.stride()
        else a
        for a in arguments
    )


def exact_results(op: ir.IrOp, arguments: Arguments) -> list[Tensor]:
    wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
    results = flat(op.native(*wide))
    if op.name == "fused_add_rms_norm":  # the norm is of the sum as it was rounded
        rounded = (arguments[0] + arguments[1]).double()
        results = [ir.ops.rms_norm.native(rounded, *wide[2:]), results[1]]
    return results


def units(got: list[Tensor], exact: list[Tensor]) -> float:
    worst = 0.0
    for mine, right in zip(got, exact, strict=True):
        if mine.numel() == 0:
            continue
        scale = torch.maximum(right.abs(), right.pow(2).mean().sqrt() * 0.1)
        error = (mine.double() - right).abs() / (scale * torch.finfo(mine.dtype).eps)
        worst = max(worst, math.inf if error.isnan().any() else error.max().item())
    return worst


def poison(arguments: Arguments) -> None:
    """Leave NaN in the memory that the allocator hands out next."""
    for tensor in [a for a in arguments if isinstance(a, Tensor) and a.is_floating_point()] * 2:
        torch.full((tensor.numel(),), math.nan, dtype=tensor.dtype, device=tensor.device)


def problem_of(got: list[Tensor], wanted: list[Tensor], before: Arguments, after: Arguments, donated: bool) -> str:
    for mine, native in zip(got, wanted, strict=True):
        if (mine.shape, mine.dtype, mine.device) != (native.shape, native.dtype, native.device):
            return f"returned {mine.dtype} {tuple(mine.shape)}, not {native.dtype} {tuple(native.shape)}"
        if not mine.is_contiguous():
            return f"returned strides {mine.stride()}"
    kept = zip(before, after, strict=True)
    if not donated and any(isinstance(a, Tensor) and not torch.equal(a, b) for a, b in kept):
        return "overwrote an argument"
    return ""


def lowered_elsewhere(op: str, provider: str) -> str:
    report = ir.last_report()
    chosen = set(report.selected_impls.get(op, {}).values()) if report is not None else set()
    return "" if chosen in ({provider}, set()) else f"was lowered to {', '.join(sorted(chosen))}"


class Checker:
    """Runs cases under providers and collects what came out."""

    def __init__(self, device: str, providers: list[str], compiled_dtypes: list[str]) -> None:
        self.device, self.providers, self.compiled_dtypes = device, providers, compiled_dtypes
        self.checks: list[Check] = []
        self.refused: dict[str, set[str]] = {}

    def run_large(self) -> None:
        """More than 2^31 elements: only the last rows are compared."""
        for case in (
            norm_case("rms_norm", "large", (524417, 4096)),
            gated_case("silu_and_mul", "large", (524417, 4096)),
        ):
            op = getattr(ir.ops, case.op)
            arguments = case.make(torch.bfloat16, self.device)
            tail = (arguments[0][-8:].clone(), *arguments[1:])
            for provider in self.providers:
                with ir.priority({case.op: [provider]}):
                    got = op(*arguments)[-8:]
                off, own = units([got], exact_results(op, tail)), units([op.native(*tail)], exact_results(op, tail))
                problem = "too far off" if off > max(8.0, 2 * own) else ""
                self.checks.append(Check(case.op, case.label, "bf16", provider, "eager", off, own, problem))
                del got

    def run(self, case: Case, name: str) -> None:
        dtype = DTYPES[name]
        op: ir.IrOp = getattr(ir.ops, case.op)
        torch.manual_seed(0)
        arguments = case.make(dtype, self.device)
        exact = exact_results(op, arguments)
        native = flat(op.native(*arguments))
        own = units(native, exact)
        for provider in self.providers:
            with ir.priority({case.op: [provider]}):
                decision = op.explain(*arguments)
            if decision.provider != provider:
                reason = next(c.reason for c in decision.candidates if c.provider == provider)
                self.refused.setdefault(f"{provider} {case.op}: {reason}", set()).add(f"{case.label} {name}")
                continue
            forms = {"eager": op} | ({"donated": op.maybe_inplace} if op.allow_inplace else {})
            if name in self.compiled_dtypes and case.compiled:
                forms |= {f"compiled {how}": _compiled(form) for how, form in list(forms.items())}
            for how, form in forms.items():
                problem, off = "", math.inf
                given = copied(arguments)
                poison(arguments)
                try:
                    with ir.priority({case.op: [provider]}):
                        got = flat(form(*given))
                    problem = problem_of(got, native, arguments, given, "donated" in how)
                    if "compiled" in how and not problem:
                        problem = lowered_elsewhere(case.op, provider)
                    off = units(got, exact)
                except Exception as error:
                    problem = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
                if not problem and off > max(8.0, 2 * own):
                    problem = "too far off"
                self.checks.append(Check(case.op, case.label, name, provider, how, off, own, problem))


def _compiled(form: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(lambda *arguments: form(*arguments), backend="irframework", fullgraph=True, dynamic=False)


def print_checks(checker: Checker) -> int:
    groups: dict[tuple[str, str, str, str], list[Check]] = {}
    for check in checker.checks:
        groups.setdefault((check.op, check.provider, check.dtype, check.how), []).append(check)
    print(f"\n{'op':20}{'provider':10}{'dtype':7}{'how':18}{'calls':>6}{'units':>8}{'native':>8}  failed")
    for (op, provider, dtype, how), checks in groups.items():
        failed = sum(bool(check.problem) for check in checks)
        off, own = max(c.units for c in checks), max(c.native_units for c in checks)
        print(f"{op:20}{provider:10}{dtype:7}{how:18}{len(checks):6}{off:8.2f}{own:8.2f}  {failed or ''}")
    for reason, where in sorted(checker.refused.items()):
        print(f"refused  {reason}  ({len(where)}: {', '.join(sorted(where)[:4])})")
    bad = [check for check in checker.checks if check.problem]
    for check in bad:
        print(
            f"FAILED   {check.provider} {check.op} {check.case} {check.dtype} {check.how}: "
            f"{check.problem} ({check.units:.2f})"
        )
    print(f"{len(checker.checks)} calls, {len(bad)} failed")
    return len(bad)


# --- the program --------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--providers", help="comma list; default: all that are supported here")
    parser.add_argument("--dtypes", default="bf16,fp16,fp32")
    parser.add_argument("--ops", help="comma list of ops to check")
    parser.add_argument("--compile-dtypes", default="bf16", help="dtypes that are checked under torch.compile as well")
    parser.add_argument("--no-compile", action="store_true", help="check eager calls only")
    parser.add_argument("--large", action="store_true", help="tensors of more than 2^31 elements too (30 GB)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    ir.load_plugins()
    print(f"torch {torch.__version__}", torch.cuda.get_device_name() if options.device == "cuda" else "")
    for plugin in ir.plugins():
        print(f"plugin {plugin.name} {plugin.version}: {plugin.status} {plugin.reason or ''}")
    found: dict[str, str | None] = {}
    for impl in (impl for op in (ir.ops.rms_norm, ir.ops.silu_and_mul) for impl in op.impls.values()):
        here = impl.device_types is None or options.device in impl.device_types
        reason = impl.unsupported_reason if here else f"runs on {', '.join(impl.device_types)}"
        if impl.provider != "native":
            print(f"provider {impl.name}: {reason or 'supported'}")
            found[impl.provider] = found.get(impl.provider) or reason
    providers = [name for name, reason in found.items() if reason is None]
    if options.providers:
        providers = [name for name in options.providers.split(",") if name in providers]
    compiled = [] if options.no_compile else options.compile_dtypes.split(",")
    checker = Checker(options.device, providers, compiled)
    for case in cases():
        if not options.ops or case.op in options.ops.split(","):
            for dtype in options.dtypes.split(","):
                checker.run(case, dtype)
    if options.large:
        checker.run_large()
    failed = print_checks(checker)
    if options.json:
        options.json.write_text(json.dumps({"checks": [asdict(c) for c in checker.checks]}, indent=1))
    return 1 if failed or not providers else 0


if __name__ == "__main__":
    sys.exit(main())
