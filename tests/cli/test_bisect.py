"""`irframework bisect`: real programs whose kernels are wrong, and stand-ins for every other way a command can end.

A stand-in does what a program with irframework in it does: it reads the limit, takes numbers and logs them.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from irframework.cli import main
from irframework.cli.bisection import read_log

Search = Callable[..., tuple[int, Any]]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OP_PRIORITY", "DISABLE_PASSES", "DISABLE_FUSIONS", "BISECT_LIMIT", "BISECT_LOG"):
        monkeypatch.delenv(f"IRFRAMEWORK_{name}", raising=False)


@pytest.fixture
def search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Search:
    """Bisect a Python program: (exit code, document). Options come before the program."""

    def call(program: str, *options: str, arguments: tuple[str, ...] = ()) -> tuple[int, Any]:
        file = tmp_path / "program.py"
        file.write_text(textwrap.dedent(program))
        code = main(["bisect", *options, "--json", "--", sys.executable, str(file), *arguments])
        return code, json.loads(capsys.readouterr().out)

    return call


# --- real programs -------------------------------------------------------------------------------------------------

PROGRAM = """
    import sys
    import torch
    import irframework as ir

    @ir.register_op(name="tb_scale")
    def scale(x: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x * factor

    @ir.register_op(name="tb_shift")
    def shift(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    @scale.register_impl("right")
    def right(x, factor=2.0):
        return x * factor

    @scale.register_impl("wrong", supports_args=ir.supports(ndim={"x": 2}))
    def wrong(x, factor=2.0):
        return x * factor + (x.shape[0] == 3)

    @shift.register_impl("other")
    def other(x):
        return 1 + x

    def model(x, y):
        a = shift(scale(x))
        b = scale(y)  # the wrong one
        return a + b.sum() + scale(a.flatten()).sum()

    function = model if sys.argv[1] == "eager" else torch.compile(model, backend=sys.argv[1])
    with torch.no_grad(), ir.priority("tb_scale=wrong,right"):
        for _ in range(2):
            result = function(torch.ones(2, 4), torch.ones(3, 4))
    assert result[0, 0].item() == 75, result
"""


def _check_the_wrong_call(code: int, document: Any) -> None:
    assert code == 0
    assert document["verdict"] == "implementation"
    (culprit,) = document["culprits"]
    assert (culprit["number"], culprit["op"], culprit["provider"]) == (3, "tb_scale", "wrong")
    assert culprit["call_site"].endswith("in model: b = scale(y)  # the wrong one")
    assert culprit["source"].endswith("program.py:18")  # where `wrong` is registered
    assert document["reproduce"] == {
        "IRFRAMEWORK_BISECT_LIMIT=2": "succeeds",
        "IRFRAMEWORK_BISECT_LIMIT=3": "fails (exit code 1)",
    }
    assert document["avoid"] == "IRFRAMEWORK_OP_PRIORITY=tb_scale=native"
    assert document["avoided"] is False  # the program's own block stands above it
    assert any("AssertionError" in line for line in document["tail"])


@pytest.mark.slow
def test_the_wrong_call_of_an_eager_program_is_found(search: Search) -> None:
    code, document = search(PROGRAM, arguments=("eager",))
    _check_the_wrong_call(code, document)
    assert document["culprits"][0]["node"] is None


@pytest.mark.slow
def test_the_wrong_node_of_a_compiled_program_is_found(search: Search) -> None:
    code, document = search(PROGRAM, arguments=("irframework",))
    _check_the_wrong_call(code, document)
    culprit = document["culprits"][0]
    assert (culprit["node"], culprit["graph"], culprit["stage"]) == ("tb_scale_1", "0/0", "lower_functional")


INPLACE = """
    import torch
    import irframework as ir
    from compiler_support import lowered

    @ir.register_op(name="tb_add", allow_inplace=True)
    def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y

    library = torch.library.Library("tb", "DEF")
    library.define("add_(Tensor(a!) x, Tensor y) -> ()")

    def add_(x, y):
        x.add_(y)
        if y.dim() == 0:
            x.mul_(2)

    library.impl("add_", add_, "CompositeExplicitAutograd")
    torch.library.register_fake("tb::add_", lambda x, y: None, lib=library)

    @add.register_impl("kernel", inplace=True)
    def kernel(x, y):
        torch.ops.tb.add_(x, y)
        return x

    def model(x, y):
        x = add.maybe_inplace(x + 0, y)
        return add.maybe_inplace(x, y[0])  # a number

    with torch.no_grad():
        result = torch.compile(model, backend=lowered)(torch.ones(1), torch.ones(1))
    assert result.item() == 3, result
"""


@pytest.mark.slow
def test_a_wrong_in_place_kernel_is_found_and_no_pass_is_blamed(
    search: Search, monkeypatch: pytest.MonkeyPatch
) -> None:
    support = str(Path(__file__).parents[1] / "compiler")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [support, os.environ.get("PYTHONPATH", "")])))
    code, document = search(INPLACE)
    assert (code, document["verdict"], document["passes"]) == (0, "implementation", [])
    assert document["culprits"][0]["call_site"].endswith("# a number")
    assert document["culprits"][0]["stage"] == "lower_inplace"
    assert document["avoided"] is True


FUSED = """
    import torch
    import irframework as ir
    from compiler_support import lowered

    @ir.register_op(name="tb_bent", fuse=True)
    def tb_bent(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + x

    @tb_bent.register_spelling
    def by_exponentials(x):
        return torch.exp(2 * x).sub(1).div(torch.exp(2 * x).add(1)) + x

    tb_bent.register_impl("kernel")(tb_bent.native)

    def model(x):
        y = tb_bent.native(x)
        return by_exponentials(y)  # the other spelling

    x = torch.linspace(-1, 1, 64)
    with torch.no_grad():
        assert torch.equal(torch.compile(model, backend=lowered)(x), model(x)), "not bit for bit"
"""


@pytest.mark.slow
def test_a_fusion_that_changes_a_result_is_found(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    support = str(Path(__file__).parents[1] / "compiler")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [support, os.environ.get("PYTHONPATH", "")])))
    code, document = search(FUSED)
    assert (code, document["verdict"], document["passes"]) == (0, "fusion", [])
    (culprit,) = document["culprits"]
    assert (culprit["op"], culprit["stage"]) == ("tb_bent", "fuse")
    assert culprit["call_site"].endswith("return torch.exp(2 * x).sub(1).div(torch.exp(2 * x).add(1)) + x")
    assert document["text"].startswith(f"Fusion {culprit['number']} makes it fail: op 'tb_bent' at ")
    assert document["avoid"] == "IRFRAMEWORK_DISABLE_FUSIONS=tb_bent"
    assert document["avoided"] is True


# --- stand-ins -----------------------------------------------------------------------------------------------------

STAND_IN = """
    import json, os, signal, subprocess, sys, time

    limit = os.environ.get("IRFRAMEWORK_BISECT_LIMIT")
    limit = None if limit is None else int(limit)
    log = os.environ.get("IRFRAMEWORK_BISECT_LOG")
    disabled = os.environ.get("IRFRAMEWORK_DISABLE_PASSES", "").split(",")
    used = 0

    def write(entry):
        if log:
            with open(log, "a") as file:
                file.write(json.dumps({"pid": os.getpid(), **entry}) + "\\n")

    def passes(*names):
        write({"passes": list(names)})

    def fuse(op):
        global used
        off = os.environ.get("IRFRAMEWORK_DISABLE_FUSIONS", "").split(",")
        if limit is not None and used >= limit or op in off:
            return False
        used += 1
        place = dict(call_site="a.py:1, in f: x + y", node="add", graph="0/0", stage="fuse")
        write(dict(number=used, op=op, provider="fusion", plugin=None, version=None, source="ops.py:3", **place))
        return True

    def choose(op, site="a.py:1, in f: op(x)", node=None):
        global used
        if limit is not None and used >= limit or f"{op}=native" in os.environ.get("IRFRAMEWORK_OP_PRIORITY", ""):
            return False
        used += 1
        place = dict(call_site=site, node=node, graph=node and "0/0", stage=node and "lower_inplace")
        write(dict(number=used, op=op, provider="p", plugin="acme", version="1.2", source="acme.py:3", **place))
        return True
"""


def stand_in(body: str) -> str:
    return textwrap.dedent(STAND_IN) + textwrap.dedent(body)


@pytest.mark.parametrize("culprit", range(1, 9))
def test_every_position_is_found(search: Search, culprit: int) -> None:
    code, document = search(stand_in(f"sys.exit([choose(f'op{{n}}') for n in range(1, 9)][{culprit} - 1])"))
    assert code == 0
    assert [choice["number"] for choice in document["culprits"]] == [culprit]
    assert document["avoid"] == f"IRFRAMEWORK_OP_PRIORITY=op{culprit}=native"
    assert document["avoided"] is True


def test_a_fusion_is_found_among_kernels(search: Search) -> None:
    code, document = search(stand_in("fuse('f'); wrong = fuse('g'); choose('a'); sys.exit(wrong)"))
    assert (code, document["verdict"], document["text"]) == (0, "fusion", "Fusion 2 makes it fail: op 'g' at add.")
    assert document["avoid"] == "IRFRAMEWORK_DISABLE_FUSIONS=g"
    assert document["avoided"] is True


def test_a_fusion_is_shown_with_its_place(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(stand_in("sys.exit(fuse('f'))"))
    assert main(["bisect", "--", sys.executable, str(file)]) == 0
    out = capfd.readouterr().out
    for text in ("Fusion 1 makes it fail: op 'f' at add.", "fused op    f", "declared    ops.py:3", "add of graph 0/0"):
        assert text in out
    assert "IRFRAMEWORK_DISABLE_FUSIONS=f   # succeeds" in out
    assert "ir.priority" not in out


def test_fusions_that_the_caller_left_out_stay_so(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRFRAMEWORK_DISABLE_FUSIONS", "mine")
    document = search(stand_in("sys.exit(fuse('f'))"))[1]
    assert document["avoid"] == "IRFRAMEWORK_DISABLE_FUSIONS=mine,f"


def test_the_fusion_pass_is_not_blamed_for_the_kernel_of_a_fused_op(search: Search) -> None:
    body = "passes('fuse', 'lower_inplace'); fuse('f'); sys.exit(choose('f', node='f') and 'fuse' not in disabled)"
    document = search(stand_in(body))[1]
    assert (document["verdict"], document["passes"]) == ("implementation", [])


def test_the_first_of_two_faults_is_found_and_the_setting_is_not_said_to_help(search: Search) -> None:
    code, document = search(stand_in("sys.exit(sum([choose('a'), choose('b'), choose('c')][1:]))"))
    assert (code, document["culprits"][0]["op"]) == (0, "b")
    assert document["avoided"] is False


def test_choices_that_fail_only_together_are_found_at_the_last_of_them(search: Search) -> None:
    code, document = search(stand_in("choose('a'); sys.exit(choose('b') and choose('c') and choose('d'))"))
    assert (code, document["culprits"][0]["op"]) == (0, "d")


def test_the_callers_own_priorities_are_kept_in_the_advice(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRFRAMEWORK_OP_PRIORITY", "other=p;bad=p")
    document = search(stand_in("sys.exit(choose('bad'))"))[1]
    assert document["avoid"] == 'IRFRAMEWORK_OP_PRIORITY="other=p;bad=native"'
    assert document["avoided"] is True


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT"])
def test_a_command_that_dies_by_a_signal_has_failed(search: Search, name: str) -> None:
    body = f"choose('a')\nif choose('b'):\n    os.kill(os.getpid(), signal.{name})\nchoose('c')"
    code, document = search(stand_in(body))
    assert (code, document["culprits"][0]["op"]) == (0, "b")
    assert document["reproduce"]["IRFRAMEWORK_BISECT_LIMIT=2"] == f"fails (killed by {name})"


def test_a_command_that_takes_too_long_has_failed(search: Search) -> None:
    code, document = search(stand_in("choose('a')\nif choose('b'):\n    time.sleep(60)"), "--timeout", "3")
    assert (code, document["culprits"][0]["op"]) == (0, "b")
    assert document["reproduce"]["IRFRAMEWORK_BISECT_LIMIT=2"].startswith("fails (no end after")


def test_a_pass_that_spoils_native_is_found(search: Search) -> None:
    body = "passes('lower_functional', 'acme.rewrite', 'verify'); choose('a'); sys.exit('acme.rewrite' not in disabled)"
    code, document = search(stand_in(body))
    assert (code, document["verdict"], document["passes"]) == (0, "pass", ["acme.rewrite"])
    assert document["avoid"] == "IRFRAMEWORK_DISABLE_PASSES=acme.rewrite"


def test_passes_that_the_caller_switched_off_stay_off(search: Search, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IRFRAMEWORK_DISABLE_PASSES", "mine")
    document = search(stand_in("passes('theirs'); sys.exit(disabled != ['mine', 'theirs'])"))[1]
    assert document["avoid"] == "IRFRAMEWORK_DISABLE_PASSES=mine,theirs"


def test_a_pass_that_spoils_one_kernel_is_named_beside_the_kernel(search: Search) -> None:
    body = "passes('lower_inplace', 'remove_copies', 'verify'); sys.exit(choose('a', node='a') and "
    code, document = search(stand_in(f"{body}'remove_copies' not in disabled)"))
    assert (code, document["verdict"], document["passes"]) == (0, "implementation", ["remove_copies"])
    assert "remove_copies is switched off" in document["text"]


def test_a_command_that_always_fails(search: Search) -> None:
    code, document = search(stand_in("passes('remove_copies'); choose('a'); print('so wrong'); sys.exit(3)"))
    assert (code, document["verdict"], document["found"]) == (1, "always_fails", False)
    assert "fails (exit code 3) with native implementations only" in document["text"]
    assert document["tail"] == ["so wrong"]


def test_a_command_that_never_fails(search: Search) -> None:
    code, document = search(stand_in("choose('a')"))
    assert (code, document["verdict"]) == (1, "never_fails")


def test_a_command_that_fails_only_while_it_is_not_watched(search: Search) -> None:
    code, document = search(stand_in("choose('a'); sys.exit(log is None)"))
    assert (code, document["verdict"]) == (1, "only_unwatched")
    assert "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1" in document["text"]


def test_a_command_that_chooses_nothing(search: Search) -> None:
    code, document = search(stand_in("sys.exit(limit is None)"))
    assert (code, document["verdict"]) == (1, "nothing_counted")


def test_numbers_that_change_are_not_trusted(search: Search) -> None:
    body = """
        names = ["b", "c", "d", "e"]
        names.reverse() if limit else None
        sys.exit(sum([choose("a"), *[choose(name) for name in names], choose("bad")][5:]))
    """
    code, document = search(stand_in(body))
    assert (code, document["verdict"], document["culprits"]) == (1, "not_repeatable", [])
    assert "choice 2 was b:p (a.py:1, in f: op(x)), and is now e:p (a.py:1, in f: op(x))" in document["text"]


def test_a_number_that_is_missing_is_not_trusted(search: Search) -> None:
    body = "[choose(name) for name in ('abcd' if limit is None else 'ab')]; sys.exit(limit is None)"
    code, document = search(stand_in(body), "--log", os.devnull)
    assert (code, document["verdict"]) == (1, "not_repeatable")
    assert "choice 3 was c:p (a.py:1, in f: op(x)), and is now missing" in document["text"]


def test_an_outcome_that_changes_is_not_trusted(search: Search, tmp_path: Path) -> None:
    body = f"""
        choose("a"), choose("b")
        with open({str(tmp_path / "count")!r}, "a+") as file:
            file.write("x")
            file.seek(0)
            count = len(file.read())
        sys.exit(limit is None or count == 3)  # fails with 1 at first, and not again
    """
    code, document = search(stand_in(body))
    assert (code, document["verdict"]) == (1, "not_repeatable")
    assert "IRFRAMEWORK_BISECT_LIMIT=1 it failed before, and now it succeeds" in document["text"]


PROCESSES = """
    if len(sys.argv) > 1:
        codes = [choose("a"), choose("b") and sys.argv[1] == "1", choose(OP)]
        sys.exit(codes[FAULT])
    workers = [subprocess.Popen([sys.executable, __file__, str(rank)]) for rank in range(2)]
    sys.exit(max([worker.wait() for worker in workers]))
"""


def test_processes_that_do_the_same_have_one_culprit(search: Search) -> None:
    code, document = search(stand_in(PROCESSES.replace("OP", "'c'").replace("FAULT", "1")))
    assert code == 0
    assert [choice["op"] for choice in document["culprits"]] == ["b"]


def test_processes_that_do_different_things_have_a_culprit_each(search: Search) -> None:
    code, document = search(stand_in(PROCESSES.replace("OP", "'c' + sys.argv[1]").replace("FAULT", "2")))
    assert code == 0
    assert sorted(choice["op"] for choice in document["culprits"]) == ["c0", "c1"]


def test_what_a_command_leaves_running_is_ended(search: Search, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    body = f"""
        worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
        open({str(pids)!r}, "a").write(f"{{worker.pid}}\\n")
        sys.exit(choose("a"))
    """
    assert search(stand_in(body))[0] == 0
    assert not any(_still_runs(int(pid)) for pid in pids.read_text().split())


def _still_runs(pid: int) -> bool:
    """Whether a process goes on although it was killed; dying takes a moment."""
    for _ in range(100):
        if not _runs(pid):
            return False
        time.sleep(0.1)
    return True


def _runs(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    return False


# --- the command ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_search_stops_the_command(tmp_path: Path, number: signal.Signals) -> None:
    pid_file = tmp_path / "pid"
    body = f"import os, time; open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep(120)"
    command = [sys.executable, "-m", "irframework", "bisect", "--", sys.executable, "-c", body]
    searching = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in a background job
    )
    for _ in range(600):
        if pid_file.exists() and pid_file.read_text():
            break
        time.sleep(0.1)
    searching.send_signal(number)
    output = searching.communicate(timeout=60)[0]
    assert searching.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], output
    assert not _still_runs(int(pid_file.read_text()))


def test_the_report_for_a_person(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(stand_in("print('so wrong'); choose('a'); sys.exit(choose('b', node='n'))"))
    assert main(["bisect", "--", sys.executable, str(program)]) == 0
    captured = capsys.readouterr()
    for text in (
        "  | so wrong",
        "op          b",
        "call site   a.py:1, in f: op(x)",
        "provider    p",
        "plugin      acme 1.2",
        "registered  acme.py:3",
        "node        n of graph 0/0, lowered by lower_inplace",
        f"IRFRAMEWORK_BISECT_LIMIT=1 {sys.executable} {program}   # succeeds",
        f"IRFRAMEWORK_BISECT_LIMIT=2 {sys.executable} {program}   # fails (exit code 1)",
        "IRFRAMEWORK_OP_PRIORITY=b=native   # succeeds",
        'with ir.priority(b="native"): ...',
    ):
        assert text in captured.out
    assert "no limit, all that the command chooses: fails (exit code 1), 2 chosen" in captured.err


def test_the_log_is_kept_where_it_is_asked_for(search: Search, tmp_path: Path) -> None:
    search(stand_in("choose('a'); sys.exit(choose('b'))"), "--log", str(tmp_path / "kept"))
    kept = [json.loads(line) for line in (tmp_path / "kept").read_text().splitlines()]
    assert [(entry["number"], entry["op"]) for entry in kept] == [(1, "a"), (2, "b")]


def test_lines_of_the_log_that_are_not_ours_are_passed_over(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b'\xff\xfe\n[1]\n1\n"text"\n{"pid": 1}\n{"pid": 1, "number": 1}\n{"pid": 1, "passes": 3}\n{"pid"')
    assert read_log(log) == ((), ())


def test_options_of_the_command_are_its_own(search: Search) -> None:
    arguments = ("--json", "--timeout", "x", "--ir-op-priority.nonesuch=a", "--", "-h")
    code, document = search(stand_in(f"sys.exit(tuple(sys.argv[1:]) != {arguments!r})"), arguments=arguments)
    assert (code, document["verdict"]) == (1, "never_fails")


@pytest.mark.parametrize("arguments", [(), ("--",), ("--timeout", "0", "--", "true"), ("true", "--unknown")])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["bisect", *arguments])
    assert leaving.value.code == 2


def test_a_command_that_cannot_be_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bisect", "--", "no-such-program"]) == 2
    assert "error: no-such-program: No such file or directory" in capsys.readouterr().err


def test_a_log_that_cannot_be_written_is_known_before_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bisect", "--log", str(tmp_path / "no" / "log"), "--", "true"]) == 2
    captured = capsys.readouterr()
    assert "No such file or directory" in captured.err
    assert "chosen" not in captured.err


def test_the_search_imports_no_torch() -> None:
    code = "import sys, irframework.cli.bisect, irframework.cli.bisection; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
