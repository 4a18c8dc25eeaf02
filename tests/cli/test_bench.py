"""`irframework bench`. No test looks at how fast anything is."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import irframework as ir
from irframework.cli import benchmarking, main

Json = Callable[..., tuple[int, Any]]
QUICK = ("--device", "cpu", "--rounds", "2")


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small cache is cold soon."""
    monkeypatch.setattr(benchmarking, "_cpu_cache", lambda: 1 << 20)


@pytest.fixture
def op(declare: Callable[..., ir.IrOp]) -> ir.IrOp:
    """An op with a provider for float32 and one that runs nowhere."""
    op = declare()

    @op.register_input_generator
    def inputs(shape: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
        return (torch.randn(shape, **options),)

    op.register_impl("fast", supports_args=ir.supports(dtype=torch.float32))(lambda x, weight=None, epsilon=1e-6: x * 2)
    op.register_impl("absent", supported=ir.reject("no such chip"))(lambda x, weight=None, epsilon=1e-6: x)
    return op


def test_a_document_has_all_that_was_measured(as_json: Json, op: ir.IrOp) -> None:
    code, document = as_json(
        "bench", op.name, "--shapes", "2x64,3x5x32", "--dtypes", "fp32,bf16", "--provider", "native,fast,absent", *QUICK
    )
    assert code == 0
    assert (document["op"], document["device"], document["timed"]) == (op.name, "cpu", "by the wall clock")
    assert document["copy_gb_per_second"] > 0
    measured = [(line["shape"], line["dtype"], line["provider"]) for line in document["lines"]]
    assert measured == [
        ([2, 64], "float32", "native"),
        ([2, 64], "float32", "fast"),
        ([3, 5, 32], "float32", "native"),
        ([3, 5, 32], "float32", "fast"),
        ([2, 64], "bfloat16", "native"),
        ([3, 5, 32], "bfloat16", "native"),
    ]
    for line in document["lines"]:
        for timing in (line["microseconds"], line["host_microseconds"], line["direct_host_microseconds"]):
            assert 0 < timing["low"] <= timing["median"] <= timing["high"]
        share = line["gb_per_second"] / document["copy_gb_per_second"]
        assert line["share_of_copy"] == pytest.approx(share)
        assert line["gb_per_second"] == pytest.approx(line["moved_bytes"] / line["microseconds"]["median"] / 1e3)
    assert document["lines"][0]["moved_bytes"] == 2 * 2 * 64 * 4  # read once, written once
    left_out = [(entry["dtype"], entry["provider"], entry["reason"]) for entry in document["left_out"]]
    assert left_out.count(("float32", "absent", "no such chip")) == 2
    assert [provider for dtype, provider, _ in left_out if dtype == "bfloat16"] == ["fast", "absent"] * 2
    assert not any(entry["failed"] for entry in document["left_out"])


def test_everybody_takes_part_when_nobody_is_named(as_json: Json, op: ir.IrOp) -> None:
    code, document = as_json("bench", op.name, "--shapes", "2x64", "--dtypes", "fp32", *QUICK)
    assert code == 0
    assert {line["provider"] for line in document["lines"]} == {"native", "fast", "inductor"}
    (compiled,) = (line for line in document["lines"] if line["provider"] == "inductor")
    assert compiled["host_microseconds"] is None  # it is not called through irframework
    assert compiled["direct_host_microseconds"]["median"] > 0


def test_an_op_with_outputs_of_its_own_counts_their_bytes(as_json: Json) -> None:
    code, document = as_json(
        "bench", "rms_norm_dynamic_quant_fp8", "--provider", "native", "--shapes", "4x128", "--dtypes", "bf16", *QUICK
    )
    assert code == 0
    rows, weight, codes, scales = 4 * 128 * 2, 128 * 2, 4 * 128, 4 * 4
    assert document["lines"][0]["moved_bytes"] == rows + weight + codes + scales


def test_an_implementation_that_works_in_place_is_measured_through_maybe_inplace(
    as_json: Json, declare: Callable[..., ir.IrOp]
) -> None:
    op = declare(allow_inplace=True)
    op.register_input_generator(lambda shape, **options: (torch.randn(shape, **options),))
    op.register_impl("over", inplace=True)(lambda x, weight=None, epsilon=1e-6: x.mul_(-1))
    code, document = as_json("bench", op.name, "--provider", "over", "--shapes", "2x64", "--dtypes", "fp32", *QUICK)
    assert (code, len(document["lines"])) == (0, 1)


def test_one_that_fails_is_named_and_does_not_take_the_others_with_it(
    op: ir.IrOp, capsys: pytest.CaptureFixture[str]
) -> None:
    op.register_impl("broken")(lambda x, weight=None, epsilon=1e-6: x.view(7, 7, 7))
    arguments = ("bench", op.name, "--shapes", "2x64", "--dtypes", "fp32", "--provider", "broken,fast,absent", *QUICK)
    assert main(arguments) == 1
    out = capsys.readouterr().out
    assert "failed: broken: RuntimeError" in out
    assert "left out: absent: no such chip" in out
    assert "2x64" in out
    assert "a copy moves" in out


def test_the_clock_gives_each_set_to_the_call_and_cools_the_cache() -> None:
    clock = benchmarking.WallClock("cpu")
    seen: list[int] = []
    timing = clock.time(seen.append, [(0,), (1,), (2,)], rounds=2)
    assert seen == [0, 1] + [0, 1, 2] * 2  # two warm up
    assert 0 < timing.low <= timing.median <= timing.high


def test_who_is_compared_takes_turns_in_an_order_of_chance_and_one_that_fails_stops_no_other() -> None:
    calls: list[str] = []

    def called(name: str, times: int = 1000) -> Callable[[int], None]:
        def call(number: int) -> None:
            if calls.count(name) >= times:
                raise RuntimeError(name)
            calls.append(name)

        return call

    names = ("a", "b", "c", "never", "twice")
    often = {"never": 0, "twice": 2}
    entries = [(name, called(name, often.get(name, 1000)), [(0,)]) for name in names]
    raced = benchmarking.race(entries, benchmarking.WallClock("cpu"), rounds=20, cold=False)
    assert {name: str(error) for name, error in raced.failed.items()} == {"never": "never", "twice": "twice"}
    assert {name: len(times) for name, times in raced.times.items()} == dict.fromkeys("abc", 20)
    assert raced.timing("a").low > 0
    rounds = [tuple(calls[start : start + 3]) for start in range(len(calls) - 60, len(calls), 3)]
    assert all(set(each) == set("abc") for each in rounds)
    assert len(set(rounds)) > 3


def test_bytes_of_an_expanded_tensor_count_once() -> None:
    x = torch.zeros(4, 8)
    assert benchmarking.moved_bytes((x, None, 1e-6), (x,)) == 2 * 4 * 8 * 4
    assert benchmarking.moved_bytes((x[:1].expand(100, 8),), ()) == 8 * 4
    assert benchmarking.moved_bytes(([x, x],), ()) == 2 * 4 * 8 * 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_call_that_no_graph_can_hold_does_not_spoil_the_next() -> None:
    clock = benchmarking.GraphClock("cuda")
    sets = [(torch.ones(1 << 22, device="cuda"),) for _ in range(4)]
    with pytest.raises(RuntimeError):
        clock.time(lambda x: x.sum().item(), sets, rounds=3)
    doubled = clock.time(lambda x: x * 2, sets, rounds=5)
    empty = clock.empty_kernel(rounds=5)
    assert 0 < empty.median < doubled.median
    share = 2 * sets[0][0].numel() * 4 / doubled.median / benchmarking.copy_bandwidth("cuda", clock)
    assert 0.3 < share < 2  # a unit that is wrong would be off by a thousand


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra 'plot'")
def test_the_plot_is_a_picture(op: ir.IrOp, tmp_path: Path) -> None:
    file = tmp_path / "bench.png"
    arguments = ("--shapes", "2x64,4x64", "--dtypes", "fp32,bf16", "--provider", "native,fast", "--plot", str(file))
    assert main(["bench", op.name, *arguments, *QUICK]) == 0
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the extra 'plot'")
def test_a_plot_that_cannot_be_written_is_an_error(as_json: Json, op: ir.IrOp, tmp_path: Path) -> None:
    file = tmp_path / "directory.png"
    file.mkdir()
    code, document = as_json("bench", op.name, "--plot", str(file), *QUICK)
    assert (code, document["error"]["type"]) == (1, "ArgumentError")
    assert "directory.png' cannot be written: Is a directory" in document["error"]["message"]


def test_without_matplotlib_the_plot_is_refused_before_anything_runs(
    as_json: Json, op: ir.IrOp, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else found(name))
    monkeypatch.setattr("irframework.cli.contestants.measure", lambda *_: pytest.fail("it measured"))
    code, document = as_json("bench", op.name, "--plot", "never.png", *QUICK)
    assert (code, document["error"]["type"]) == (1, "MissingDependencyError")
    assert "irframework[plot]" in document["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "kind", "says"),
    [
        (("rms_nrom",), "UnknownOpError", "Did you mean 'rms_norm'"),
        (("rms_norm", "--device", "xyz"), "DeviceUnavailableError", "'xyz'"),
        (("rms_norm", "--device", "meta"), "DeviceUnavailableError", "hold no data"),
        (("rms_norm", "--provider", "vlm_c", *QUICK), "UnknownProviderError", "Known: "),
        (("silu_and_mul", "--shapes", "2x3", *QUICK), "ArgumentError", "does not take shape 2x3 in bfloat16"),
    ],
)
def test_a_mistake_is_an_error(as_json: Json, arguments: tuple[str, ...], kind: str, says: str) -> None:
    code, document = as_json("bench", *arguments)
    assert (code, document["error"]["type"]) == (1, kind)
    assert says in document["error"]["message"]


def test_a_shape_that_the_generator_cannot_make_is_an_error(as_json: Json, declare: Callable[..., ir.IrOp]) -> None:
    op = declare()
    op.register_input_generator(lambda shape, **options: (torch.randn(shape[3]),))
    code, document = as_json("bench", op.name, *QUICK)
    assert (code, document["error"]["type"]) == (1, "ArgumentError")
    assert "makes no arguments of shape 1x4096" in document["error"]["message"]


def test_when_nobody_takes_the_call_the_reasons_are_told(as_json: Json, op: ir.IrOp) -> None:
    code, document = as_json("bench", op.name, "--provider", "absent,fast", *QUICK)
    assert (code, document["error"]["type"]) == (1, "NothingToMeasureError")
    assert "absent: no such chip" in document["error"]["message"]
    assert "fast: " in document["error"]["message"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--shapes", "4,x"),
        ("--dtypes", "bf17"),
        ("--rounds", "1"),
        ("--plot", "file.txt"),
        ("--plot", "no/such/directory/file.png"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["bench", "rms_norm", *arguments])
    assert left.value.code == 2
