"""The arguments of a decoder's forward call, whatever their order and the transformers version."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from replayssm.checks import fail

CACHE_NAMES = ("cache", "past_key_values", "cache_params")  # by version and model
# Arguments that have one entry a token, and in which dimension.
_TOKEN_DIMS = {"input_ids": 1, "inputs_embeds": 1, "token_type_ids": 1, "position_ids": -1, "cache_position": 0}


class CallSignature:
    """Finds and changes arguments of `decoder.forward`."""

    def __init__(self, decoder: nn.Module) -> None:
        self._order = list(inspect.signature(decoder.forward).parameters)
        self.cache_name = next(name for name in CACHE_NAMES if name in self._order)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the arguments."""
        return tuple(self._order)

    def get(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The argument `name`, None if it was not given."""
        position = self._order.index(name) if name in self._order else len(args)
        return kwargs[name] if name in kwargs else args[position] if position < len(args) else None

    def cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The cache, by whatever name it was given."""
        found = (self.get(name, args, kwargs) for name in CACHE_NAMES)
        return next((cache for cache in found if cache is not None), None)

    def tokens(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Token ids or embeddings [batch, seq_len, ...]."""
        ids = self.get("input_ids", args, kwargs)
        return self.get("inputs_embeds", args, kwargs) if ids is None else ids

    def with_cache(self, cache: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """The same call with this cache."""
        position = self._order.index(self.cache_name)
        if position < len(args):
            return (*args[:position], cache, *args[position + 1 :]), kwargs
        others = {name: value for name, value in kwargs.items() if name not in CACHE_NAMES}
        return args, {**others, self.cache_name: cache}

    def split(
        self, head_len: int, args: tuple[Any, ...], kwargs: dict[str, Any], *, starts: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Keyword arguments of two calls: for the first `head_len` tokens, and for the others.

        starts: the first token is the first of all.
        """
        named = dict(zip(self._order, args, strict=False)) | kwargs
        tokens = self.tokens(args, kwargs)
        assert tokens is not None
        tail = tokens.shape[1] - head_len
        if starts and "position_ids" in self._order and named.get("position_ids") is None:
            # Some models count positions from the start of a call.
            named["position_ids"] = torch.arange(tokens.shape[1], device=tokens.device)[None]
        head, rest = dict(named), dict(named)
        for name, dim in _TOKEN_DIMS.items():
            if (value := named.get(name)) is not None:
                head[name], rest[name] = value.narrow(dim, 0, head_len), value.narrow(dim, head_len, tail)
        if (mask := named.get("attention_mask")) is not None:
            if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
                raise fail("attention_mask", type(mask).__name__, "a [batch, tokens] tensor while drafts are verified")
            head["attention_mask"] = mask[:, :-tail]
        if named.get("output_attentions"):
            raise fail("output_attentions", True, "False while drafts are verified")
        return head, rest


@dataclass
class Split:
    """A forward call that runs in two parts; `output` is that of the first once it has run."""

    output: Any = None

    def join(self, rest: Any) -> Any:
        """The output of the whole call: hidden states of both parts, anything else of the second."""
        head = self.output
        if isinstance(rest, tuple):
            return (torch.cat([head[0], rest[0]], 1), *rest[1:])
        rest["last_hidden_state"] = torch.cat([head["last_hidden_state"], rest["last_hidden_state"]], 1)
        if rest.get("hidden_states") is not None:
            pairs = zip(head["hidden_states"], rest["hidden_states"], strict=True)
            rest["hidden_states"] = tuple(torch.cat(pair, 1) for pair in pairs)
        return rest
