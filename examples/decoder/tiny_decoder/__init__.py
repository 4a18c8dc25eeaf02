"""A small language model over ops and layers: dense, with a mixture of experts, or with Mamba's mixers."""

from tiny_decoder.generation import generate
from tiny_decoder.model import Decoder
from tiny_decoder.sequences import Sequences, Step

__all__ = ["Decoder", "Sequences", "Step", "generate"]
