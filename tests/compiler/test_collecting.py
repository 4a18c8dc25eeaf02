"""Python does not look for cycles of garbage while a graph is searched, and does so again behind it."""

import gc

import pytest
from fusion_support import W, X, body_of, fused_in, searched, traced
from torch import tanh

from irframework.compiler import fusion
from irframework.compiler.collecting import uncollected


@pytest.fixture(autouse=True)
def as_before():
    enabled = gc.isenabled()
    gc.enable()
    yield
    (gc.enable if enabled else gc.disable)()


def test_it_is_off_meanwhile_and_on_again():
    with uncollected():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_behind_an_exception():
    with pytest.raises(ZeroDivisionError), uncollected():
        raise ZeroDivisionError
    assert gc.isenabled()


def test_where_it_was_off_it_stays_off():
    gc.disable()
    with uncollected():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_one_inside_another_leaves_it_to_the_outer_one():
    with uncollected():
        with uncollected():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_search_runs_without_it(fused, monkeypatch):
    op = fused(body_of(lambda x, w: tanh(x) * w))
    seen = []
    look = fusion._Fusion.run
    monkeypatch.setattr(fusion._Fusion, "run", lambda search: seen.append(gc.isenabled()) or look(search))
    assert searched(lambda x, w: tanh(x) * w, X, W).fusions == {op.name: 1}
    assert seen
    assert not any(seen)
    assert gc.isenabled()


def test_a_search_that_fails_leaves_it_on(monkeypatch):
    def fail(search):
        raise ZeroDivisionError

    module = traced(lambda x, w: tanh(x) * w, X, W)
    monkeypatch.setattr(fusion._Fusion, "run", fail)
    with pytest.raises(ZeroDivisionError):
        fused_in(module)
    assert gc.isenabled()
