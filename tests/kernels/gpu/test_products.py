"""Products with weights: dense, ranked over the vocabulary, and by experts."""

import pytest
import torch

from kernels.add_rms_norm import add_rms_norm
from kernels.gate_up_swiglu import gate_up_swiglu
from kernels.linear import linear
from kernels.linear_add_rms_norm import linear_add_rms_norm
from kernels.linear_argmax import linear_argmax
from kernels.linear_argmax.reference import linear_argmax as argmax_reference
from kernels.linear_topk import linear_topk
from kernels.linear_topk.reference import linear_topk as topk_reference
from kernels.moe import moe
from kernels.moe.reference import moe as moe_reference
from tests.kernels.gpu.shared import BF16, FP32, NAN, ROUNDED

pytestmark = pytest.mark.gpu
VOCAB, PUBLIC = 248320, 248077
NEUTRAL = {"multiplier": 1.0, "softcap": 0.0}
WEIGHTS = [
    (16480, 5120),  # 27B: GDN in
    (14336, 5120),  # attention in
    (5120, 6144),  # both out
    (5120, 17408),  # down
    (2048, 4096),  # 35B: out
    (7, 40),
    (130, 1000),
]


@pytest.mark.parametrize(("N", "K"), WEIGHTS, ids=str)
def test_product_is_rounded_once_and_a_column_ignores_the_others(random, distance, N, K):
    x, weight = random(257, K), random(N, K, scale=K**-0.5)
    exact = x.float() @ weight.float().T
    assert distance(linear(x, weight), exact) < ROUNDED  # the BLAS
    x[0] = NAN
    widest = linear(x[:256], weight)
    assert distance(widest[1:], exact[1:256]) < ROUNDED
    assert widest[0].isnan().all()
    for width in (*range(1, 17), 17, 31, 33, 64, 65, 128, 129, 255):
        assert torch.equal(linear(x[256 - width : 256], weight), widest[256 - width :])


@pytest.mark.parametrize(
    ("inner", "K"), [(17408, 5120), (8448, 128), (8460, 1000), (100, 40)], ids=str
)
def test_activated_product_and_a_column_ignores_the_others(random, distance, inner, K):
    x, weight = random(257, K), random(2 * inner, K, scale=K**-0.5)
    gate, up = (x.float() @ weight.float().T).to(BF16).float().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    # a rounding of the gate or the up half at its edge comes on top of the result's own
    assert distance(gate_up_swiglu(x, weight), expected) < 2 * ROUNDED  # the BLAS
    x[0] = NAN
    widest = gate_up_swiglu(x[:256], weight)
    assert distance(widest[1:], expected[1:256]) < 2 * ROUNDED
    assert widest[0].isnan().all()
    for width in (*range(1, 17), 17, 31, 33, 64, 65, 128, 129, 255):
        assert torch.equal(gate_up_swiglu(x[256 - width : 256], weight), widest[256 - width :])


@pytest.mark.parametrize(("N", "K"), WEIGHTS, ids=str)
def test_product_into_the_residual_stream_has_the_bits_of_its_parts(random, N, K):
    x, weight = random(256, K), random(N, K, scale=K**-0.5)
    residual, gain = random(256, N), random(N, dtype=FP32)
    for width in (1, 8, 17, 64, 128, 256):
        rows = slice(256 - width, None)
        fused = linear_add_rms_norm(x[rows], weight, residual[rows], gain, 1e-6)
        parts = add_rms_norm(residual[rows], linear(x[rows], weight), gain, 1e-6)
        for one, other in zip(fused, parts, strict=True):
            assert torch.equal(one, other)


def test_product_writes_where_it_is_told(random):
    x, weight = random(300, 256), random(130, 256)
    for width in (8, 300):
        out = torch.full((width, 130), NAN, dtype=BF16, device="cuda")
        assert linear(x[:width], weight, out) is out
        assert torch.equal(out, linear(x[:width], weight))


def test_float32_products_keep_float32(random, distance):
    x, weight = random(5, 1000, dtype=FP32), random(130, 1000, dtype=FP32)
    assert distance(linear(x, weight), x.double() @ weight.double().T) < 1e-6


@pytest.fixture(scope="module")
def head():
    """A head of the official size, with rows that tie exactly."""
    generator = torch.Generator("cuda").manual_seed(1)
    weight = torch.randn(VOCAB, 5120, generator=generator, dtype=BF16, device="cuda")
    weight[[200_000, 70_001]] = weight[[123]]
    weight[PUBLIC:] = float("inf")
    return weight


# at each of K/16 steps the matrix units cut off what is below 2^-23 of the sum so far; twice that
SUMMED = {"rtol": 5120 / 16 * 2**-22, "atol": 1e-2}


@pytest.mark.parametrize("M", [1, 7, 15, 16, 64])
def test_ranking_equals_reference_and_a_row_ignores_the_others(random, head, M):
    hidden = random(M, 5120)
    hidden[0] = head[123] * 3
    scores, ids = linear_topk(hidden, head, 16, public_vocab=PUBLIC)
    expected = topk_reference(hidden, head, 16, public_vocab=PUBLIC, token_ids=None, **NEUTRAL)
    # neighbours nearer than a sum's rounding may change places, so ids are checked by their scores
    torch.testing.assert_close(scores, expected[0], **SUMMED)
    exact = torch.einsum("mh,mkh->mk", hidden.double(), head[ids].double())
    torch.testing.assert_close(scores.double(), exact, **SUMMED)
    assert (ids < PUBLIC).all()
    assert ids[0, :3].tolist() == [123, 70_001, 200_000]
    best = linear_argmax(hidden, head, public_vocab=PUBLIC)
    assert best[0] == 123
    rounded = (hidden.float() @ head[:PUBLIC].float().T).to(BF16).float()
    reached, greatest = rounded.gather(1, best.unsqueeze(1))[:, 0], rounded.amax(dim=1)
    # a sum at the edge of a rounding may fall to either side: one step of BF16
    assert (reached >= greatest - greatest.abs() * 2**-7).all()
    for row in (0, M - 1):
        alone = hidden[row : row + 1]
        one_scores, one_ids = linear_topk(alone, head, 16, public_vocab=PUBLIC)
        assert torch.equal(one_scores[0], scores[row])
        assert torch.equal(one_ids[0], ids[row])
        assert torch.equal(linear_argmax(alone, head, public_vocab=PUBLIC)[0], best[row])


def test_indexed_head_names_its_rows(random, head):
    hidden, rows = random(3, 5120), torch.randperm(VOCAB, device="cuda")[:131_072]
    part = head[rows].nan_to_num(posinf=0.0)
    actual = linear_topk(hidden, part, 16, public_vocab=PUBLIC, token_ids=rows)
    expected = topk_reference(hidden, part, 16, public_vocab=PUBLIC, token_ids=rows, **NEUTRAL)
    assert (actual[1] == expected[1]).float().mean() > 0.9
    torch.testing.assert_close(actual[0], expected[0], **SUMMED)
    chosen = linear_argmax(hidden, part, public_vocab=PUBLIC, token_ids=rows)
    wanted = argmax_reference(hidden, part, public_vocab=PUBLIC, token_ids=rows)
    assert (chosen < PUBLIC).all()
    assert (chosen == wanted).float().mean() > 0.6


@pytest.fixture(scope="module")
def experts():
    """A layer of the official mixture."""
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = {
        "router": (256, 2048),
        "gate_up": (256, 1024, 2048),
        "down": (256, 2048, 512),
        "shared_gate_up": (1024, 2048),
        "shared_down": (2048, 512),
        "shared_gate": (1, 2048),
    }
    draw = {"generator": generator, "dtype": BF16, "device": "cuda"}
    return {
        name: torch.randn(*shape, **draw).mul_(shape[-1] ** -0.5) for name, shape in shapes.items()
    }


@pytest.mark.parametrize("M", [1, 8, 16, 33, 128, 300])
def test_mixture_equals_reference_and_a_row_ignores_the_others(random, distance, experts, M):
    x = random(M, 2048)
    together = moe(x, **experts, top_k=8)
    assert distance(together, moe_reference(x, **experts, top_k=8)) < 6e-3
    for rows in (slice(0, 1), slice(M // 2, M)):
        assert torch.equal(moe(x[rows], **experts, top_k=8), together[rows])
