"""Hypothesis strategies for programs. Each part is drawn alone, so a failing program shrinks to the steps it needs."""

from collections.abc import Sequence

from hypothesis import strategies as st
from programs import DTYPES, LAYOUTS, MODES, SHAPES, Input, Program, Step

_NUMBERS = st.integers(0, 59)


def programs(
    kinds: Sequence[str],
    *,
    modes: Sequence[str] = MODES,
    shapes: Sequence[str] = SHAPES,
    steps: int = 12,
    must: Sequence[str] = ("donate", "call"),
    dtypes: Sequence[str] = DTYPES,
) -> st.SearchStrategy[Program]:
    """Programs of up to `steps` statements of these kinds, and one of those that a program must have."""
    inputs = st.builds(Input, st.sampled_from(LAYOUTS), _NUMBERS, st.integers(0, 1))
    statements = st.builds(Step, st.sampled_from(kinds), _NUMBERS, _NUMBERS, _NUMBERS)
    call = st.builds(Step, st.sampled_from(must), _NUMBERS, _NUMBERS, _NUMBERS)
    return st.builds(
        Program,
        st.lists(inputs, min_size=1, max_size=3).map(tuple),
        st.builds(
            lambda some, call, others: (*some, call, *others),
            st.lists(statements, min_size=1, max_size=steps // 2),
            call,
            st.lists(statements, max_size=steps // 2),
        ),
        st.lists(_NUMBERS, min_size=1, max_size=4).map(tuple),
        st.lists(_NUMBERS, min_size=8, max_size=8).map(tuple),
        st.sampled_from(modes),
        st.sampled_from(shapes),
        st.sampled_from(dtypes),
    )
