"""Plain torch form; see the contract."""

from __future__ import annotations

import torch

from kernels.linear.reference import linear
from kernels.swiglu.reference import swiglu


def moe(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    shared_gate_up: torch.Tensor,
    shared_down: torch.Tensor,
    shared_gate: torch.Tensor,
    top_k: int,
) -> torch.Tensor:
    """Sends each row of x [M, H] through its top_k experts and the shared expert."""
    experts, weights = _route(x, router, top_k)
    # rows in the order of their expert, so that each expert chosen is one product
    order = experts.flatten().argsort(stable=True)
    row_counts = experts.flatten().bincount(minlength=router.shape[0]).tolist()
    gathered = x[order // top_k]
    routed = torch.empty(len(order), x.shape[1], dtype=torch.float32, device=x.device)
    first = 0
    for expert, row_count in enumerate(row_counts):
        if row_count:
            end = first + row_count
            hidden = swiglu(linear(gathered[first:end], gate_up[expert]))
            routed[order[first:end]] = linear(hidden, down[expert]).float()
            first = end
    shared = linear(swiglu(linear(x, shared_gate_up)), shared_down)
    openness = linear(x, shared_gate).float().sigmoid()
    mixed = (routed.view(*experts.shape, x.shape[1]) * weights.unsqueeze(-1)).sum(1)
    return mixed.add_(openness * shared.float()).to(x.dtype)


def _route(x: torch.Tensor, router: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Chosen experts int64 [M, top_k], best first, and their weights FP32 [M, top_k]."""
    probabilities = linear(x.float(), router.float()).softmax(-1)
    # a stable sort keeps equal probabilities in the order of their experts, unlike topk
    best, experts = probabilities.sort(dim=-1, descending=True, stable=True)
    best, experts = best[:, :top_k], experts[:, :top_k]
    return experts, (best / best.sum(-1, keepdim=True)).to(x.dtype).float()
