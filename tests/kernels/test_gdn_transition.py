"""The shared column: its bits do not depend on what else is in the call."""

import pytest
import torch

from kernels.gdn_transition import advance, columns, constant, convolve, repeat_heads, take, unit


def random_columns(lead, heads, Dk, Dv, seed=0):
    generator = torch.Generator().manual_seed(seed)
    key = torch.randn(*lead, heads, Dk, generator=generator)
    value = torch.randn(*lead, heads, Dv, generator=generator)
    g = -torch.rand(*lead, heads, generator=generator) * 5
    beta = torch.rand(*lead, heads, generator=generator)
    return key, value, g, beta


@pytest.mark.parametrize(("Dk", "Dv"), [(32, 32), (128, 128), (20, 12), (7, 5), (1, 1)], ids=str)
@pytest.mark.parametrize("lead", [(1, 1), (6, 1), (5, 3), (2, 8)], ids=str)
def test_bits_do_not_depend_on_the_batch(lead, Dk, Dv):
    key, value, g, beta = random_columns(lead, 8, Dk, Dv)
    state = torch.randn(lead[0], 8, Dk, Dv)
    together = columns(unit(key), value, g.exp(), beta)
    current = state
    for i, column in enumerate(together.each()):
        following = advance(current, column, torch.empty_like(state), torch.empty_like(state))
        for row in range(lead[0]):
            for head in range(8):
                one = (slice(row, row + 1), slice(i, i + 1), slice(head, head + 1))
                alone = columns(unit(key[one]), value[one], g[one].exp(), beta[one])
                before = current[row : row + 1, head : head + 1].clone()
                after = advance(before, next(alone.each()), before, torch.empty_like(before))
                assert torch.equal(after[0, 0], following[row, head])
        current = following


def test_in_place_equals_out_of_place():
    key, value, g, beta = random_columns((2, 1), 4, 16, 16)
    column = next(columns(unit(key), value, g.exp(), beta).each())
    state = torch.randn(2, 4, 16, 16)
    kept, scratch = state.clone(), torch.full_like(state, float("nan"))
    apart = advance(state, column, torch.full_like(state, float("nan")), scratch)
    assert torch.equal(state, kept)
    assert torch.equal(advance(state, column, state, scratch), apart)
    assert torch.equal(state, apart)


def test_column_equals_formula():
    key, value, g, beta = (t.double() for t in random_columns((1, 1), 3, 8, 6))
    state = torch.randn(1, 3, 8, 6)
    column = next(columns(unit(key.float()), value.float(), g.exp().float(), beta.float()).each())
    actual = advance(state, column, torch.empty_like(state), torch.empty_like(state))
    for head in range(3):
        k = key[0, 0, head] / torch.sqrt((key[0, 0, head] ** 2).sum() + 1e-6)
        decayed = state[0, head].double() * g[0, 0, head].exp()
        u = beta[0, 0, head] * (value[0, 0, head] - decayed.T @ k)
        expected = decayed + torch.outer(k, u)
        torch.testing.assert_close(actual[0, head].double(), expected, rtol=1e-5, atol=1e-6)


def test_heads_repeat_in_order():
    x = torch.arange(6.0).view(1, 3, 2)
    assert torch.equal(repeat_heads(x, 6), x.repeat_interleave(2, dim=1))
    assert repeat_heads(x, 3) is x


@pytest.mark.parametrize("slots", [[2], [4, 0], [1, 1, 3]], ids=str)
def test_take_picks_slots(slots):
    slotted = torch.randn(5, 2, 3)
    assert torch.equal(take(slotted, torch.tensor(slots)), slotted[slots])


def test_convolution_keeps_columns_apart():
    padded, weight = torch.randn(2, 8, 3), torch.randn(3, 4)
    whole = convolve(padded, weight)
    assert whole.shape == (2, 5, 3)
    torch.testing.assert_close(whole[:, 2:3], convolve(padded[:, 2:6], weight))


def test_constant_made_in_inference_mode_serves_outside():
    with torch.inference_mode():
        kept = constant(0.1234567, torch.device("cpu"))
    assert not kept.is_inference()
    x = torch.ones(2, requires_grad=True)
    (x * constant(0.1234567, torch.device("cpu"))).sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 0.1234567))
