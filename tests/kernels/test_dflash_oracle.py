"""Draft ops against the published DFlash model code, in FP32."""

import dflash.model
import pytest
import torch
from dflash.model import CandidateSelector, GroupedDynamicCausalConv, Qwen3DFlashAttention
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding

from kernels.candidate_selector import candidate_selector
from kernels.context_attention import context_attention
from kernels.context_kv_materialize import context_kv_materialize
from kernels.dynamic_grouped_conv import finish_add, prepare
from kernels.head_norm_rope import head_norm_rope
from kernels.linear_topk import linear_topk
from kernels.sliding_window_attention import sliding_window_attention

EPS, THETA = 1e-6, 1e7
HEADS, KEY_HEADS, SIZE, HIDDEN = 4, 2, 16, 48


def config(layer_type, *, window=None, is_causal):
    return Qwen3Config(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_HEADS,
        head_dim=SIZE,
        vocab_size=64,
        rms_norm_eps=EPS,
        layer_types=[layer_type],
        sliding_window=window,
        use_sliding_window=window is not None,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
        is_causal=is_causal,
        attention_bias=False,
    )


@torch.no_grad()
@pytest.mark.parametrize("is_causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("layer_type", ["sliding_attention", "full_attention"])
@pytest.mark.parametrize("context", [3, 16, 41])
def test_attention_equals_the_published_layer(layer_type, context, is_causal):
    width, window = 6, 16
    torch.manual_seed(context)
    local = layer_type == "sliding_attention"
    layer = Qwen3DFlashAttention(
        config(layer_type, window=window if local else None, is_causal=is_causal), 0
    )
    for norm in (layer.q_norm, layer.k_norm):
        norm.weight.copy_(1 + 0.2 * torch.randn(SIZE))
    block, features = torch.randn(1, width, HIDDEN), torch.randn(1, context, HIDDEN)
    positions = torch.arange(context + width)[None]
    rotary = Qwen3RotaryEmbedding(layer.config)(block, positions)
    expected, _ = layer(block, features, rotary, None)

    heads = [
        projection(block).view(1, width, -1, SIZE)
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    ]
    at = positions[:, context:]
    query, key = (
        head_norm_rope(x, norm.weight, at, eps=EPS, theta=THETA, rotary_dim=SIZE)
        for x, norm in ((heads[0], layer.q_norm), (heads[1], layer.k_norm))
    )
    weight = torch.cat([layer.k_proj.weight, layer.v_proj.weight])[None]
    cells = window if local else 64
    keys = torch.full((1, cells, KEY_HEADS, SIZE), torch.nan)
    values = keys.clone()
    source = positions[:, :context]
    live = source >= context - cells
    context_kv_materialize(
        features,
        source,
        torch.where(live, source % cells, -1),
        weight,
        layer.k_norm.weight[None],
        keys,
        values,
        eps=EPS,
        theta=THETA,
    )
    numbers = [torch.tensor([x]) for x in (0, context, width)]
    if local:
        out = sliding_window_attention(
            query,
            key,
            heads[2],
            keys,
            values,
            torch.tensor([0]),
            *numbers,
            window=window,
            causal=is_causal,
        )
    else:
        out = context_attention(
            query,
            key,
            heads[2],
            keys.view(4, 16, KEY_HEADS, SIZE),
            values.view(4, 16, KEY_HEADS, SIZE),
            torch.arange(4)[None],
            *numbers,
            causal=is_causal,
        )
    torch.testing.assert_close(layer.o_proj(out), expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (1, 8), (3, 5)])
@pytest.mark.parametrize("taps", [2, 3])
def test_convolution_equals_the_published_layer(rows, width, taps):
    group = 16
    torch.manual_seed(rows * width)
    conv = GroupedDynamicCausalConv(HIDDEN, taps, group)
    conv.base_kernel.copy_(torch.randn(2, taps, HIDDEN))
    norm = Qwen3RMSNorm(HIDDEN, eps=EPS)
    norm.weight.copy_(1 + 0.2 * torch.randn(HIDDEN))
    x, z = torch.randn(rows, width, HIDDEN), torch.randn(rows, width, HIDDEN)
    expected, kernel = conv.prepare(norm(x))
    prepared, finish_delta = prepare(
        x, norm.weight, conv.base_kernel, conv.kernel_projection.weight, EPS
    )
    torch.testing.assert_close(prepared, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(finish_delta, kernel, atol=1e-5, rtol=0)
    out = finish_add(x, z, conv.base_kernel, finish_delta)
    torch.testing.assert_close(out, x + conv.finish(z, kernel), atol=1e-5, rtol=0)


def selector(rank=12, top_k=16, vocab=64):
    settings = config("full_attention", is_causal=False)
    settings.dflash_config = {"selector_rank": rank, "selector_top_k": top_k}
    settings.vocab_size = vocab
    chooser = CandidateSelector(settings)
    for book in (chooser.predecessor_codebook, chooser.successor_codebook):
        book.weight.copy_(0.6 * torch.randn(vocab, rank))
    return chooser


def propose(chooser, head, hidden, anchors, temperature, seeds, frontiers):
    rows, positions, _ = hidden.shape
    scores, ids = linear_topk(hidden.flatten(0, 1), head, chooser.top_k, public_vocab=head.shape[0])
    ids = ids.view(rows, positions, -1)
    tokens, q = candidate_selector(
        scores.view(rows, positions, -1),
        ids,
        chooser.hidden_projection(hidden),
        chooser.predecessor_codebook.weight,
        chooser.successor_codebook.weight,
        anchors,
        torch.full((rows,), temperature),
        seeds,
        frontiers,
    )
    return tokens, ids, q


@torch.no_grad()
def test_greedy_path_equals_the_published_selector():
    torch.manual_seed(5)
    chooser, head = selector(), torch.randn(64, HIDDEN) / HIDDEN**0.5
    rows = 40
    hidden, anchors = torch.randn(rows, 7, HIDDEN), torch.randint(64, (rows,))
    expected, _, _ = chooser.select(hidden, hidden @ head.T, anchors, 0.0)
    tokens, _, q = propose(
        chooser, head, hidden, anchors, 0.0, torch.arange(rows), torch.arange(rows)
    )
    assert torch.equal(tokens, expected)
    assert torch.equal(q.sort(dim=2).values[..., -2:], torch.tensor([0.0, 1.0]).expand(rows, 7, 2))


@torch.no_grad()
def test_sampled_law_equals_the_published_selector_along_the_same_path(monkeypatch):
    torch.manual_seed(6)
    chooser, head = selector(), torch.randn(64, HIDDEN) / HIDDEN**0.5
    rows = 20
    hidden, anchors = torch.randn(rows, 7, HIDDEN), torch.randint(64, (rows,))
    tokens, ids, q = propose(
        chooser, head, hidden, anchors, 0.7, torch.arange(rows), torch.arange(rows) + 9
    )
    logits = hidden @ head.T
    _, their_ids = torch.topk(logits, chooser.top_k, dim=-1, sorted=False)
    # the published walk draws with torch's generator: make it take our tokens
    path = iter((their_ids == tokens.unsqueeze(2)).int().argmax(dim=2).unbind(1))
    monkeypatch.setattr(dflash.model, "_sample_probs", lambda probs: next(path))
    expected, candidates, their_q = chooser.select(hidden, logits, anchors, 0.7)
    assert torch.equal(expected, tokens)
    ours = torch.zeros(rows, 7, 64).scatter_(2, ids, q)
    theirs = torch.zeros(rows, 7, 64).scatter_(2, candidates, their_q)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
