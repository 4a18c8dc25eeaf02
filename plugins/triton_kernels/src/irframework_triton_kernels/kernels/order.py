# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""How a kernel starts before the one in front of it on its stream has ended (programmatic dependent launch).

Hopper and later devices load a kernel that is launched so while its predecessor still runs. Each of its programs must
wait before it reads or writes anything. Owns that wait; which launches ask for it is in `launch`.
"""

import triton

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a Triton that was built without its part for NVIDIA
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def after_predecessor():
    """Waits until all that came before is done and can be seen; lets the next kernel be loaded meanwhile."""
    gdc_wait()
    gdc_launch_dependents()
