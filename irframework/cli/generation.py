"""Greedy generation in two measured parts: prefill and decode.

Owns the loop that feeds a model token by token, its key-value cache, and the clock around both parts. Eager models
get a growing cache, as `generate` gives them; compiled ones a static cache, so that decode is one graph for every
position. It does not print.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """What one run gave.

    Attributes:
        tokens: generated ids, in order; with forced tokens, those that the model would have chosen.
        logits: [tokens, vocabulary] in float32 on the CPU, or None when they were not kept.
        prefill_seconds: from the prompt's ids to the first token.
        decode_seconds: for the tokens after the first.
        prompt_tokens: length of the prompt.
    """

    tokens: tuple[int, ...]
    logits: Tensor | None
    prefill_seconds: float
    decode_seconds: float
    prompt_tokens: int

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second after the first; None when there was only one."""
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 else None


class Generator:
    """Feeds one model, eager or compiled, prompt by prompt.

    Args:
        model: the Hugging Face module (its configuration and parameters are read).
        call: what is called: the module itself or its compiled form.
        static_length: tokens that a static cache must hold, or None for a growing cache.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any], static_length: int | None = None) -> None:
        self._model: Any = model
        self._call = call
        self._static_length = static_length
        self._static_cache: Any = None
        parameters = inspect.signature(type(model).forward).parameters
        # transformers 5.24 renamed the argument and deprecated the old name.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        first = next(model.parameters())
        self._device, self._dtype = first.device, first.dtype

    def generate(
        self,
        prompt: Tensor,
        max_new_tokens: int,
        *,
        stop: Collection[int] = (),
        forced: Sequence[int] | None = None,
        keep_logits: bool = False,
        on_token: Callable[[int], None] | None = None,
    ) -> Generation:
        """Generates greedily.

        Args:
            prompt: ids [1, tokens].
            max_new_tokens: at most so many tokens.
            stop: ids after which generation ends (they are not in the result).
            forced: ids that are fed instead of the model's own choices, so that several models see the same tokens.
            keep_logits: keep every step's logits.
            on_token: called with each token as it comes.
        """
        kept: list[Tensor] = []
        chosen: list[int] = []
        with torch.inference_mode():
            cache = self._new_cache()
            self._wait()
            start = time.perf_counter()
            logits = self._step(prompt, 0, cache)
            token = int(logits.argmax())
            prefill_seconds = time.perf_counter() - start
            position = prompt.shape[1]
            start = time.perf_counter()
            while True:
                if keep_logits:
                    kept.append(logits.float().cpu())
                if forced is None and token in stop:
                    break
                chosen.append(token)
                if on_token is not None:
                    on_token(token)
                if len(chosen) == max_new_tokens:
                    break
                fed = token if forced is None else forced[len(chosen) - 1]
                logits = self._step(torch.tensor([[fed]], device=self._device), position, cache)
                token = int(logits.argmax())
                position += 1
            decode_seconds = time.perf_counter() - start
        stacked = torch.stack(kept[: len(chosen)]) if kept and chosen else None
        return Generation(tuple(chosen), stacked, prefill_seconds, decode_seconds, prompt.shape[1])

    def _step(self, ids: Tensor, position: int, cache: Any) -> Tensor:
        """Logits of the last token, [vocabulary]."""
        positions = torch.arange(position, position + ids.shape[1], device=self._device).unsqueeze(0)
        output = self._call(
            input_ids=ids,
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
        )
        logits: Tensor = output.logits[0, -1]
        return logits

    def _new_cache(self) -> Any:
        from transformers import DynamicCache, StaticCache

        config = self._model.config
        if self._static_length is None:
            return DynamicCache(config=config)
        if self._static_cache is None:
            cache: Any = StaticCache(config=config, max_cache_len=self._static_length)
            text = config.get_text_config(decoder=True)
            heads = text.num_attention_heads
            # Allocated before anything is traced: a cache allocated inside a graph is another graph.
            cache.early_initialization(
                1,
                getattr(text, "num_key_value_heads", None) or heads,
                getattr(text, "head_dim", None) or text.hidden_size // heads,
                self._dtype,
                self._device,
            )
            self._static_cache = cache
        self._static_cache.reset()
        return self._static_cache

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
