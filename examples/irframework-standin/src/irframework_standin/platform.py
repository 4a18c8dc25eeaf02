"""The device family: when it is there, and what it prefers."""

import logging
import os
from collections.abc import Mapping

import irframework as ir

logger = logging.getLogger(__name__)


class StandinPlatform(ir.Platform):
    name = "standin"
    device_types = ("cpu",)  # of a real device: the name that `tensor.device.type` gives

    def is_available(self) -> bool:
        """Asked in every process, and before forks: look at the driver's files, never open the device."""
        return os.environ.get("STANDIN_DEVICES", "0") != "0"

    def get_default_ir_op_priority(self, mode: str = "eager") -> Mapping[str, list[str]]:
        """Kernels when eager; in compiled code native, which the compiler fuses, except where a kernel wins."""
        if mode == "eager":
            return {"*": ["standin", "vllm_c"]}
        return {"*": ["native"], "rms_norm": ["standin", "native"]}

    def check_and_update_config(self, config: ir.KernelConfig) -> ir.KernelConfig:
        """The device has no clock to measure with."""
        if config.autotune:
            logger.warning("autotune is off: platform %s cannot measure kernels", self.name)
            return config.model_copy(update={"autotune": False})
        return config
