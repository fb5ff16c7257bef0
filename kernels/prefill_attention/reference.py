"""Plain torch form; see the contract. One row of the paged attention, all of it live."""

from __future__ import annotations

import torch

from kernels.causal_attention.reference import causal_attention


def prefill_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    page_table: torch.Tensor,
    frontier: torch.Tensor,
) -> torch.Tensor:
    """Stores the columns' keys and values, then attends causally."""
    return causal_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        gate.unsqueeze(0),
        key_pages,
        value_pages,
        page_table.unsqueeze(0),
        frontier.view(1),
        torch.full_like(frontier, query.shape[0]).view(1),
    )[0]
