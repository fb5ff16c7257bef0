"""A feed-forward block of routed experts and one shared expert.

Maths: p = softmax(router x) over the E experts; the top_k largest are chosen, equal probabilities
    in favour of the lower expert; w_e = p_e / (sum of the chosen p). With
    ffn(x; G, D) = D swiglu(G x), whose G holds the gate rows and then the up rows,
        y = sum over chosen e of w_e ffn(x; gate_up[e], down[e])
            + sigmoid(shared_gate x) ffn(x; shared_gate_up, shared_down).
Shapes: x [M, H], router [E, H], gate_up [E, 2*Im, H], down [E, H, Im], shared_gate_up [2*Is, H],
    shared_down [H, Is], shared_gate [1, H]; the result is [M, H].
Domain: 1 <= top_k <= E; M >= 0. No capacity: every chosen expert runs.
Numerics: router scores, softmax and the sums over experts in FP32; w_e rounded to the dtype of x;
    each product and each swiglu rounded as `linear` and `swiglu` do; the result rounded once.
    Contributions of the experts are added in the order of their rank.
Effects: none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernels.checks import require, require_that
from kernels.dispatch import select

if TYPE_CHECKING:
    import torch


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
    """Sends each row of x [M, H] through its top_k experts and the shared expert.

    Raises:
        ValueError: a weight has another shape or dtype than the contract says, or top_k is not
            1..E.
    """
    H = x.shape[-1]
    E = router.shape[0]
    routed, shared = down.shape[-1], shared_down.shape[-1]
    require("x", x, (None, H))
    require("router", router, (E, H), x.dtype)
    require("gate_up", gate_up, (E, 2 * routed, H), x.dtype)
    require("down", down, (E, H, routed), x.dtype)
    require("shared_gate_up", shared_gate_up, (2 * shared, H), x.dtype)
    require("shared_down", shared_down, (H, shared), x.dtype)
    require("shared_gate", shared_gate, (1, H), x.dtype)
    require_that(1 <= top_k <= E, "top_k", f"1..{E}", top_k)
    result: torch.Tensor = select("moe", x).moe(
        x, router, gate_up, down, shared_gate_up, shared_down, shared_gate, top_k
    )
    return result
