"""Known model families and sizes for `random:NAME`: configurations only, weights are random.

Sizes with a number follow the published configuration of that model; `tiny` ones exist for tests. The names of the
configuration's fields are those of transformers.
"""

from __future__ import annotations

from typing import Any


def _sizes(
    hidden: int, intermediate: int, layers: int, heads: int, key_value_heads: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocabulary,
        # Token ids of the published vocabularies lie outside the tiny ones.
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        **more,
    }


def _tiny(**more: Any) -> dict[str, Any]:
    return _sizes(64, 160, 2, 4, 2, 512, max_position_embeddings=1024, **more)


RANDOM_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-tiny": ("llama", _tiny()),
    "mistral-tiny": ("mistral", _tiny()),
    "qwen2-tiny": ("qwen2", _tiny()),
    "qwen3-tiny": ("qwen3", _tiny(head_dim=32)),
    "gemma2-tiny": ("gemma2", _tiny(head_dim=32)),
    "gemma3-tiny": ("gemma3_text", _tiny(head_dim=32)),
    "phi3-tiny": ("phi3", _tiny()),
    "smollm3-tiny": ("smollm3", _tiny()),
    "olmo2-tiny": ("olmo2", _tiny()),
    "smollm2-135m": ("llama", _sizes(576, 1536, 30, 9, 3, 49152, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "llama-1b": ("llama", _sizes(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True, rms_norm_eps=1e-5)),
    "llama-8b": ("llama", _sizes(4096, 14336, 32, 32, 8, 128256, rms_norm_eps=1e-5)),
    "mistral-7b": ("mistral", _sizes(4096, 14336, 32, 32, 8, 32768)),
    "qwen2-0.5b": ("qwen2", _sizes(896, 4864, 24, 14, 2, 151936, tie_word_embeddings=True)),
    "qwen3-0.6b": ("qwen3", _sizes(1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True)),
    "gemma2-2b": ("gemma2", _sizes(2304, 9216, 26, 8, 4, 256000, head_dim=256)),
    "gemma3-1b": ("gemma3_text", _sizes(1152, 6912, 26, 4, 1, 262144, head_dim=256)),
    "phi3-mini": ("phi3", _sizes(3072, 8192, 32, 32, 32, 32064)),
    "smollm3-3b": ("smollm3", _sizes(2048, 11008, 36, 16, 4, 128256, tie_word_embeddings=True)),
    "olmo2-1b": ("olmo2", _sizes(2048, 8192, 16, 16, 16, 100352)),
}
"""Name after `random:` -> (transformers' model type, the configuration's fields that differ from its defaults)."""
