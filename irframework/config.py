"""What a program configures: pydantic models, `ir.configure`, and command-line arguments.

Owns the shape of configurations and their validation. Does not merge them with the other layers: see `priority.py`
and `settings.py`.
"""

import argparse
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from irframework import fusion_state
from irframework.custom_op_rules import parse_rules, rules_in_force
from irframework.errors import ConfigError, IrError
from irframework.priority import check_named, env_priorities, parse_priorities, parse_providers
from irframework.registry import registry
from irframework.settings import layers


class _Model(BaseModel):
    """A pydantic model whose mistakes are `ConfigError`s that say what to do."""

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            lines = []
            for problem in error.errors():
                where = ".".join(str(part) for part in problem["loc"])
                lines.append(f"{where + ': ' if where else ''}{problem['msg'].removeprefix('Value error, ')}")
            raise ConfigError(f"{type(self).__name__}: " + "; ".join(lines)) from error


class IrOpPriorityConfig(_Model):
    """Priorities by op: `IrOpPriorityConfig(rms_norm=["a", "b"])`; lists or comma strings, any registered op.

    Raises:
        ConfigError: A list cannot be read or names a provider twice.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _read_lists(cls, values: Any) -> Any:
        return {op: list(parse_providers(providers, op)) for op, providers in dict(values).items()}

    def as_dict(self) -> dict[str, list[str]]:
        """Return the lists by op."""
        return dict(self.__pydantic_extra__ or {})


class KernelConfig(_Model):
    """Which kernels a program uses.

    Attributes:
        ir_op_priority: Providers to put in front, by op. A mapping, an `IrOpPriorityConfig`, or a string
            `rms_norm=a,b;silu_and_mul=c`.
        fusion: Whether compiled graphs may be rewritten to use fused ops.
        disable_fusions: Fused ops that no part of a graph is made, in a list or a comma string.
        sequence_parallel: From how many tokens on every process norms its part of the tokens only, behind sums over
            processes; 0: never. The same in all processes of a group.
        autotune: Whether providers may measure to choose between their kernels. No provider here does so yet.
        strict: Whether a plugin that fails raises instead of being quarantined.
        batch_invariant: Only implementations that are declared batch invariant may be chosen, or native.
        custom_ops: Which ops and layers use kernels at all: `all` or `none`, `+name`, `-name`, in a list or a comma
            string.

    Raises:
        ConfigError: A value cannot be read, an op or provider does not exist, or two values contradict each other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    ir_op_priority: dict[str, list[str]] = {}
    fusion: bool = True
    disable_fusions: list[str] = []
    sequence_parallel: int = Field(default=0, ge=0)
    autotune: bool = False
    strict: bool = False
    batch_invariant: bool = False
    custom_ops: list[str] = []
    _from_cli: bool = PrivateAttr(default=False)

    @field_validator("ir_op_priority", mode="before")
    @classmethod
    def _read_priorities(cls, value: Any) -> Any:
        if isinstance(value, IrOpPriorityConfig):
            value = value.as_dict()
        if not isinstance(value, (str, dict)):
            raise ConfigError(f"expected a mapping from op to providers, got {value!r}.")
        lists = parse_priorities(value, "ir_op_priority")
        check_named(lists, "config")
        return {op: list(providers) for op, providers in lists.items()}

    @field_validator("custom_ops", mode="before")
    @classmethod
    def _read_rules(cls, value: Any) -> Any:
        parse_rules(value)
        words = value.split(",") if isinstance(value, str) else value
        return [word.strip() for word in words if word.strip()]

    @field_validator("disable_fusions", mode="before")
    @classmethod
    def _read_fusions(cls, value: Any) -> Any:
        return fusion_state.read_names(value)

    @model_validator(mode="after")
    def _check_rules(self) -> "KernelConfig":
        for name in sorted(parse_rules(self.custom_ops).off):
            wanted = [provider for provider in self.ir_op_priority.get(name, ()) if provider != "native"]
            if wanted:
                raise ConfigError(
                    f"custom_ops switches {name!r} off ('-{name}'), and ir_op_priority asks for {wanted[0]!r} there. "
                    "Keep one of the two."
                )
        return self

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> "KernelConfig":
        """Read the arguments that `ir.add_cli_args` added.

        Raises:
            ConfigError: A value cannot be read, or an op or provider does not exist.
        """
        given = vars(namespace)
        lists: dict[str, Any] = dict(parse_priorities(given.get("ir_op_priority") or "", "--ir-op-priority"))
        for key, value in given.items():
            if key.startswith("ir_op_priority.") and value is not None:
                lists[key.partition(".")[2]] = value
        switches = {
            name: given[f"ir_{name}"]
            for name in ("fusion", "autotune", "strict", "batch_invariant", "sequence_parallel")
            if given.get(f"ir_{name}") is not None
        }
        values: dict[str, Any] = {"ir_op_priority": lists} if lists else {}
        if given.get("ir_custom_ops"):
            values["custom_ops"] = given["ir_custom_ops"]
        if given.get("ir_disable_fusions") is not None:
            values["disable_fusions"] = given["ir_disable_fusions"]
        config = cls(**values, **switches)
        config._from_cli = True
        return config


def add_cli_args(parser: argparse.ArgumentParser) -> None:
    """Add `--ir-op-priority.<op>=a,b` for every op, `--ir-op-priority`, and the switches to any program's parser."""
    from irframework.registry import all_ops

    group = parser.add_argument_group("irframework")
    group.add_argument(
        "--ir-op-priority",
        metavar="OP=PROVIDER,...;...",
        help="providers to put in front, for several ops",
    )
    for name in all_ops():
        group.add_argument(
            f"--ir-op-priority.{name}",
            dest=f"ir_op_priority.{name}",
            metavar="PROVIDER,...",
            help=argparse.SUPPRESS,
        )
    group.add_argument(
        "--ir-custom-ops",
        metavar="RULE,...",
        help="which ops and layers use kernels: all or none, +name, -name (write --ir-custom-ops=-name)",
    )
    group.add_argument(
        "--ir-disable-fusions", metavar="OP,...", help="fused ops that no part of a compiled graph is made"
    )
    group.add_argument(
        "--ir-sequence-parallel", metavar="TOKENS", help="from so many tokens on, processes divide norms; 0: never"
    )
    for name, what in (
        ("fusion", "rewrite compiled graphs to use fused ops"),
        ("batch_invariant", "use batch-invariant implementations only"),
        ("strict", "fail when a plugin fails"),
    ):
        flag = f"--ir-{name.replace('_', '-')}"
        group.add_argument(flag, dest=f"ir_{name}", action=argparse.BooleanOptionalAction, help=what)


def configure(config: KernelConfig) -> None:
    """Make a configuration current, for the whole process. `configure(KernelConfig())` takes the last one back.

    A configuration that was read from the command line takes the command line's place, below one made in code.

    Raises:
        ConfigError: `config` is not a `KernelConfig`.
    """
    from irframework.platform import current_platform

    if not isinstance(config, KernelConfig):
        raise ConfigError(f"ir.configure expects an ir.KernelConfig, got {type(config).__name__} ({config!r:.80}).")
    from_cli = config._from_cli
    try:
        config = current_platform().check_and_update_config(config)
    except IrError:
        raise
    except Exception as error:
        raise ConfigError(f"The platform {current_platform().name!r} refused the configuration: {error}") from error
    if not isinstance(config, KernelConfig):
        raise ConfigError(
            f"check_and_update_config of platform {current_platform().name!r} must return an ir.KernelConfig, it "
            f"returned {type(config).__name__}."
        )
    place = "cli" if from_cli else "config"
    with registry.lock:  # held while a plugin loads: what is recorded is that plugin's own
        earlier = getattr(layers, place)
        registry.record(lambda: setattr(layers, place, earlier))  # one that fails later leaves no configuration
        setattr(layers, place, config)
        registry.changed()


def current_config() -> KernelConfig:
    """Return the configuration in force: `configure` before the command line before the environment.

    Of the environment's priorities, those of ops that exist are shown.
    """
    from irframework.settings import effective

    state, known = fusion_state.current(), fusion_state.fused_ops()
    lists: dict[str, list[str]] = {}
    environment = {name: providers for name, providers in env_priorities().items() if name in registry.ops}
    for layer in (layers.config, layers.cli):
        for name, providers in layer.ir_op_priority.items() if layer is not None else ():
            lists[name] = list(dict.fromkeys((*lists.get(name, ()), *providers)))
    for name, more in environment.items():
        lists[name] = list(dict.fromkeys((*lists.get(name, ()), *more)))
    autotune = any(layer is not None and layer.autotune for layer in (layers.config, layers.cli))
    return KernelConfig(
        ir_op_priority=lists,
        fusion=state.on,
        disable_fusions=[name for name in state.without if name in known],
        sequence_parallel=effective("sequence_parallel"),
        autotune=autotune,
        strict=effective("strict"),
        batch_invariant=effective("batch_invariant"),
        custom_ops=rules_in_force().written(),
    )
