"""Greedy generation: a prompt at once, then token by token. Owns the loop."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tiny_decoder.model import Decoder
from tiny_decoder.sequences import Sequences


@torch.inference_mode()
def generate(
    model: Decoder, prompts: Sequence[Tensor], count: int, run: Callable[..., Any] | None = None
) -> list[Tensor]:
    """Continue several prompts of any lengths by the most likely tokens.

    Args:
        model: Makes the states.
        prompts: Ids, each `[length]`.
        count: How many tokens each is continued by.
        run: What is called, e.g. the compiled model; default: the model.

    Returns:
        The new tokens of each prompt, `[count]`.
    """
    run = model if run is None else run
    lengths = [len(prompt) for prompt in prompts]
    sequences = Sequences(len(prompts), max(lengths) + count, device=prompts[0].device)
    states, ids, new = model.new_states(sequences), torch.cat(list(prompts)), []
    for _ in range(count):
        step = sequences.take(lengths)
        logits, states = run(ids, step, states, (step.starts[1:] - 1).long())
        ids = logits.argmax(-1)
        new.append(ids)
        lengths = [1] * len(prompts)
    return list(torch.stack(new, 1))
