"""The whole model, and its weights from transformers.

Owns which layers a config asks for, and the names of weights. Does not own what layers do (`blocks.py`), nor which
tokens a call gets (`sequences.py`).
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from irframework.layers import Group, ParallelLMHead, RMSNorm, RotaryEmbedding, VocabParallelEmbedding, load_full
from tiny_decoder.blocks import AttentionLayer, DenseMLP, Experts, MambaLayer, State, mamba, mamba2, normed
from tiny_decoder.sequences import Sequences, Step

_DENSE_OR_EXPERTS = {"llama": DenseMLP, "mistral": DenseMLP, "mixtral": Experts}
_MIXERS = {"mamba": mamba, "mamba2": mamba2}
_RENAMED = {"backbone.embeddings.": "embed_tokens.", "backbone.norm_f.": "norm."}  # Mamba's words for Llama's
_PREFIXES = ("model.", "backbone.")


class Decoder(nn.Module):
    """A language model: Llama or Mistral, Mixtral, Mamba or Mamba-2, in small.

    Args:
        config: Of transformers, or any object with its attributes. `model_type` says which model it is.
        group: A process group that the model is divided over; None: this process has all of it.

    Raises:
        ValueError: Another `model_type`.
    """

    def __init__(self, config: Any, group: Any = None) -> None:
        super().__init__()
        self.group = Group.of(group)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, group=self.group)
        layers: list[nn.Module]
        if config.model_type in _DENSE_OR_EXPERTS:
            mlp, rotary = _DENSE_OR_EXPERTS[config.model_type], RotaryEmbedding.from_config(config)
            layers = [AttentionLayer(config, rotary, mlp, self.group) for _ in range(config.num_hidden_layers)]
            epsilon = config.rms_norm_eps
        elif config.model_type in _MIXERS:
            mixer, epsilon = _MIXERS[config.model_type], config.layer_norm_epsilon
            layers = [MambaLayer(config, mixer, self.group) for _ in range(config.num_hidden_layers)]
        else:
            known = ", ".join([*_DENSE_OR_EXPERTS, *_MIXERS])
            raise ValueError(f"model_type {config.model_type!r} is none of {known}.")
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, epsilon, donate=True)
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, group=self.group)
        if config.tie_word_embeddings:
            self.lm_head.tie_to(self.embed_tokens)

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load the state dict of the transformers model of the same config; each process takes its part.

        Raises:
            WeightError: Weights are missing or left over, or have other shapes.
        """
        named = {_own_name(name): weight for name, weight in weights.items()}
        if self.lm_head.weight is self.embed_tokens.weight:
            named.setdefault("lm_head.weight", named["embed_tokens.weight"])  # files keep it once
        load_full(self, named)

    def new_states(self, sequences: Sequences) -> list[State]:
        """Return the empty caches and states of all layers."""
        return [layer.new_state(sequences, self.lm_head.weight) for layer in self.layers]

    def forward(
        self, ids: Tensor, step: Step, states: list[State], rows: Tensor | None = None
    ) -> tuple[Tensor, list[State]]:
        """Return the logits of tokens, and the states behind them.

        Args:
            ids: `[tokens]`.
            step: What there is to know about these tokens.
            states: Of each layer. They are given away: use those that come back.
            rows: Numbers of the tokens whose logits are wanted; None: all.

        Returns:
            `(logits, states)`: logits are `[tokens or rows, vocab_size]`.
        """
        x, residual = self.embed_tokens(ids), None
        after = []
        for layer, state in zip(self.layers, states, strict=True):
            x, residual, state = layer(x, residual, step, state)
            after.append(state)
        if rows is not None:
            x, residual = x[rows], residual[rows]
        x, _ = normed(self.norm, x, residual)
        return self.lm_head(x), after


def _own_name(name: str) -> str:
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name
