"""Every kernel compiles for sm_90 at the official geometries' constants; no device is needed."""

import importlib
import re
from collections import Counter

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
BF16, FP32, INT64 = "*bf16", "*fp32", "*i64"
GDN_27B = {"HK": 16, "HV": 48, "DK": 128, "DV": 128, "KEYS": 128, "VALUES": 16}
GDN_35B = GDN_27B | {"HV": 32}
GDN_ODD = {"HK": 2, "HV": 6, "DK": 12, "DV": 20, "KEYS": 16, "VALUES": 16}
RUNS = {"NEAR": 128, "FAR": 512, "FAR_FROM": 2048}
ROPE = {"D": 256, "ROTARY": 64, "HEIGHT_END": 33, "WIDTH_END": 30, "BLOCK": 256}

# kernel, pointer and float arguments, constants, options; integer arguments are the rest
CASES = {
    "rms_norm-5120": (
        "rms_norm.rms_norm_kernel",
        {"x": BF16, "gain": FP32, "out": BF16, "eps": "fp32"},
        {"BLOCK": 8192},
        {"num_warps": 16},
    ),
    "add_rms_norm-5120": (
        "add_rms_norm.add_rms_norm_kernel",
        {**dict.fromkeys(("x", "z", "total", "out"), BF16), "gain": FP32, "eps": "fp32"},
        {"BLOCK": 8192},
        {"num_warps": 16},
    ),
    "gated_rms_norm-128": (
        "gated_rms_norm.gated_rms_norm_kernel",
        {"x": BF16, "gate": BF16, "gain": FP32, "out": BF16, "eps": "fp32"},
        {"ROWS": 4, "BLOCK": 128},
        {"num_warps": 4},
    ),
    "swiglu": ("swiglu.swiglu_kernel", {"gate_up": BF16, "out": BF16}, {"BLOCK": 1024}, {}),
    **{
        f"head_norm_rope-{'three axes' if axes else 'one axis'}": (
            "head_norm_rope.head_norm_rope_kernel",
            {
                "x": BF16,
                "gain": FP32,
                "positions": INT64,
                "rates": FP32,
                "out": BF16,
                "eps": "fp32",
            },
            ROPE | {"AXES": axes},
            {"num_warps": 1},
        )
        for axes in (False, True)
    },
    **{
        f"linear-{columns}-columns-{rows}-rows-split-{split}-{'even' if even else 'odd'}"
        f"{'-left' if leave else ''}": (
            "linear.linear_kernel",
            {"x": BF16, "weight": BF16, "out": BF16, "partial": FP32, "arrivals": "*i32"},
            {
                "w_k": 1,
                "BLOCK_N": rows,
                "BLOCK_K": 128,
                "COLUMNS": columns,
                "SPLIT": split,
                "EVEN_K": even,
                "LEAVE": leave,
            },
            {"num_stages": stages, "num_warps": warps},
        )
        for columns, rows, split, even, leave, stages, warps in (
            (16, 64, 1, True, False, 5, 4),
            (16, 128, 3, False, True, 4, 4),
            (32, 64, 4, True, False, 5, 4),
            (64, 128, 1, True, False, 4, 4),
            (64, 128, 3, True, True, 4, 4),
            (128, 128, 3, True, False, 3, 8),
        )
    },
    "linear_add_rms_norm-5120": (
        "linear_add_rms_norm.runs_norm_kernel",
        {**dict.fromkeys(("residual", "total", "out"), BF16), "eps": "fp32", "partial": FP32}
        | {"gain": FP32},
        {"SPLIT": 3, "BLOCK": 8192},
        {"num_warps": 16},
    ),
    **{
        f"gate_up_swiglu-{columns}-columns{'' if engine else '-unaligned'}": (
            "gate_up_swiglu.gate_up_swiglu_kernel",
            {
                "x": f"tensordesc<bf16[{columns}, {block_k}]>" if engine else BF16,
                "weight": f"tensordesc<bf16[64, {block_k}]>" if engine else BF16,
                "out": BF16,
                "partial": FP32,
                "arrivals": "*i32",
            },
            {
                "w_k": 1,
                "BLOCK_N": 64,
                "BLOCK_K": block_k,
                "COLUMNS": columns,
                "SPLIT": 8,
                "EVEN_K": engine,
                "ENGINE": engine,
                "CUT_FIRST": columns > 16,
            },
            {"num_stages": stages, "num_warps": warps},
        )
        for columns, block_k, engine, stages, warps in (
            (16, 128, True, 3, 4),
            (16, 128, False, 3, 4),
            (32, 128, True, 5, 4),
            (64, 64, True, 3, 4),
            (64, 64, False, 3, 4),
            (128, 128, True, 3, 8),
        )
    },
    **{
        f"gdn_verify-{name}-record{'-tree' if tree else ''}": (
            "gdn_verify.record_kernel",
            {
                **({"ancestors": "*i32"} if tree else {}),
                **dict.fromkeys(("projected", "a", "b", "conv_weight", "conv_history"), BF16),
                **dict.fromkeys(("record_conv", "record_key", "record_value"), BF16),
                **dict.fromkeys(("a_log", "dt_bias", "record_gate", "units"), FP32),
                **dict.fromkeys(("slots", "counts"), INT64),
            },
            {
                **({} if tree else {"ancestors": None}),
                **geometry,
                "VALUES": 1 << (geometry["DV"] - 1).bit_length(),
                "HEADS": 2,
                "GATES": gates,
            },
            {"num_warps": 2, "enable_fp_fusion": False},
        )
        for name, geometry, gates in (
            ("27B", GDN_27B, 64),
            ("35B", GDN_35B, 32),
            ("odd", GDN_ODD, 8),
        )
        for tree in (False, True)
    },
    **{
        f"gdn_verify-{name}{'-tree' if tree else ''}": (
            "gdn_verify.gdn_verify_kernel",
            {
                **({"ancestors": "*i32"} if tree else {}),
                **dict.fromkeys(("record_value", "out"), BF16),
                **dict.fromkeys(("state", "record_gate", "units"), FP32),
                **dict.fromkeys(("slots", "counts"), INT64),
            },
            geometry | ({} if tree else {"ancestors": None}),
            {"num_warps": 1, "enable_fp_fusion": False},
        )
        for name, geometry in (("27B", GDN_27B), ("35B", GDN_35B))
        for tree in (False, True)
    },
    **{
        f"gdn_fold-{name}": (
            "gdn_fold.gdn_fold_kernel",
            {
                **dict.fromkeys(
                    ("record_conv", "record_key", "record_value", "conv_history"), BF16
                ),
                **dict.fromkeys(("record_gate", "state"), FP32),
                **dict.fromkeys(("source_slots", "destination_slots", "counts"), INT64),
            },
            geometry | {"CHANNELS": 256},
            {"num_warps": 1, "enable_fp_fusion": False},
        )
        for name, geometry in (("27B", GDN_27B), ("35B", GDN_35B))
    },
    **{
        f"causal_attention-{name}{'-tree' if tree else ''}{'-tall' if tall else ''}": (
            "causal_attention.attend_kernel",
            {
                **({"ancestors": "*i32"} if tree else {}),
                **dict.fromkeys(("query", "key", "value", "key_pages"), BF16),
                "value_pages": "*fp16",
                **dict.fromkeys(("page_tables", "frontiers", "counts"), INT64),
                **dict.fromkeys(("partial", "statistics"), FP32),
                "scale": "fp32",
            },
            {
                **({} if tree else {"ancestors": None}),
                "HKV": key_heads,
                "GROUP": group,
                "D": 256,
                "COLUMNS": 16 if tree else 8,
                "EVEN": True,
                **RUNS,
                "ROWS": 128 if tall else 64,
                "KEYS": 64,
                "BLOCK": 256,
                "ENDS": 2,
            },
            {"num_warps": 8, "num_stages": 2 if tall else 3, "enable_fp_fusion": False},
        )
        for name, key_heads, group in (("27B", 4, 6), ("35B", 2, 8))
        for tree in (False, True)
        for tall in (False, True)
    },
    **{
        f"causal_attention-combine{'-tree' if tree else ''}": (
            "causal_attention.combine_kernel",
            {
                **({"ancestors": "*i32"} if tree else {}),
                **dict.fromkeys(("partial", "statistics"), FP32),
                **dict.fromkeys(("gate", "out"), BF16),
                **dict.fromkeys(("frontiers", "counts"), INT64),
            },
            {
                **({} if tree else {"ancestors": None}),
                "D": 256,
                **RUNS,
                "RUNS": 16,
                "BLOCK": 256,
            },
            {},
        )
        for tree in (False, True)
    },
    "tree_compact-columns": (
        "tree_compact.columns_kernel",
        {"plane": BF16, "columns": INT64},
        {"BLOCK": 2048},
        {},
    ),
    "tree_compact-pages": (
        "tree_compact.pages_kernel",
        {
            "key_pages": BF16,
            "value_pages": "*fp16",
            **dict.fromkeys(("page_tables", "frontiers", "columns"), INT64),
        },
        {"BLOCK": 1024},
        {},
    ),
    "moe-route": (
        "moe.route_kernel",
        {
            **dict.fromkeys(("x", "shared_gate"), BF16),
            **dict.fromkeys(("scores", "weights", "openness"), FP32),
            "experts": "*i32",
        },
        {"H": 2048, "E": 256, "TOP": 8, "EXPERTS": 256, "RANKS": 8, "BLOCK": 2048},
        {},
    ),
    **{
        f"moe-{name}-{'expert' if by_number else 'pair'}": (
            f"moe.{name}_kernel",
            {**dict.fromkeys(pointers, BF16), "experts": "*i32"},
            constants
            | {
                "H": 2048,
                "ROUTED": 512,
                "SHARED": 512,
                "BY_NUMBER": by_number,
                "BLOCK_N": 64,
                "BLOCK_K": 128,
                "PAIRS": 128,
                "COLUMNS": 16,
            },
            {"num_stages": 3},
        )
        for name, pointers, constants in (
            ("expand", ("x", "gate_up", "shared_gate_up", "hidden"), {"TOP": 8}),
            ("contract", ("hidden", "down", "shared_down", "out"), {}),
        )
        for by_number in (False, True)
    },
    "moe-mix": (
        "moe.mix_kernel",
        {"parts": BF16, "weights": FP32, "openness": FP32, "out": BF16},
        {"TOP": 8, "BLOCK": 1024},
        {},
    ),
}


def built(case):
    """The compiled kernel of a case, its integer arguments multiples of 16."""
    place, types, constants, options = CASES[case]
    op, name = place.split(".")
    kernel = getattr(importlib.import_module(f"kernels.{op}.kernel"), name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    assert not (set(constants) | set(types)) - set(names)
    aligned = [["tt.divisibility", 16]]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={(i,): aligned for i, n in enumerate(names) if signature[n][0] in "*i"},
    )
    return triton.compile(source, target=HOPPER, options=options)


@pytest.mark.parametrize("case", CASES)
def test_compiles_within_shared_memory(case):
    kernel = built(case)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_MEMORY


def sums(case):
    """Shapes and layouts of what a case reduces or multiplies.

    A sum's order follows the layout the compiler gives it: equal bits need equal layouts.
    """
    text = built(case).asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S.*)$", text, flags=re.MULTILINE))
    operands = re.findall(r"\}\) : \(tensor<(\w+), (#.+)>\) ->", text)
    operands += re.findall(r"_dot .*-> tensor<(\w+), (#.+?)>", text)
    return {
        (shape, re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), layout))
        for shape, layout in operands
    }


def arithmetic(case):
    """How often a case has each instruction on FP32, conversions aside."""
    found = re.findall(r"^\s+(?:@\S+ )?(\w\S*\.f32)\s", built(case).asm["ptx"], re.MULTILINE)
    return Counter(name for name in found if not name.startswith("cvt"))


@pytest.mark.parametrize("name", ["27B", "35B", "combine"])
def test_attention_adds_up_trees_as_chains(name):
    chain, tree = f"causal_attention-{name}", f"causal_attention-{name}-tree"
    real = {(shape, layout) for shape, layout in sums(tree) if "f32" in shape}
    assert real == {(shape, layout) for shape, layout in sums(chain) if "f32" in shape}
    # both products, and the scores' greatest and sum
    assert len(real) == 2
    assert arithmetic(tree) == arithmetic(chain)


@pytest.mark.parametrize("case", ["27B", "27B-tree", "35B", "35B-tree"])
def test_attention_adds_up_a_line_alike_in_tiles_of_any_height(case):
    """A warp has all keys of its lines, a thread the same of them; an instruction adds up 16."""
    for rows, name in ((64, f"causal_attention-{case}"), (128, f"causal_attention-{case}-tall")):
        layouts = dict(sums(name))
        scored, added = layouts[f"{rows}x64xf32"], layouts[f"{rows}x256xf32"]
        assert re.search(r"warpsPerCTA = \[\d+, 1\], instrShape = \[16, \d+, 16\]", scored)
        assert re.search(r"warpsPerCTA = \[\d+, [12]\], instrShape = \[16, \d+, 16\]", added)


@pytest.mark.parametrize("name", ["27B", "35B"])
def test_verify_and_fold_sum_in_the_same_order(name):
    # sums of real numbers: over the square of a key, within a thread and over threads
    fold = sums(f"gdn_fold-{name}")
    assert len(fold) == 3
    square = {(shape, layout) for shape, layout in fold if shape == "128xf32"}
    assert sums(f"gdn_verify-{name}") == fold - square
    # a path's columns are found by sums of integers besides
    real = {(shape, layout) for shape, layout in sums(f"gdn_verify-{name}-tree") if "f32" in shape}
    assert real == fold - square
    # the square is summed by one warp in the same order, there one of the program's two
    assert "sizePerThread = [4], threadsPerWarp = [32], warpsPerCTA = [1]" in square.pop()[1]
    for case in (f"gdn_verify-{name}-record", f"gdn_verify-{name}-record-tree"):
        layouts = {layout for shape, layout in sums(case) if shape == "2x128xf32"}
        (layout,) = layouts
        assert "sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [2, 1]" in layout
