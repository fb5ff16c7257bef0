"""Kernels of drafting and sampling compile for sm_90 at the official constants."""

import importlib
import re

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

HOPPER = GPUTarget("cuda", 90, 32)
SHARED_MEMORY = 227 * 1024
BF16, FP16, FP32, INT32, INT64 = "*bf16", "*fp16", "*fp32", "*i32", "*i64"
SCALARS = {"eps": "fp32", "scale": "fp32", "multiplier": "fp32", "softcap": "fp32"}
PRODUCTS = {"PRECISION": "tf32", "BLOCK_V": 64, "BLOCK_K": 128}
ATTENTION = {"PRECISION": "tf32", "SPLIT": 256, "BLOCK_N": 64, "TILE": 16, "BLOCK_D": 128}
VOCABULARY = {"CHUNKS": 64, "PASS": 8192}


def pointers(**kinds):
    """Types by argument name, given as names by type."""
    return {name: kind for kind, names in kinds.items() for name in names.split()}


def typed(bf16="", fp16="", fp32="", int32="", int64="", flags=""):
    return pointers(
        **{BF16: bf16, FP16: fp16, FP32: fp32, INT32: int32, INT64: int64, "*i1": flags}
    )


SPLIT = typed(
    bf16="query block_key block_value keys",
    fp16="values",
    fp32="partial extremes",
    int64="places coverage_first frontiers counts",
)
CASES = {
    "rng": (
        "rng._uniform_kernel",
        typed(int64="seeds positions purpose sub", fp32="out"),
        {"POSITIONS_VARY": True, "PURPOSE_VARIES": True, "SUB_VARIES": True, "BLOCK": 256},
        {},
    ),
    **{
        f"products-{rows}": (
            "linear_topk._products_kernel",
            typed(bf16="hidden head", fp32="scores", int64="token_ids tile_keys"),
            PRODUCTS | {"BLOCK_M": rows, "INDEXED": False},
            {"num_stages": 4},
        )
        for rows in (16, 64)
    },
    **{
        f"rank-{'indexed' if indexed else 'full'}": (
            "linear_topk._rank_kernel",
            typed(fp32="products scores", int64="token_ids tile_keys ids"),
            {"INDEXED": indexed, "CAPPED": indexed, "K": 16, "TILES": tiles, "BLOCK_V": 64},
            {"num_warps": 8},
        )
        for indexed, tiles in ((False, 4096), (True, 64))
    },
    "best_rows": (
        "linear_argmax._best_rows_kernel",
        typed(bf16="hidden head", int64="token_ids keys"),
        PRODUCTS | {"INDEXED": True, "BLOCK_M": 16},
        {"num_stages": 4},
    ),
    "best_of_tiles": (
        "linear_argmax._best_of_tiles_kernel",
        typed(int64="keys token_ids ids"),
        {"INDEXED": True, "BLOCK": 1024},
        {},
    ),
    **{
        f"attention-{'pages' if paged else 'ring'}": (
            "sliding_window_attention._split_kernel",
            SPLIT,
            ATTENTION | {"PAGED": paged, "CAUSAL": paged},
            {"num_stages": 2},
        )
        for paged in (False, True)
    },
    "attention-join": (
        "sliding_window_attention._join_kernel",
        typed(bf16="out", fp32="partial extremes", int64="coverage_first frontiers counts"),
        {"PAGED": False, "SPLIT": 256, "JOIN": 16, "TILE": 16, "BLOCK_D": 128},
        {},
    ),
    "materialize": (
        "context_kv_materialize._materialize_kernel",
        typed(
            bf16="context weight keys",
            fp16="values",
            fp32="gain rates",
            int64="positions destinations",
        ),
        {"PRECISION": "tf32", "BLOCK_M": 16, "BLOCK_K": 128, "HALF": 64},
        {"num_stages": 3},
    ),
    "conv-norm": (
        "dynamic_grouped_conv._norm_kernel",
        typed(bf16="x upper rest", fp32="gain inverses"),
        {"WIDE": False, "BLOCK": 8192},
        {"num_warps": 16},
    ),
    "conv-delta": (
        "dynamic_grouped_conv._delta_kernel",
        typed(bf16="upper rest projection", fp32="partial"),
        {"WIDE": False, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 128},
        {"num_stages": 4},
    ),
    "conv-prepare": (
        "dynamic_grouped_conv._prepare_kernel",
        typed(bf16="x base prepared finish_delta", fp32="gain inverses partial"),
        {"TAPS": 2, "RANGES": 5, "BLOCK": 512},
        {},
    ),
    "conv-finish": (
        "dynamic_grouped_conv._finish_kernel",
        typed(bf16="z base deltas residual out"),
        {"TAPS": 2, "BLOCK": 512},
        {},
    ),
    "cast": (
        "cast_together._cast_kernel",
        {"sources": (INT64, "*i1", INT64, FP32, INT64, INT64)}
        | {"destinations": (INT32, "*i1", INT32, FP32, INT32, INT32), "counts": ("i32",) * 6},
        {"TILES": (1,) * 6, "BLOCK": 1024},
        {},
    ),
    "finite": (
        "rows_finite._rows_finite_kernel",
        {"finite": "*i1", "words": INT32}
        | {"counts": (INT64,) * 4, "values": (BF16, FP32, BF16, FP32)}
        | {"strides": (("i32", "i32"),) * 4, "widths": ("i32",) * 4},
        {"TILES": (5, 1, 1, 1), "LINES": (8,) * 4, "BLOCKS": (1024, 16, 256, 16)},
        {"num_warps": 8},
    ),
    "selector": (
        "candidate_selector._walk_kernel",
        typed(
            bf16="projected predecessor successor",
            fp32="scores temperatures probabilities",
            int64="ids anchors seeds frontiers tokens",
        ),
        {"BLOCK_C": 16, "BLOCK_R": 256},
        {},
    ),
    "tree": (
        "candidate_tree._grow_kernel",
        typed(
            bf16="projected predecessor successor",
            fp32="scores temperatures probabilities",
            int64="ids anchors seeds frontiers nodes paths tokens parents depths counts "
            "candidate_ids",
        ),
        {"NODES": 32, "BLOCK_C": 16, "BLOCK_R": 256},
        {},
    ),
    **{
        f"distribution-process{'-tree' if tree else ''}": (
            "target_distribution._process_kernel",
            typed(
                fp32="logits temperatures presences frequencies repetitions logit_bias p",
                int32="generated_counts faults" + tree * " ancestors",
                int64="proposals counts min_tokens output_index lanes tile_keys",
                flags="prompt_seen stop_mask",
            ),
            {"CHUNK": 4096, "TILE": 64} | ({} if tree else {"ancestors": None}),
            {"num_warps": 8},
        )
        for tree in (False, True)
    },
    "distribution-cut": (
        "target_distribution._cut_kernel",
        typed(
            fp32="p temperatures top_ps min_ps levels",
            int32="faults",
            int64="counts top_ks tile_keys cuts",
        ),
        VOCABULARY | {"TILES": 4096, "TILE": 64, "RANKED": 32},
        {"num_warps": 16},
    ),
    "distribution-divide": (
        "target_distribution._divide_kernel",
        typed(fp32="p temperatures min_ps levels", int64="counts cuts"),
        {"CHUNK": 4096},
        {"num_warps": 8},
    ),
    "accept": (
        "speculative_accept._accept_kernel",
        typed(
            fp32="p candidate_probabilities weights masses",
            int32="amounts",
            int64="proposals live candidate_ids seeds frontiers accepted tile_keys",
        ),
        {"DRAFTS": 8, "CANDIDATES": 16, "CHUNK": 4096, "TILE": 64},
        {"num_warps": 8},
    ),
    "accept-draw": (
        "speculative_accept._draw_kernel",
        typed(
            fp32="p weights masses",
            int32="amounts",
            int64="proposals live seeds frontiers accepted tile_keys tokens",
        ),
        VOCABULARY | {"WIDTH": 8, "TILES": 4096, "TILE": 64, "RANKED": 32},
        {"num_warps": 16},
    ),
    "tree-accept-outside": (
        "tree_accept._outside_kernel",
        typed(fp32="p outside", int32="ancestors", int64="live candidate_ids"),
        {"CHUNK": 4096},
        {"num_warps": 8},
    ),
    "tree-accept-walk": (
        "tree_accept._walk_kernel",
        typed(
            fp32="p candidate_probabilities outside weights masses",
            int32="ancestors rejected amounts",
            int64="proposals live candidate_ids seeds frontiers accepted columns tile_keys",
        ),
        {"CANDIDATES": 16, "CHUNKS": 64, "CHUNK": 4096, "TILE": 64},
        {"num_warps": 8},
    ),
    "tree-accept-terminal": (
        "tree_accept._terminal_kernel",
        typed(
            fp32="p weights masses",
            int32="rejected amounts",
            int64="proposals seeds frontiers accepted columns tile_keys tokens",
        ),
        VOCABULARY | {"TILES": 4096, "TILE": 64, "RANKED": 32},
        {"num_warps": 16},
    ),
    "logprobs-chunk_keys": (
        "token_logprobs._chunk_keys_kernel",
        typed(fp32="scores", int64="keys"),
        {"K": 32, "CHUNK": 1024},
        {},
    ),
    "logprobs-merge_keys": (
        "token_logprobs._merge_keys_kernel",
        typed(int64="source keys"),
        {"K": 32, "CHUNK": 1024},
        {},
    ),
    "logprobs-mass": (
        "token_logprobs._chunk_mass_kernel",
        typed(fp32="logits peaks masses"),
        {"CHUNK": 4096},
        {"num_warps": 8},
    ),
    "logprobs": (
        "token_logprobs._logprob_kernel",
        typed(
            fp32="logits peaks masses logprob top_logprobs",
            int64="tokens keys top_ids",
        ),
        {"CHUNKS": 64, "K": 32},
        {"num_warps": 1},
    ),
}


def built(case):
    """The compiled kernel of a case."""
    place, types, constants, options = CASES[case]
    op, name = place.split(".")
    kernel = getattr(importlib.import_module(f"kernels.{op}.kernel"), name)
    names = kernel.arg_names
    assert not (set(constants) | set(types)) - set(names)
    types = {name: SCALARS[name] for name in names if name in SCALARS} | types
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(
        kernel,
        signature,
        constexprs={(names.index(n),): value for n, value in constants.items()},
        attrs={
            (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if signature[n][0] == "*"
        },
    )
    return triton.compile(source, target=HOPPER, options=options)


@pytest.mark.parametrize("case", CASES)
def test_compiles_within_shared_memory(case):
    kernel = built(case)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= SHARED_MEMORY


def test_tree_and_selector_sum_in_the_same_order():
    """A sum's order follows the layout the compiler gives it; equal bits need equal layouts."""

    def sums(case):
        text = built(case).asm["ttgir"]
        layouts = dict(re.findall(r"^(#\w+) = (#ttg\.\S.*)$", text, flags=re.MULTILINE))
        operands = re.findall(r"\}\) : \(tensor<(\w+), (#ttg\.slice<[^>]*>|#\w+)>\) ->", text)
        return {
            (shape, re.sub(r"#(?!ttg)\w+", lambda found: layouts[found[0]], layout))
            for shape, layout in operands
            if "f32" in shape
        }

    assert len(sums("selector")) >= 2
    assert sums("selector") <= sums("tree")
