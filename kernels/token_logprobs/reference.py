"""Plain torch form."""

from __future__ import annotations

from torch import Tensor

from kernels.ordering import top_ranks


def token_logprobs(
    logits: Tensor, tokens: Tensor, top: int, *, public_vocab: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See the contract."""
    z = logits[:, :public_vocab].float()
    mass = z.logsumexp(dim=1, keepdim=True)
    chosen = (z.gather(1, tokens[:, None]) - mass).squeeze(1)
    best, ids = top_ranks(z, top)
    return chosen, ids, best - mass
