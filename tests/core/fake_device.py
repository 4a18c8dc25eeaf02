"""A program's first lines that add a device which torch does not know by name: that of `examples/irframework-toydev`.

Only its module for the device is used, not the plugin. Run in a process of its own: a device is added once per process.
"""

from pathlib import Path

SOURCE = Path(__file__).parents[2] / "examples/irframework-toydev/src/irframework_toydev/device.py"
SETUP = f"""
import importlib.util, json, torch
spec = importlib.util.spec_from_file_location("toy_device", {str(SOURCE)!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module.add_device()
"""
