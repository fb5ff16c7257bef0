"""The gated delta rule over chunks, in a form that autograd and a CUDA graph can take."""

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 64
LEAF = 16


def diagonal_blocks(matrix: Tensor, size: int, rows: slice, columns: slice) -> Tensor:
    """Returns square blocks [..., blocks, size, size] of `matrix` [..., C, C].

    Block rows and block columns are taken by the two slices and paired in order.
    """
    count = matrix.shape[-1] // size
    tiles = matrix.unflatten(-1, (count, size)).unflatten(-3, (count, size))
    chosen = tiles[..., rows, :, :, :][..., columns, :]
    return chosen.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def unit_lower_inverse(strict: Tensor) -> Tensor:
    """Returns the inverse of I + `strict` [..., C, C], strictly lower triangular.

    Leaves of 16 by the finite product (I+n)(I+n^2)(I+n^4)(I+n^8) with n = -strict; then pairs of
    blocks are merged. Longer products would amplify rounding.
    """
    every = slice(None)
    power = -diagonal_blocks(strict, LEAF, every, every)
    inverse = torch.eye(LEAF, device=strict.device) + power
    for _ in range(3):
        power = power @ power
        inverse = inverse + inverse @ power
    size = LEAF
    while size < strict.shape[-1]:
        below = diagonal_blocks(strict, size, slice(1, None, 2), slice(0, None, 2))
        first, second = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -second @ below @ first
        top = torch.cat((first, torch.zeros_like(corner)), -1)
        inverse = torch.cat((top, torch.cat((corner, second), -1)), -2)
        size *= 2
    return inverse[..., 0, :, :]


def chunked_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Runs the rule from a zero state over T positions, T a multiple of the chunk.

    query, key [B, H, T, Dk] normalised, value [B, H, T, Dv], decay (log) and beta [B, H, T], all
    float32; returns [B, H, T, Dv]. Per position: M *= exp(decay); u = beta (v - k M); M += k u';
    o = q M.
    """
    query, key, value, decay, beta = (
        x.unflatten(2, (-1, CHUNK)) for x in (query, key, value, decay, beta)
    )
    total = decay.cumsum(-1)
    since = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    scaled = beta[..., None] * key
    inverse = unit_lower_inverse((scaled @ key.mT * since).tril(-1))
    fresh = inverse @ (beta[..., None] * value)
    faded = inverse @ (scaled * total[..., None].exp())
    inside = query @ key.mT * since
    reading = query * total[..., None].exp()
    last = total[..., -1:]
    writing = (key * (last - total)[..., None].exp()).mT
    keep = last[..., None].exp()
    state = torch.zeros_like(writing[:, :, 0] @ fresh[:, :, 0])
    outputs = []
    for chunk in range(query.shape[2]):
        update = fresh[:, :, chunk] - faded[:, :, chunk] @ state
        outputs.append(reading[:, :, chunk] @ state + inside[:, :, chunk] @ update)
        state = keep[:, :, chunk] * state + writing[:, :, chunk] @ update
    return torch.cat(outputs, 2)


def padded_rule(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
    """Runs `chunked_rule` over any T; the padding writes nothing."""
    length = query.shape[2]
    short = -length % CHUNK
    wide = [functional.pad(x, (0, 0, 0, short)) for x in (query, key, value)]
    flat = [functional.pad(x, (0, short)) for x in (decay, beta)]
    return chunked_rule(*wide, *flat)[:, :, :length]


def step_rule(
    state: Tensor, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor
) -> tuple[Tensor, Tensor]:
    """Runs one position. state [B, H, Dk, Dv], the others without T; returns (output, state)."""
    state = state * decay.exp()[..., None, None]
    update = beta[..., None] * (value - (key[..., None, :] @ state).squeeze(-2))
    state = state + key[..., None] * update[..., None, :]
    return (query[..., None, :] @ state).squeeze(-2), state
