"""Are a model's files whole, and of a kind that can be loaded? Checked from headers before anything is loaded.

A loader that meets half a file fails far from the cause, or not at all. Owns the header checks of GGUF and
safetensors files and of model directories; loading is `model_source`.

GGUF layout: the specification of ggml-org/ggml, docs/gguf.md, versions 2 and 3. Safetensors: an 8-byte little-endian
length, a JSON header of that length whose `data_offsets` are relative to its end, then the data.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

from irframework.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_LONGEST = 1 << 31


def check_gguf(path: Path) -> None:
    """Raises unless `path` is a whole GGUF file of an architecture that transformers can load.

    Raises:
        ModelNotFoundError: there is no such file.
        ModelFileError: it is no GGUF file, or it ends too early.
        UnsupportedModelError: transformers cannot load its architecture.
    """
    if not path.is_file():
        raise ModelNotFoundError(f"there is no GGUF file {path}")
    size = path.stat().st_size
    with path.open("rb") as file:
        try:
            architecture, needed = _read_gguf(file)
        except (struct.error, EOFError, UnicodeDecodeError) as error:
            raise ModelFileError(
                f"{path} is truncated or damaged: its {size} bytes end inside the header ({error}); copy it again"
            ) from error
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise ModelFileError(f"{path} is no GGUF file that can be read: {error}") from error
    if needed > size:
        raise ModelFileError(
            f"{path} is truncated: its header promises {needed} bytes, it has {size}; copy or download it again"
        )
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    if architecture not in GGUF_SUPPORTED_ARCHITECTURES:
        raise UnsupportedModelError(
            f"{path} holds a model of architecture {architecture!r}, which transformers cannot load from GGUF; "
            f"it can load {', '.join(sorted(GGUF_SUPPORTED_ARCHITECTURES))}"
        )


def _read_gguf(file: BinaryIO) -> tuple[str, int]:
    """(architecture, smallest size that the file must have)."""
    if file.read(4) != b"GGUF":
        raise ValueError("it does not begin with the letters GGUF")
    version = _scalar(file, "I")
    if version not in (2, 3):
        raise ValueError(f"GGUF version {version}, known are 2 and 3")
    tensors, entries = _scalar(file, "Q"), _scalar(file, "Q")
    architecture, alignment = "", 32
    for _ in range(entries):
        key = _text(file)
        value = _value(file, _scalar(file, "I"))
        if key == "general.architecture":
            architecture = str(value)
        elif key == "general.alignment":
            alignment = int(value)
    end = 0
    for _ in range(tensors):
        _text(file)
        count = 1
        for _ in range(_scalar(file, "I")):
            count *= _scalar(file, "Q")
        kind, offset = _scalar(file, "I"), _scalar(file, "Q")
        end = max(end, offset + _tensor_bytes(kind, count))
    if alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    data = -(-file.tell() // alignment) * alignment
    return architecture, data + end


def _tensor_bytes(kind: int, count: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        return 0  # a type newer than the reader: its own loader will speak
    return int(count // block * size)


def _scalar(file: BinaryIO, code: str) -> Any:
    return struct.unpack("<" + code, file.read(struct.calcsize("<" + code)))[0]


def _text(file: BinaryIO) -> str:
    length = _scalar(file, "Q")
    raw = file.read(length) if length < _LONGEST else b""
    if len(raw) != length:
        raise EOFError("a string goes beyond the end")
    return raw.decode("utf-8", "replace")


def _value(file: BinaryIO, kind: int) -> Any:
    if kind == _STRING:
        return _text(file)
    if kind == _ARRAY:
        element, length = _scalar(file, "I"), _scalar(file, "Q")
        if element in _SCALARS:
            size = length * struct.calcsize("<" + _SCALARS[element])
            if size >= _LONGEST or len(file.read(size)) != size:
                raise EOFError("an array goes beyond the end")
            return None
        for _ in range(length):
            _value(file, element)
        return None
    if kind not in _SCALARS:
        raise ValueError(f"value type {kind} is unknown")
    return _scalar(file, _SCALARS[kind])


def check_directory(path: Path) -> None:
    """Raises unless `path` holds a configuration of a known model type and whole weights.

    Raises:
        ModelNotFoundError: no such directory, or no configuration or weights in it.
        ModelFileError: the configuration is no JSON object, or a weight file ends too early.
        UnsupportedModelError: transformers knows no causal language model of that type.
    """
    if not path.is_dir():
        raise ModelNotFoundError(f"there is no model directory {path}")
    config = path / "config.json"
    if not config.is_file():
        raise ModelNotFoundError(f"{path} holds no config.json; give a directory that `save_pretrained` wrote")
    model_type = _json_object(config).get("model_type")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if not isinstance(model_type, str) or model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise UnsupportedModelError(
            f"{config} says model_type {model_type!r}; the installed transformers knows no causal language model of "
            "that type (a newer transformers may)"
        )
    weights = _weight_files(path)
    if not weights:
        raise ModelNotFoundError(f"{path} holds no weights (*.safetensors or pytorch_model*.bin)")
    for file in weights:
        if not file.is_file():
            raise ModelNotFoundError(f"{path} lacks {file.name}, which its index names; copy the whole directory")
        if file.suffix == ".safetensors":
            check_safetensors(file)


def check_safetensors(path: Path) -> None:
    """Raises `ModelFileError` unless the file is as long as its header says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        raw = file.read(length) if 8 + length <= size else b""
    if len(start) != 8 or 8 + length > size:
        raise ModelFileError(f"{path} is truncated: its {size} bytes end inside the header; copy it again")
    try:
        header = json.loads(raw)
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFileError(f"{path} is no safetensors file: its header cannot be read ({error})") from error
    if 8 + length + end > size:
        raise ModelFileError(
            f"{path} is truncated: its header promises {8 + length + end} bytes, it has {size}; copy it again"
        )


def _weight_files(path: Path) -> list[Path]:
    for index in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / index).is_file():
            listed = _json_object(path / index).get("weight_map")
            if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
                raise ModelFileError(f"{path / index} has no weight_map from weights to file names")
            return [path / name for name in sorted(set(listed.values()))]
    return sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ModelFileError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise ModelFileError(f"{path} holds no JSON object")
    return found
