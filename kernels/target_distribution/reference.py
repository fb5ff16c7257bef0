"""Plain torch form: row by row, so that each row pays only for the steps that it asks for."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from kernels.trees import members

if TYPE_CHECKING:
    from torch import Tensor

    from kernels.target_distribution import SamplingRows


class _Row(NamedTuple):
    temperature: float
    top_p: float
    min_p: float
    presence: float
    frequency: float
    repetition: float
    top_k: int
    min_tokens: int
    output_index: int
    lane: int


def target_distribution(
    logits: Tensor,
    proposals: Tensor,
    counts: Tensor,
    rows: SamplingRows,
    *,
    public_vocab: int,
    ancestors: Tensor | None = None,
) -> Tensor:
    """See the contract."""
    batch, width, _ = logits.shape
    # whether a column's overlay has the token of a later one of these: bool [B, W, W - 1]
    if ancestors is None:
        seen = _earlier(width, logits.device).expand(batch, -1, -1)
    else:
        seen = members(ancestors)[..., 1:]
    p = torch.zeros(logits.shape, device=logits.device)
    wishes = zip(
        rows.temperature.tolist(),
        rows.top_p.tolist(),
        rows.min_p.tolist(),
        rows.presence_penalty.tolist(),
        rows.frequency_penalty.tolist(),
        rows.repetition_penalty.tolist(),
        rows.top_k.tolist(),
        rows.min_tokens.tolist(),
        rows.output_index.tolist(),
        rows.lanes.tolist(),
        strict=True,
    )
    for index, (count, wish) in enumerate(zip(counts.tolist(), wishes, strict=True)):
        if count == 0:
            continue
        z = logits[index, :count, :public_vocab].float()
        out = p[index, :count, :public_vocab]
        if not _finite(z):
            p[index, :count] = torch.nan
            continue
        row = _Row(*wish)
        overlay = seen[index, :count, : count - 1]
        z = _penalised(z, proposals[index, : count - 1], overlay, row, rows)
        if row.temperature <= 0.0:
            out.scatter_(1, z.max(dim=1, keepdim=True).indices, 1.0)
        elif row.top_p < 1.0 or 0 < row.top_k < public_vocab:
            _filtered(z, row, out)
        else:
            _softmax(z, row, out)
    return p


def _finite(z: Tensor) -> bool:
    # a finite sum shows that every term is; a sum of finite terms may still overflow
    return bool(z.sum().isfinite()) or bool(z.isfinite().all())


@lru_cache(maxsize=64)
def _earlier(width: int, device: torch.device) -> Tensor:
    """Of a chain, which tokens of columns 1.. are in each column's overlay."""
    with torch.inference_mode(False):
        return torch.ones(width, width - 1, dtype=torch.bool, device=device).tril_(-1)


def _penalised(z: Tensor, drafts: Tensor, seen: Tensor, row: _Row, rows: SamplingRows) -> Tensor:
    """Steps 2 to 5 on z [n, vocab]; never writes into z.

    drafts [n - 1] are the tokens of columns 1.., of which bool [n, n - 1] says who sees which.
    """
    vocab = z.shape[1]
    bias = rows.logit_bias[row.lane, :vocab]
    biased = bool(bias.any())
    counting = row.repetition != 1.0 or row.presence != 0.0 or row.frequency != 0.0
    if counting:
        public = drafts < vocab
        tokens, seen_tokens = drafts[public], seen[:, public]
        count = rows.generated_counts[row.lane, :vocab]
        prompt = rows.prompt_seen[row.lane, :vocab]
        penalised = _shifted(z, count, prompt, bias, row)
        if tokens.numel():
            # only the overlay's tokens differ between columns: do those again, column by column
            overlay = ((tokens[:, None] == tokens) & seen_tokens.unsqueeze(2)).sum(dim=1)
            overlaid = _shifted(
                z[:, tokens], count[tokens] + overlay, prompt[tokens], bias[tokens], row
            )
            penalised[:, tokens] = overlaid
        z = penalised
    elif biased:
        z = z + bias
    guarded = row.min_tokens - row.output_index
    if guarded > 0:
        early = seen.sum(dim=1, keepdim=True) < guarded
        z = z.masked_fill(early & rows.stop_mask[row.lane, :vocab], -torch.inf)
    return z


def _shifted(z: Tensor, count: Tensor, seen: Tensor, bias: Tensor, row: _Row) -> Tensor:
    """Steps 3 to 5, elementwise; returns a new tensor."""
    generated = count > 0
    if row.repetition != 1.0:
        scaled = torch.where(z > 0.0, z / row.repetition, z * row.repetition)
        z = torch.where(seen | generated, scaled, z)
    return z + (bias - (row.presence * generated + row.frequency * count))


def _softmax(z: Tensor, row: _Row, out: Tensor) -> None:
    """Steps 6 and 8 into out [n, vocab]."""
    weights = _weights(z, z.amax(dim=1, keepdim=True), row)
    if row.min_p > 0.0:
        weights.masked_fill_(weights < row.min_p, 0.0)
    torch.div(weights, weights.sum(dim=1, keepdim=True), out=out)


def _filtered(z: Tensor, row: _Row, out: Tensor) -> None:
    """Steps 6 to 9 into out [n, vocab], zero before."""
    vocab = z.shape[1]
    if 0 < row.top_k < vocab:
        _prefix(z, row, None, max(row.top_k + 1, 64), out)
    else:
        mass = _weights(z, z.amax(dim=1, keepdim=True), row).sum(dim=1, keepdim=True)
        _prefix(z, row, mass, 64, out)


def _prefix(z: Tensor, row: _Row, mass: Tensor | None, count: int, out: Tensor) -> None:
    """Writes what stays of z into out, ranking `count` entries, or more where those do not do.

    mass [n, 1] is the sum of the weights that top_p is measured against; None: of the top_k.
    """
    vocab = z.shape[1]
    if count < vocab:
        values, columns = z.topk(count, dim=1)
    else:
        # a stable sort leaves equal entries in the order of their ids
        values, columns = z.sort(dim=1, descending=True, stable=True)
    weights = _weights(values, values[:, :1], row)
    if mass is None:
        weights[:, row.top_k :] = 0.0
    stays = weights >= row.min_p if row.min_p > 0.0 else weights > 0.0
    if row.top_p < 1.0:
        reached = weights.cumsum(dim=1)
        total = reached[:, -1:] if mass is None else mass
        stays[:, 1:].logical_and_(reached[:, :-1] < row.top_p * total)
    kept = stays.sum(dim=1, keepdim=True)
    weights.mul_(stays)
    out.scatter_(1, columns, weights.div_(weights.sum(dim=1, keepdim=True)))
    if count >= vocab:
        return
    # the entry after the last kept one must be smaller: among equals `topk` does not choose by id
    last, after = values.gather(1, kept - 1), values.gather(1, kept.clamp(max=count - 1))
    open_lines = (last <= after).squeeze(1)
    if open_lines.any():
        again = torch.zeros(int(open_lines.sum()), vocab, device=z.device)
        mass = mass if mass is None else mass[open_lines]
        _prefix(z[open_lines], row, mass, 4 * count, again)
        out[open_lines] = again


def _weights(z: Tensor, best: Tensor, row: _Row) -> Tensor:
    return (z - best).div_(row.temperature).exp_()
