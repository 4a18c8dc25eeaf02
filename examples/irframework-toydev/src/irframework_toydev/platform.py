"""The platform: which devices it stands for, and what it prefers."""

import logging
from collections.abc import Mapping

import torch

import irframework as ir
from irframework_toydev.device import NAME

logger = logging.getLogger(__name__)


class ToyPlatform(ir.Platform):
    name = NAME
    device_types = (NAME,)

    def is_available(self) -> bool:
        """Asked in every process, and before forks. This device is there as soon as torch knows its name."""
        return torch._C._get_privateuse1_backend_name() == NAME

    def get_default_ir_op_priority(self, mode: str = "eager") -> Mapping[str, list[str]]:
        """Kernels first when eager; compiled, native where the compiler does better with torch's own ops."""
        if mode == "eager":
            return {"*": ["toy_kernels"]}
        return {"*": ["toy_kernels"], "silu_and_mul": ["native"]}

    def check_and_update_config(self, config: ir.KernelConfig) -> ir.KernelConfig:
        """The device has no clock to measure with."""
        if config.autotune:
            logger.warning("autotune is off: platform %s cannot measure kernels", self.name)
            return config.model_copy(update={"autotune": False})
        return config
