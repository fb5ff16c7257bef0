"""Log-probabilities of chosen tokens and of the most likely ones, from raw logits.

Maths:
    logprob(v) = z(v) - log(sum over u < public_vocab of exp(z(u)))
    top: the `top` largest, best first, ties to the lower id

Shapes:
    logits [M, V]; tokens [M] int64
    Returns logprob [M] FP32, top_ids [M, top] int64, top_logprobs [M, top] FP32.

Domain:
    Tokens are below public_vocab; 0 <= top <= public_vocab.

Numerics:
    FP32.

Effects:
    None.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.checks import require, require_that
from kernels.dispatch import select


def token_logprobs(
    logits: Tensor, tokens: Tensor, top: int, *, public_vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-probabilities over the public vocabulary; see the module's contract.

    Args:
        logits: [M, V] raw logits.
        tokens: [M] int64 chosen ids.
        top: how many alternatives.
        public_vocab: ids from here on do not count.

    Returns:
        logprob [M] FP32, top_ids [M, top] int64, top_logprobs [M, top] FP32.

    Raises:
        ValueError: an argument of another shape or dtype, or more alternatives than ids.
    """
    require("logits", logits, (None, None))
    require("tokens", tokens, (logits.shape[0],), torch.int64)
    vocab = logits.shape[1]
    require_that(1 <= public_vocab <= vocab, "public_vocab", f"1..{vocab}", public_vocab)
    require_that(0 <= top <= public_vocab, "top", f"0..{public_vocab}", top)
    result: tuple[Tensor, Tensor, Tensor] = select("token_logprobs", logits).token_logprobs(
        logits, tokens, top, public_vocab=public_vocab
    )
    return result
