"""The order in which providers are asked."""

import asyncio
import contextvars
import functools
import pickle
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import irframework as ir
from irframework import errors
from irframework.platform import Platform, add_platform, current_platform
from irframework.priority import (
    current_state,
    entries_for,
    fingerprint,
    option_scope,
    parse_priorities,
    parse_providers,
    restored,
    snapshot,
)
from irframework.registry import Transaction, registry
from irframework.settings import layers, settings

PROVIDERS = ("a", "b", "c", "d")
VALUES = {"native": 2.0, "a": 10.0, "b": 11.0, "c": 12.0, "d": 13.0}


def with_providers(op):
    def provide(name):
        @op.register_impl(name)
        def fn(x, weight=None, epsilon=1e-6):
            return torch.full_like(x, VALUES[name])

    for name in PROVIDERS:
        provide(name)
    return op


@pytest.fixture
def op(declare):
    return with_providers(declare())


@pytest.fixture
def platform():
    """Make a platform with given defaults current."""
    transactions = []

    def make(defaults, **members):
        kind = type("TestPlatform", (Platform,), {"name": "testdev", "device_types": ("cpu",), **members})
        kind.is_available = lambda self: True
        kind.get_default_ir_op_priority = defaults if callable(defaults) else lambda self, mode="eager": defaults
        transactions.append(Transaction("test"))
        with registry.registering(transactions[-1]):
            add_platform("test", kind())
        return current_platform()

    yield make
    for transaction in transactions:
        transaction.roll_back()


@pytest.fixture
def environment(monkeypatch):
    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"IRFRAMEWORK_{name}", value)
        settings.cache_clear()
        registry.changed()

    yield set_variables
    monkeypatch.undo()
    settings.cache_clear()
    registry.changed()


def chosen(op):
    value = op(torch.ones(1)).item()
    provider = next(name for name, known in VALUES.items() if known == value)
    assert op.dispatch(torch.ones(1)).provider == provider
    return provider


# --- reading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", ["a,b", " a , b ", ["a", "b"], ("a", "b"), iter(["a", "b"])])
def test_lists_and_comma_strings_say_the_same(value):
    assert parse_providers(value, "rms_norm") == ("a", "b")


@pytest.mark.parametrize("value", ["", "a,", ",a", "a,,b", [], [""], "a=b", "a;b", [3], 3, None, ["a", None], {"a": 1}])
def test_list_that_cannot_be_read_names_the_op(value):
    with pytest.raises(errors.PrioritySyntaxError, match="rms_norm"):
        parse_providers(value, "rms_norm")


@pytest.mark.parametrize("value", ["a,b,a", ["a", "a"], "a?,a", "native,native"])
def test_provider_named_twice_is_refused(value):
    with pytest.raises(errors.PrioritySyntaxError, match="twice"):
        parse_providers(value, "rms_norm")


def test_string_of_several_ops_is_read():
    assert parse_priorities("rms_norm=a, b; silu_and_mul=c;", "here") == {
        "rms_norm": ("a", "b"),
        "silu_and_mul": ("c",),
    }


@pytest.mark.parametrize("value", ["rms_norm", "rms_norm:a", "=a", "rms norm=a", "a=b=c", "rms_norm=", 3, ["a"]])
def test_string_that_cannot_be_read_says_where_it_was_written(value):
    with pytest.raises(errors.PrioritySyntaxError, match=r"here|op 'rms_norm'|op 'a'"):
        parse_priorities(value, "here")


def test_op_named_twice_in_a_string_is_refused():
    with pytest.raises(errors.PrioritySyntaxError, match=r"rms_norm.*twice"):
        parse_priorities("rms_norm=a;rms_norm=b", "here")


provider_names = st.from_regex(r"[a-z][a-z0-9_.-]{0,5}\??", fullmatch=True)
provider_lists = st.lists(provider_names, min_size=1, max_size=4, unique_by=lambda name: name.rstrip("?"))


@given(st.dictionaries(st.sampled_from(["rms_norm", "silu_and_mul", "other_op"]), provider_lists))
def test_what_is_written_is_what_is_read(lists):
    text = ";".join(f"{op}={','.join(providers)}" for op, providers in lists.items())
    expected = {op: tuple(providers) for op, providers in lists.items()}
    assert parse_priorities(text, "here") == parse_priorities(lists, "here") == expected


# --- context ---------------------------------------------------------------------------------------------------------


def test_context_stands_in_front_and_the_rest_follows(op):
    with ir.priority({op.name: "c"}):
        assert op.get_priority() == ["c", "a", "b", "d", "native"]
        assert chosen(op) == "c"
    assert op.get_priority() == ["a", "b", "c", "d", "native"]


def test_all_spellings_of_a_context_are_the_same(op):
    for context in (ir.priority({op.name: ["c"]}), ir.priority(f"{op.name}=c"), ir.priority(**{op.name: "c"})):
        with context:
            assert chosen(op) == "c"


def test_inner_context_stands_before_the_outer(op):
    with ir.priority({op.name: "d,c"}), ir.priority({op.name: "c,b"}):
        assert op.get_priority() == ["c", "b", "d", "a", "native"]


def test_native_ends_a_list(op):
    with ir.priority({op.name: "c,native"}):
        assert op.get_priority() == ["c", "native"]
    with ir.priority({op.name: "native,c"}):
        assert op.get_priority() == ["native"]
        assert chosen(op) == "native"


def test_context_ends_with_an_exception(op):
    with pytest.raises(ZeroDivisionError), ir.priority({op.name: "c"}):
        raise ZeroDivisionError
    assert chosen(op) == "a"


def test_one_context_object_may_be_used_again_and_nested(op):
    context = ir.priority({op.name: "c"})
    for _ in range(2):
        with context, ir.priority({op.name: "b"}), context:
            assert chosen(op) == "c"
        assert chosen(op) == "a"


def test_one_context_object_may_be_used_by_two_threads(op):
    context = ir.priority({op.name: "c"})
    inside, leave = threading.Event(), threading.Event()
    problems = []

    def work():
        try:
            with context:
                inside.set()
                leave.wait(10)
            problems.extend([] if chosen(op) == "a" else ["not restored"])
        except Exception as error:
            problems.append(error)

    thread = threading.Thread(target=work)
    with context:
        thread.start()
        inside.wait(10)
    assert chosen(op) == "a"
    leave.set()
    thread.join()
    assert problems == []


def test_context_decorates_a_function(op):
    @ir.priority({op.name: "c"})
    def run(depth=0):
        return run(1) if depth == 0 else chosen(op)

    assert run() == "c"
    assert chosen(op) == "a"


def test_context_cannot_decorate_what_runs_later():
    async def later():
        pass

    def generator():
        yield

    for function in (later, generator):
        with pytest.raises(errors.PrioritySyntaxError, match=r"with ir.priority"):
            ir.priority(rms_norm="native")(function)


@pytest.mark.parametrize("lists", [{"rms_nrom": "native"}, "rms_nrom=native"])
def test_unknown_op_in_a_context_is_an_error_with_the_closest_name(lists):
    with pytest.raises(errors.UnknownOpError, match="'rms_norm'"), ir.priority(lists):
        pass


def test_unknown_provider_is_an_error_with_the_known_ones(op):
    with (
        pytest.raises(errors.UnknownProviderError, match=r"'aa'.*Did you mean 'a'.*native"),
        ir.priority({op.name: "aa"}),
    ):
        pass


def test_optional_provider_is_skipped_with_one_warning(op, caplog):
    for _ in range(3):
        with ir.priority({op.name: "not_here?,c?"}):
            assert op.get_priority()[0] == "c"
            assert chosen(op) == "c"
    assert [r.getMessage() for r in caplog.records if "not_here" in r.getMessage()] == [
        f"Priority of op {op.name} (context): the optional provider not_here is not here; it is skipped"
    ]


def test_threads_do_not_see_each_others_priorities(op):
    gate = threading.Barrier(3)
    seen = {}

    def work(provider):
        with ir.priority({op.name: provider}):
            gate.wait(10)
            seen[provider] = {chosen(op) for _ in range(100)}
            gate.wait(10)

    threads = [threading.Thread(target=work, args=(p,)) for p in "bcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {p: {p} for p in "bcd"}
    assert chosen(op) == "a"


def test_tasks_do_not_see_each_others_priorities_and_inherit_their_starters(op):
    async def work(provider):
        before = chosen(op)
        with ir.priority({op.name: provider}):
            await asyncio.sleep(0)
            inside = {chosen(op) for _ in range(3)}
            await asyncio.sleep(0)
            inside.add(chosen(op))
        return before, inside

    async def main():
        with ir.priority({op.name: "d"}):
            return await asyncio.gather(work("b"), work("c"))

    assert asyncio.run(main()) == [("d", {"b"}), ("d", {"c"})]


def test_many_contexts_each_decide_rightly(op):
    for _ in range(3):
        for provider in (*PROVIDERS, "native"):
            for second in PROVIDERS:
                if second != provider:
                    with ir.priority({op.name: [provider, second]}):
                        assert chosen(op) == provider
    assert chosen(op) == "a"


# --- layers ----------------------------------------------------------------------------------------------------------


def test_origin_tells_which_layer_named_a_provider(op, configured, environment, platform):
    for provider in ("e", "f"):
        op.register_impl(provider)(lambda x, weight=None, epsilon=1e-6: x + 1)
    platform({op.name: ["f"]})
    environment(OP_PRIORITY=f"{op.name}=d")
    layers.cli = ir.KernelConfig(ir_op_priority={op.name: "c"})
    try:
        configured(ir_op_priority={op.name: "b"})
        with option_scope({op.name: "e"}), ir.priority({op.name: "a"}):
            found = [(e.provider, e.origin) for e in entries_for(op, "cpu", "inductor")]
    finally:
        layers.cli = None
    assert found == [
        ("a", "context"),
        ("e", "option"),
        ("b", "config"),
        ("c", "cli"),
        ("d", "env"),
        ("f", "platform default"),
        ("native", "registered"),
    ]


def test_compile_option_counts_for_compiled_graphs_only(op):
    with option_scope({op.name: "c"}):
        assert entries_for(op, "cpu", "inductor")[0].provider == "c"
        assert entries_for(op, "cpu", "eager")[0].provider == "a"


def test_users_list_is_put_before_the_platforms(op, platform, configured):
    platform({op.name: ["d", "c", "native"]})
    configured(ir_op_priority={op.name: "c"})
    assert op.get_priority() == ["c", "d", "native"]


def test_platform_default_for_an_op_comes_before_its_star_list(declare, platform):
    first, second = with_providers(declare()), with_providers(declare())
    platform({first.name: ["d"], "*": ["c", "not_installed"]})
    assert first.get_priority() == ["d", "a", "b", "c", "native"]
    assert second.get_priority() == ["c", "a", "b", "d", "native"]


def test_op_without_a_list_of_its_own_takes_other_registered_providers_by_name(declare, platform):
    first, second = with_providers(declare()), with_providers(declare())
    platform({first.name: ["d"]})
    assert second.get_priority() == ["a", "b", "c", "d", "native"]


def test_platform_default_may_depend_on_the_mode(op, platform):
    platform(lambda self, mode="eager": {op.name: ["c"] if mode == "eager" else ["native"]})
    assert [e.provider for e in entries_for(op, "cpu", "inductor")] == ["native"]
    assert op.get_priority()[0] == "c"
    assert chosen(op) == "c"


def test_platform_default_may_be_a_config_object_and_hold_optional_names(op, platform):
    platform(ir.IrOpPriorityConfig(**{op.name: "nobody?,d?"}))
    assert op.get_priority()[0] == "d"


def test_platform_default_sees_the_final_configuration(op, platform, configured):
    def check(self, config):
        return config.model_copy(update={"autotune": True})

    def defaults(self, mode="eager"):
        return {op.name: ["d"] if ir.current_config().autotune else ["c"]}

    platform(defaults, check_and_update_config=check)
    configured()
    assert chosen(op) == "d"


def test_environment_names_providers(op, environment):
    environment(OP_PRIORITY=f"{op.name}=c")
    assert chosen(op) == "c"


def test_malformed_environment_is_an_error_that_names_the_variable(op, environment):
    environment(OP_PRIORITY="rms_norm")
    with pytest.raises(errors.PrioritySyntaxError, match="IRFRAMEWORK_OP_PRIORITY"):
        op(torch.ones(1))


def test_misspelt_op_in_the_environment_is_warned_about(op, environment, caplog):
    environment(OP_PRIORITY="rms_nrom=native")
    op(torch.ones(1))
    assert any("rms_nrom" in r.getMessage() and "'rms_norm'" in r.getMessage() for r in caplog.records)


def test_unknown_provider_in_the_environment_is_an_error(op, environment):
    environment(OP_PRIORITY=f"{op.name}=nobody")
    with pytest.raises(errors.UnknownProviderError, match="nobody"):
        op(torch.ones(1))


@pytest.mark.parametrize("times", [1, 3])
def test_registration_while_lists_are_merged_is_seen(op, platform, times):
    """What a hook registers while it is asked must not be hidden by a list merged before."""

    def defaults(self, mode="eager"):
        if "late" not in op.impls:
            op.register_impl("late")(lambda x, weight=None, epsilon=1e-6: torch.full_like(x, 13.0))
        return {op.name: ["late"]}

    platform(defaults)
    for _ in range(times):
        assert op(torch.ones(1)).item() == 13


lists = st.none() | st.lists(st.sampled_from((*PROVIDERS, "native")), min_size=1, max_size=4, unique=True)


@functools.cache
def merged_op():
    def native(x: torch.Tensor, weight: torch.Tensor | None = None, epsilon: float = 1e-6) -> torch.Tensor:
        return x * 2

    return with_providers(ir.register_op(name="test_merged_op")(native))


@hypothesis_settings(max_examples=100, deadline=None)
@given(context=lists, outer=lists, option=lists, config=lists, cli=lists, mode=st.sampled_from(["eager", "inductor"]))
def test_merged_list_is_the_layers_in_order_without_repeats_up_to_native(context, outer, option, config, cli, mode):
    op = merged_op()
    layers.config = None if config is None else ir.KernelConfig(ir_op_priority={op.name: config})
    layers.cli = None if cli is None else ir.KernelConfig(ir_op_priority={op.name: cli})
    registry.changed()
    try:
        with (
            option_scope(option and {op.name: option}),
            ir.priority({op.name: outer} if outer else {}),
            ir.priority({op.name: context} if context else {}),
        ):
            got = [entry.provider for entry in entries_for(op, "cpu", mode)]
            ran = op.dispatch(torch.ones(1)).provider
            value = op(torch.ones(1)).item()
            eager = [entry.provider for entry in entries_for(op, "cpu", "eager")]
    finally:
        layers.config = layers.cli = None
        registry.changed()
    named = [context, outer, option if mode == "inductor" else None, config, cli, PROVIDERS, ["native"]]
    expected = list(dict.fromkeys(p for layer in named for p in layer or ()))
    assert got == expected[: expected.index("native") + 1]
    assert ran == eager[0]
    assert VALUES[ran] == value


# --- for guards and cache keys ---------------------------------------------------------------------------------------


def test_snapshot_is_the_same_object_until_something_changes(op):
    before = snapshot("inductor")
    op(torch.ones(1))
    assert snapshot("inductor") is before
    op.register_impl("z")(lambda x, weight=None, epsilon=1e-6: x)
    assert snapshot("inductor") is not before


def test_snapshot_of_equal_choices_is_equal(op):
    before = dict(snapshot("inductor"))
    with ir.priority({op.name: "a"}):
        assert dict(snapshot("inductor")) == before
        assert fingerprint("inductor") == fingerprint("inductor")
    with ir.priority({op.name: "b"}):
        assert {name for name in before if snapshot("inductor")[name] != before[name]} == {op.name}


@pytest.mark.parametrize("change", ["priority", "config", "batch_invariant", "fusion", "register", "option"])
def test_fingerprint_changes_with_everything_that_decides(op, configured, change):
    before = fingerprint("inductor")
    if change == "priority":
        with ir.priority({op.name: "c"}):
            after = fingerprint("inductor")
    elif change == "option":
        with option_scope({op.name: "c"}):
            after = fingerprint("inductor")
    else:
        if change == "register":
            op.register_impl("z")(lambda x, weight=None, epsilon=1e-6: x)
        elif change == "config":
            configured(ir_op_priority={op.name: "c"})
        else:
            configured(**{change: change == "batch_invariant"})
        after = fingerprint("inductor")
    assert after != before


def test_eager_calls_do_not_change_the_fingerprint(op):
    before = fingerprint("inductor")
    for _ in range(3):
        op(torch.ones(1))
        op(torch.ones(1).double())
    assert fingerprint("inductor") == before


def test_state_can_be_restored_in_another_context(op):
    with ir.priority({op.name: "c"}), option_scope({op.name: "d"}):
        state = current_state()

    def elsewhere():
        with restored(state):
            return chosen(op), entries_for(op, "cpu", "inductor")[1].provider

    assert contextvars.Context().run(elsewhere) == ("c", "d")
    assert chosen(op) == "a"


def test_priority_object_can_be_pickled(op):
    context = pickle.loads(pickle.dumps(ir.priority({op.name: "c"})))
    with context:
        assert chosen(op) == "c"


@pytest.mark.parametrize("lists", [{1: "native"}, {"rms_norm": "?"}])
def test_names_that_are_none_are_refused(lists):
    with pytest.raises(errors.PrioritySyntaxError):
        ir.priority(lists)


def test_op_given_twice_to_one_block_is_refused():
    with pytest.raises(errors.PrioritySyntaxError, match="rms_norm is given twice"):
        ir.priority({"rms_norm": "native"}, rms_norm="native")
