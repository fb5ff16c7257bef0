"""Kernels of a prompt compile for sm_90 at the official constants."""

import importlib

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
BF16, FP32 = "*bf16", "*fp32"
TYPES = {
    **dict.fromkeys(("slot", "page_table", "frontier"), "*i64"),
    **dict.fromkeys(("a_log", "dt_bias", "factors", "decays", "state"), FP32),
    "value_pages": "*fp16",
    "scale": "fp32",
}
NUMBERS = {
    *("T", "C", "page", "p_column", "a_column", "b_column", "w_channel", "w_tap"),
    *("key_column", "key_head", "value_column", "value_head"),
    *("query_column", "query_head", "gate_column", "gate_head"),
}
GDN = {"HK": 16, "DK": 128, "DV": 128, "KEYS": 128, "CHUNK": 64}
ATTENTION = {"D": 256, "COLUMNS": 128, "KEYS": 64, "BLOCK": 256, "RUNS": True}

CASES = {
    "gdn_prefill-convolve": ("convolve_kernel", {"COLUMNS": 16, "CHANNELS": 512}, {"num_warps": 2}),
    **{
        f"gdn_prefill-{name}-{step}": (
            f"{step}_kernel",
            GDN | {"HV": heads} | constants,
            {"num_warps": 4},
        )
        for name, heads, share in (("27B", 48, 214), ("35B", 32, 256))
        for step, constants in (
            ("chunk", {"SHARE": share, "SHARE_BLOCK": 256, "PRECISION": "tf32"}),
            ("scan", {"VALUES": 64}),
        )
    },
    "prefill_attention-store": ("store_kernel", {"D": 256, "SIZE": 1024, "BLOCK": 1024}, {}),
    **{
        f"prefill_attention-{name}{'' if runs else '-scattered'}": (
            "attend_kernel",
            ATTENTION | {"HQ": heads, "HKV": key_heads, "RUNS": runs},
            {"num_warps": 8, "num_stages": 2},
        )
        for name, heads, key_heads, runs in (
            ("27B", 24, 4, True),
            ("27B", 24, 4, False),
            ("35B", 16, 2, True),
        )
    },
}


@pytest.mark.parametrize("case", CASES)
def test_compiles_within_shared_memory(case):
    name, constants, options = CASES[case]
    op = case.split("-", maxsplit=1)[0]
    kernel = getattr(importlib.import_module(f"kernels.{op}.kernel"), name)
    names = kernel.arg_names
    assert not set(constants) - set(names)
    numbers = dict.fromkeys(NUMBERS, "i32")
    signature = {
        n: "constexpr" if n in constants else (numbers | TYPES).get(n, BF16) for n in names
    }
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if signature[n][0] in "*i" and n != "T"
        },
    )
    built = triton.compile(source, target=HOPPER, options=options)
    assert built.asm["cubin"]
    assert built.metadata.shared <= SHARED_MEMORY
