import json
import struct
from pathlib import Path

import pytest
import torch

from irframework.errors import (
    DeviceUnavailableError,
    IrError,
    ModelFileError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from irframework.integrations.model_files import check_gguf, check_safetensors
from irframework.integrations.model_source import load_model
from irframework.integrations.random_models import RANDOM_MODELS


def load(name: object) -> object:
    return load_model(str(name), dtype=torch.float32)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    model = load_model("random:llama-tiny", dtype=torch.float32).model
    model.save_pretrained(tmp_path)
    tokenizer = Tokenizer(WordLevel({"<unk>": 0, "what": 5, "is": 6}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(tmp_path)
    return tmp_path


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path: Path, architecture: str = "llama", size: int = 64) -> Path:
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, 1)
    header += text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    header += text("weight") + struct.pack("<IQIQ", 1, 16, 0, 0)
    padding = -len(header) % 32
    path.write_bytes(header + b"\0" * (padding + size))
    return path


def test_a_whole_gguf_passes(tmp_path: Path) -> None:
    check_gguf(gguf(tmp_path / "a.gguf"))


def test_a_truncated_gguf_names_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"truncated: its header promises \d+ bytes, it has \d+"):
        check_gguf(gguf(tmp_path / "a.gguf", size=60))


@pytest.mark.parametrize("length", [5, 12, 30, 50, 70])
def test_a_gguf_cut_inside_its_header(tmp_path: Path, length: int) -> None:
    path = gguf(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(ModelFileError, match="truncated or damaged"):
        check_gguf(path)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\3\4 a zip")
    with pytest.raises(ModelFileError, match="letters GGUF"):
        check_gguf(tmp_path / "a.gguf")


def test_an_unsupported_gguf_architecture_lists_what_is(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'my_arch'.*llama"):
        check_gguf(gguf(tmp_path / "a.gguf", "my_arch"))


def test_a_missing_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        load(tmp_path / "none.gguf")


def test_a_misspelt_name_is_suggested() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean smollm2"):
        load("smolm2")


def test_a_misspelt_random_name_is_suggested() -> None:
    with pytest.raises(ModelNotFoundError, match="did you mean llama-tiny"):
        load("random:lama-tiny")


def test_an_empty_directory(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        load(tmp_path)


def test_a_saved_directory_loads(directory: Path) -> None:
    loaded = load_model(str(directory), dtype=torch.float32)
    assert loaded.encode("what is").tolist() == [[5, 6]]
    assert loaded.decode([5, 6]) == "what is"


def test_a_directory_of_an_unknown_architecture(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": "my_arch"}))
    with pytest.raises(UnsupportedModelError, match="'my_arch'"):
        load(directory)


def test_a_directory_with_a_broken_configuration(directory: Path) -> None:
    (directory / "config.json").write_text("{")
    with pytest.raises(ModelFileError, match="JSON"):
        load(directory)


def test_a_directory_without_weights(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="no weights"):
        load(directory)


@pytest.mark.parametrize("keep", [4, 100, -10])
def test_a_directory_with_truncated_weights(directory: Path, keep: int) -> None:
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:keep])
    with pytest.raises(ModelFileError, match="truncated"):
        load(directory)


def test_weights_that_are_no_safetensors(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 4) + b"nope" + b"\0" * 8)
    with pytest.raises(ModelFileError, match="header cannot be read"):
        check_safetensors(path)


def test_a_directory_that_lacks_a_shard(directory: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelNotFoundError, match="lacks model-00001"):
        load(directory)


def test_a_directory_that_lacks_a_weight(directory: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelFileError, match=r"lacks 1 of the model's weights \(model.layers.0.mlp.up_proj.weight"):
        load(directory)


def test_a_device_that_is_not_here() -> None:
    with pytest.raises(DeviceUnavailableError, match="'nowhere'"):
        load_model("random:llama-tiny", dtype=torch.float32, device="nowhere")


def test_every_mistake_is_an_ir_error() -> None:
    for error in (DeviceUnavailableError, ModelFileError, ModelNotFoundError, UnsupportedModelError):
        assert issubclass(error, IrError)


def test_random_weights_follow_the_seed() -> None:
    first, second, other = (
        load_model("random:llama-tiny", dtype=torch.float32, seed=seed).model.lm_head.weight for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_the_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    load("random:llama-tiny")
    assert torch.equal(torch.get_rng_state(), state)


def test_every_family_has_a_tiny_model() -> None:
    families = {name.removesuffix("-tiny") for name in RANDOM_MODELS if name.endswith("-tiny")}
    assert families == {"llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "olmo2"}


@pytest.mark.parametrize(
    "body",
    [
        struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 3000,
        struct.pack("<IQQ", 3, 0, 1) + text("general.alignment") + struct.pack("<II", 4, 0),
    ],
    ids=["endless nesting", "alignment 0"],
)
def test_gguf_header_without_sense_is_a_damaged_file(tmp_path: Path, body: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + body)
    with pytest.raises(ModelFileError, match="no GGUF file"):
        check_gguf(tmp_path / "model.gguf")


def test_model_type_that_is_no_name_is_unsupported(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": ["llama"]}')
    with pytest.raises(UnsupportedModelError):
        load(tmp_path)


def test_index_that_maps_weights_to_no_file_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 5}}')
    with pytest.raises(ModelFileError, match="weight_map"):
        load(tmp_path)
