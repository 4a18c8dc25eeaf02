"""Tables of layers that a test leaves as it found them, and a platform for one test."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from irframework import platform
from irframework.layers import custom_op
from irframework.notices import _said
from irframework.registry import registry


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Layers, replacements, counters and notices of one test; the deprecation was said before."""
    monkeypatch.setattr(custom_op, "_warned", True)
    earlier = dict(registry.layers), dict(registry.replacements), set(_said)
    custom_op.enabled_custom_ops.clear()
    custom_op.disabled_custom_ops.clear()
    yield
    for table, kept in zip((registry.layers, registry.replacements), earlier[:2], strict=True):
        table.clear()
        table.update(kept)
    _said.clear()
    _said.update(earlier[2])
    registry.changed()


@pytest.fixture
def on_platform(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let the current platform be one of a name."""

    def be(name: str) -> None:
        one = platform.Platform()
        one.name, one.device_types = name, ("cpu",)
        monkeypatch.setattr(platform, "_choose", lambda: one)
        registry.changed()

    return be


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Set variables of the framework for one test."""
    from irframework.settings import settings

    def put(**values: str) -> None:
        for name, value in values.items():
            monkeypatch.setenv(f"IRFRAMEWORK_{name}", value)
        settings.cache_clear()
        registry.changed()

    yield put
    monkeypatch.undo()
    settings.cache_clear()
    registry.changed()
