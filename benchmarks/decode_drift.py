"""The drift of decoding itself: a model fed a text token by token through `enable`, against the plain cache.

python benchmarks/decode_drift.py gdn --tokens 2048 --dtype bf16 --read none int8

`replayssm drift` runs a layer over the whole text at once; this runs the library as users do, which is slow, and shows
that the two agree.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from transformers import DynamicCache

from replayssm.drift.models import load, text_tokens
from replayssm.integrations.hf_call import CACHE_NAMES
from replayssm.integrations.transformers import enable


@torch.no_grad()
def log_probs(model: Any, tokens: list[int], cache: Any) -> torch.Tensor:
    """log p [T, vocabulary] in float64, from logits in fp32, one call a token."""
    head, decoder = model.get_output_embeddings().weight.float(), model.get_decoder()
    parameters = inspect.signature(decoder.forward).parameters
    name = next(name for name in CACHE_NAMES if name in parameters)
    rows = []
    for token in tokens:
        hidden = decoder(torch.tensor([[token]]), **{name: cache}, use_cache=True)[0][0]
        rows.append((hidden.float() @ head.T).double().log_softmax(-1))
    return torch.cat(rows)


def main() -> None:
    """Print one line a read format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--checkpoint", default="fp32")
    parser.add_argument("--read", nargs="+", default=["none", "int8", "fp8", "nvfp4"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load(arguments.model, dtype=torch.bfloat16 if arguments.dtype == "bf16" else torch.float32)
    tokens = text_tokens(arguments.model, arguments.tokens).tolist()
    expected = log_probs(model, tokens, DynamicCache(config=model.config))
    half = arguments.tokens // 2
    for read in arguments.read:
        with enable(model, read=read, checkpoint=arguments.checkpoint) as handle:
            found = log_probs(model, tokens, handle.new_cache())
        kl = (expected.exp() * (expected - found)).sum(-1)[half:]
        print(
            f"{arguments.model} {arguments.dtype} {read}/{arguments.checkpoint}: KL {float(kl.mean()):.2e}", flush=True
        )


if __name__ == "__main__":
    main()
