"""What plain transformers' models become, family by family: the one table of it, which docs/fusion.md is compared with.

Does not run them: `test_raised_models.py` does.
"""

LLAMA = {"rms_norm": 1, "fused_add_rms_norm": 4, "silu_mul": 2, "apply_rotary_pos_emb": 4}
GEMMA = {"gemma_rms_norm": 5, "fused_add_gemma_rms_norm": 4, "gelu_mul": 2, "apply_rotary_pos_emb": 4}
OLMO = {"rms_norm": 8, "fused_add_rms_norm": 1, "silu_mul": 2, "apply_rotary_pos_emb": 4}

# How often each op is raised in a model of two layers, for all tokens of a prompt.
RAISED: dict[str, dict[str, int]] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"rms_norm": 5},  # norms of queries and keys
    "gemma2": GEMMA,
    "gemma3": GEMMA | {"gemma_rms_norm": 9},
    "phi3": {"rms_norm": 1, "fused_add_rms_norm": 4, "silu_and_mul": 2, "apply_rotary_pos_emb": 4},
    "smollm3": LLAMA,
    "olmo2": OLMO,
}

# In bfloat16 and float16, where that is something else.
RAISED_IN_HALF_PRECISION: dict[str, dict[str, int]] = {
    # Its norm multiplies by the weight in float32, which no op does; for `rms_norm` without one, x would be widened.
    "olmo2": {name: count for name, count in OLMO.items() if "norm" not in name},
}


def raised(family: str, half_precision: bool) -> dict[str, int]:
    """What is raised in a family's model of two layers."""
    return (RAISED_IN_HALF_PRECISION if half_precision else {}).get(family, RAISED[family])
