"""Routed and shared experts against a formula in FP64 and against transformers' block."""

import pytest
import torch
from transformers import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeSparseMoeBlock

from kernels.moe import moe


def weights(H=32, E=6, routed=12, shared=20, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "router": (E, H),
        "gate_up": (E, 2 * routed, H),
        "down": (E, H, routed),
        "shared_gate_up": (2 * shared, H),
        "shared_down": (H, shared),
        "shared_gate": (1, H),
    }
    return {
        name: (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(dtype)
        for name, shape in shapes.items()
    }


def ffn(row, gate_up, down):
    gate, up = (gate_up @ row).chunk(2)
    return down @ (gate / (1 + torch.exp(-gate)) * up)


def formula(x, w, top_k):
    """Row by row in FP64, experts ranked by probability and then by number."""
    w = {name: tensor.double() for name, tensor in w.items()}
    rows = []
    for row in x.double():
        # compared in FP32, as the contract has it, so that ties are those of the op
        p = (w["router"] @ row).softmax(0)
        ranked = sorted(range(len(p)), key=lambda e: (-float(p[e].float()), e))[:top_k]
        total = sum(p[e] for e in ranked)
        y = torch.sigmoid(w["shared_gate"] @ row) * ffn(row, w["shared_gate_up"], w["shared_down"])
        for e in ranked:
            y = y + p[e] / total * ffn(row, w["gate_up"][e], w["down"][e])
        rows.append(y)
    return torch.stack(rows)


@pytest.mark.parametrize("top_k", [1, 2, 6])
@pytest.mark.parametrize("M", [1, 2, 8, 40])
def test_equals_formula(M, top_k):
    torch.manual_seed(1)
    x, w = torch.randn(M, 32), weights()
    actual = moe(x, **w, top_k=top_k)
    torch.testing.assert_close(actual.double(), formula(x, w, top_k), rtol=1e-5, atol=2e-6)


def test_no_row_gives_no_row():
    assert moe(torch.zeros(0, 32), **weights(), top_k=2).shape == (0, 32)


def test_equals_the_block_of_the_reference_model():
    torch.manual_seed(2)
    config = Qwen3_5MoeTextConfig(
        hidden_size=32,
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=20,
    )
    block = Qwen3_5MoeSparseMoeBlock(config)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    x = torch.randn(2, 9, 32)
    shared = block.shared_expert
    with torch.no_grad():
        expected = block(x).view(18, 32)
        actual = moe(
            x.view(18, 32),
            router=block.gate.weight,
            gate_up=block.experts.gate_up_proj,
            down=block.experts.down_proj,
            shared_gate_up=torch.cat((shared.gate_proj.weight, shared.up_proj.weight)),
            shared_down=shared.down_proj.weight,
            shared_gate=block.shared_expert_gate.weight,
            top_k=3,
        )
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_equal_probabilities_go_to_the_lower_expert(top_k):
    torch.manual_seed(3)
    x, w = torch.randn(5, 32), weights()
    # experts 1, 3 and 4 score alike and above all others; 0, 2 and 5 alike and below
    direction = x.mean(0)
    w["router"] = torch.zeros(6, 32)
    x = direction.expand(5, 32) + 0
    w["router"][[1, 3, 4]] = direction
    chosen = [1, 3, 4][:top_k]
    expected = torch.stack(
        [
            torch.sigmoid(w["shared_gate"].double() @ row)
            * ffn(row, w["shared_gate_up"].double(), w["shared_down"].double())
            + sum(ffn(row, w["gate_up"][e].double(), w["down"][e].double()) for e in chosen) / top_k
            for row in x.double()
        ]
    )
    actual = moe(x, **w, top_k=top_k)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=2e-6)


def test_all_equal_router_takes_the_first_experts():
    torch.manual_seed(4)
    # a wide router, where an unstable selection would show
    x, w = torch.randn(4, 32), weights(E=200)
    w["router"].zero_()
    actual = moe(x, **w, top_k=8)
    torch.testing.assert_close(actual.double(), formula(x, w, 8), rtol=1e-5, atol=2e-6)


def test_row_does_not_depend_on_its_neighbours():
    torch.manual_seed(5)
    x, w = torch.randn(12, 32), weights()
    together = moe(x, **w, top_k=2)
    alone = torch.cat([moe(row[None], **w, top_k=2) for row in x])
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-6)


def test_bfloat16_stays_near_the_formula():
    torch.manual_seed(6)
    x, w = torch.randn(16, 32).bfloat16(), weights(dtype=torch.bfloat16)
    actual = moe(x, **w, top_k=2)
    assert actual.dtype is torch.bfloat16
    expected = formula(x, w, 2)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < 8e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 0}, r"top_k: expected 1\.\.6, got 0"),
        ({"top_k": 7}, r"top_k: expected 1\.\.6, got 7"),
        ({"gate_up": torch.zeros(6, 12, 32)}, r"gate_up: expected \[6, 24, 32\]"),
        ({"down": torch.zeros(5, 32, 12)}, r"down: expected \[6, 32, 12\]"),
        ({"shared_gate": torch.zeros(1, 31)}, r"shared_gate: expected \[1, 32\]"),
        ({"router": torch.zeros(6, 32).bfloat16()}, r"router: expected \[6, 32\] float32"),
    ],
    ids=["k-0", "k-7", "gate_up", "down", "shared_gate", "dtype"],
)
def test_what_does_not_fit_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        moe(torch.zeros(2, 32), **{**weights(), "top_k": 2, **change})
