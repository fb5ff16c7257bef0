"""What several op tests share: arguments and FP64 oracles of the gated delta rule."""

import math
from types import SimpleNamespace

import pytest
import torch

from kernels.gdn_verify import GdnRecord

NAN = float("nan")


def block(B, W, geometry, *, slots=5, seed=0, dtype=torch.float32):
    """Arguments by name; the record is NaN."""
    Hk, Hv, Dk, Dv = geometry
    C = 2 * Hk * Dk + Hv * Dv
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    def unwritten(*shape, dtype=dtype):
        return torch.full(shape, NAN, dtype=dtype)

    return {
        "projected": random(B, W, C).to(dtype),
        "a": random(B, W, Hv).to(dtype),
        "b": random(B, W, Hv).to(dtype),
        "conv_weight": random(C, 4) * 0.5,
        "a_log": random(Hv),
        "dt_bias": random(Hv),
        "state": random(slots, Hv, Dk, Dv) * 0.3,
        "conv_history": random(slots, 3, C).to(dtype),
        "slots": torch.arange(slots - 1, slots - 1 - B, -1),
        "counts": torch.full((B,), W),
        "record": GdnRecord(
            unwritten(B, W, C),
            unwritten(B, W, Hk, Dk),
            unwritten(B, W, Hv, Dv),
            unwritten(B, W, Hv, 2, dtype=torch.float32),
        ),
    }


def formula(arguments):
    """Outputs [B, W, Hv, Dv], states after each column, and record planes, in FP64 by loops.

    q, k and v are rounded to the dtype of projected after the convolution, as the contract says.
    With ancestors a column comes after those in its mask alone.
    """
    x = arguments
    B, W, C = x["projected"].shape
    _, Hv, Dk, Dv = x["state"].shape
    Hk = (C - Hv * Dv) // (2 * Dk)
    dtype = x["projected"].dtype
    weight = x["conv_weight"].double()
    out = torch.zeros(B, W, Hv, Dv, dtype=torch.float64)
    states = torch.zeros(B, W, Hv, Dk, Dv, dtype=torch.float64)
    keys = torch.zeros(B, W, Hk, Dk, dtype=torch.float64)
    values = torch.zeros(B, W, Hv, Dv, dtype=torch.float64)
    gates = torch.zeros(B, W, Hv, 2, dtype=torch.float64)
    for row in range(B):
        slot = int(x["slots"][row])
        raw = torch.cat((x["conv_history"][slot], x["projected"][row])).double()
        for i in range(int(x["counts"][row])):
            way = list(range(i + 1))
            if x.get("ancestors") is not None:
                way = [j for j in way if int(x["ancestors"][row, i]) >> j & 1]
            seen = [0, 1, 2, *(3 + j for j in way)][-4:]
            state = (x["state"][slot].double() if i == 0 else states[row, way[-2]]).clone()
            mixed = sum(weight[:, j] * raw[at] for j, at in enumerate(seen))
            mixed = (mixed / (1 + torch.exp(-mixed))).to(dtype).double()
            q, k, v = mixed.split((Hk * Dk, Hk * Dk, Hv * Dv))
            q, k, v = q.view(Hk, Dk), k.view(Hk, Dk), v.view(Hv, Dv)
            keys[row, i], values[row, i] = k, v
            for h in range(Hv):
                shared = h // (Hv // Hk)
                q_hat = q[shared] / math.sqrt(float((q[shared] ** 2).sum()) + 1e-6) / math.sqrt(Dk)
                k_hat = k[shared] / math.sqrt(float((k[shared] ** 2).sum()) + 1e-6)
                rate = float(x["a"][row, i, h].double() + x["dt_bias"][h].double())
                softplus = max(rate, 0) + math.log1p(math.exp(-abs(rate)))
                g = -math.exp(float(x["a_log"][h])) * softplus
                beta = 1 / (1 + math.exp(-float(x["b"][row, i, h])))
                gates[row, i, h] = torch.tensor([g, beta], dtype=torch.float64)
                decayed = math.exp(g) * state[h]
                u = beta * (v[h] - decayed.T @ k_hat)
                state[h] = decayed + torch.outer(k_hat, u)
                out[row, i, h] = state[h].T @ q_hat
            states[row, i] = state
    return out, states, GdnRecord(x["projected"].double(), keys, values, gates)


@pytest.fixture(scope="session")
def gdn():
    """`gdn.block` makes arguments, `gdn.formula` says what comes of them."""
    return SimpleNamespace(block=block, formula=formula)
