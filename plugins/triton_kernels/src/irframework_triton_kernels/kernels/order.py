# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""How a kernel starts before the one in front of it on its stream has ended (programmatic dependent launch).

Hopper and later devices load a kernel that is launched so while its predecessor still runs. Owns the wait that this
asks for. Which launches are such ones, says `Tile.early`: none by itself. Every program of theirs begins with it:

* It waits before it reads, for its predecessor may still write that, and before it writes, for its predecessor may
  still read that: memory that torch has given out again, or activations that are overwritten.
* It lets the next kernel be loaded only behind the wait. So a kernel that is loaded finds all but its predecessor
  ended, as it would without, and no more than two kernels overlap.
"""

import triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton that was built without its part for NVIDIA
    gdc_launch_dependents = gdc_wait = None

CAN_WAIT = gdc_wait is not None


@triton.jit
def after_predecessor():
    """Waits until all that came before is done and can be seen; lets the next kernel be loaded meanwhile."""
    gdc_wait()
    gdc_launch_dependents()
