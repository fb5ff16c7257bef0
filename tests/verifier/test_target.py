"""The target against transformers in FP32, through every way that a token can be processed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny_target import (
    TEXT,
    OracleRun,
    Variant,
    load_oracle,
    load_target,
    run_oracle,
    save_target,
)
from verifier.state import Residency, StateRows
from verifier.target import Forward, Target

TAPS = (3, 0, 2)  # the last block first: recorded order is concatenation order
TOLERANCE = 5e-5
LENGTH = 150
WIDTH = 8

VARIANTS = (
    Variant("dense"),
    Variant("one-value-head-a-key-head", text=(("linear_num_value_heads", 2),)),
    Variant("three-value-heads-a-key-head", text=(("linear_num_value_heads", 6),)),
    Variant("tied", text=(("tie_word_embeddings", True),)),
    Variant("multimodal", vision=True, text=(("num_key_value_heads", 1),)),
    Variant("mixture", mixture=True),
    Variant("multimodal-mixture-fused", mixture=True, vision=True, fused=True),
    Variant(
        "other-layout",
        text=(
            ("layer_types", ["full_attention", "linear_attention"] * 2),
            ("linear_value_head_dim", 24),
            ("rms_norm_eps", 1e-5),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}),
        ),
    ),
)


@dataclass(frozen=True)
class Pair:
    """A model, the folder it came from, and one sequence through it."""

    folder: Path
    oracle: nn.Module
    token_ids: Tensor  # [LENGTH]
    run: OracleRun


@pytest.fixture(scope="module", params=VARIANTS, ids=lambda v: v.name)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp(request.param.name), request.param)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return make_pair(tmp_path_factory.mktemp("dense"), VARIANTS[0])


def make_pair(folder: Path, variant: Variant) -> Pair:
    save_target(folder, variant)
    oracle = load_oracle(folder)
    token_ids = draw(LENGTH, seed=7)
    return Pair(folder, oracle, token_ids, run_oracle(oracle, token_ids))


def draw(count: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, TEXT["vocab_size"], (count,), generator=generator)


def assert_near(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    assert actual.shape == expected.shape
    assert (actual - expected).abs().max() <= TOLERANCE


def acquire(target: Target, positions: int = 400) -> Residency:
    residency = target.state.acquire(positions)
    assert residency is not None
    return residency


def rows_of(*residencies: Residency) -> StateRows:
    return StateRows.of(residencies, torch.device("cpu"))


def verify_one(
    target: Target, residency: Residency, token_ids: Tensor, frontier: int, width: int | None = None
) -> Forward:
    """A block of one row; columns beyond the tokens are dead."""
    live = len(token_ids)
    columns = torch.zeros(1, width or live, dtype=torch.int64)
    columns[0, :live] = token_ids
    return target.verify(
        rows_of(residency), columns, torch.tensor([frontier]), torch.tensor([live])
    )


# ---- prefill -------------------------------------------------------------------------------------


def test_one_prefill_gives_the_logits_and_features_of_transformers(pair: Pair):
    target = load_target(pair.folder, taps=TAPS)
    forward = target.prefill(acquire(target), pair.token_ids, 0, want_logits=True)
    assert_near(forward.logits, pair.run.logits[None, -1:])
    assert_near(forward.features, pair.run.features(TAPS)[None])


@pytest.mark.parametrize("page_size", [64, 16])
def test_prefill_in_odd_chunks_equals_one_pass(pair: Pair, page_size: int):
    target = load_target(pair.folder, taps=TAPS, page_size=page_size)
    residency = acquire(target)
    first = 0
    for count in (1, 63, 2, 64, 17, 3):
        end = first + count
        forward = target.prefill(residency, pair.token_ids[first:end], first, want_logits=True)
        assert_near(forward.logits, pair.run.logits[None, end - 1 : end])
        assert_near(forward.features, pair.run.features(TAPS)[None, first:end])
        first = end
    assert first == LENGTH


def test_logits_are_made_only_when_wanted(dense: Pair):
    target = load_target(dense.folder)
    forward = target.prefill(acquire(target), dense.token_ids, 0, want_logits=False)
    assert forward.logits is None


# ---- decoding ------------------------------------------------------------------------------------


def test_token_by_token_equals_one_pass(pair: Pair):
    target = load_target(pair.folder, taps=TAPS)
    residency = acquire(target)
    # the first columns have no history at all
    for position in range(70):
        forward = verify_one(target, residency, pair.token_ids[position : position + 1], position)
        assert_near(forward.logits, pair.run.logits[None, position : position + 1])
        assert_near(forward.features, pair.run.features(TAPS)[None, position : position + 1])
        target.commit(rows_of(residency), forward, torch.tensor([1]))


# accepted drafts by round, K = 7, then a plain round
ACCEPTED = (3, 0, 7, 1)


def test_partial_accepts_leave_the_state_of_a_token_by_token_run(pair: Pair):
    target = load_target(pair.folder, taps=TAPS, lanes=2)
    residency, sequential = acquire(target, 200), acquire(target, 200)
    prompt = 90
    for resident in (residency, sequential):
        target.prefill(resident, pair.token_ids[:prompt], 0, want_logits=False)
    frontier = prompt
    for accepted in (*ACCEPTED, None):
        width = 1 if accepted is None else WIDTH
        kept = 1 if accepted is None else accepted + 1
        # columns past the accepted ones hold what the target did not choose
        block = draw(width, seed=frontier)
        block[:kept] = pair.token_ids[frontier : frontier + kept]
        forward = verify_one(target, residency, block, frontier)
        assert forward.logits is not None
        assert_near(forward.logits[0, :kept], pair.run.logits[frontier : frontier + kept])
        expected = pair.run.features(TAPS)[frontier : frontier + kept]
        assert_near(forward.features[0, :kept], expected)
        target.commit(rows_of(residency), forward, torch.tensor([kept]))
        for position in range(frontier, frontier + kept):
            step = verify_one(target, sequential, pair.token_ids[position : position + 1], position)
            target.commit(rows_of(sequential), step, torch.tensor([1]))
        frontier += kept
        assert_same_state(target, residency, sequential)
    for position in range(frontier, frontier + 10):
        forward = verify_one(target, residency, pair.token_ids[position : position + 1], position)
        assert_near(forward.logits, pair.run.logits[None, position : position + 1])
        target.commit(rows_of(residency), forward, torch.tensor([1]))


def assert_same_state(target: Target, one: Residency, other: Residency) -> None:
    state = target.state
    assert_near(state.gdn[:, one.state_slot], state.gdn[:, other.state_slot])
    assert_near(state.conv_history[:, one.state_slot], state.conv_history[:, other.state_slot])
    assert_near(state.continuation[one.lane], state.continuation[other.lane])


def test_a_rollback_far_into_a_sequence_feeds_the_upper_blocks_what_verify_saw(dense: Pair):
    token_ids = draw(220, seed=11)
    run = run_oracle(dense.oracle, token_ids)
    # block 2 feeds the attention block above it
    target = load_target(dense.folder, taps=(2,))
    residency = acquire(target)
    target.prefill(residency, token_ids[:200], 0, want_logits=False)
    block = draw(WIDTH, seed=1)
    block[:3] = token_ids[200:203]
    forward = verify_one(target, residency, block, 200)
    target.commit(rows_of(residency), forward, torch.tensor([3]))
    assert_near(forward.features[0, :3], run.residuals[2, 200:203])
    for position in range(203, 210):
        step = verify_one(target, residency, token_ids[position : position + 1], position)
        assert_near(step.features[0], run.residuals[2, position : position + 1])
        target.commit(rows_of(residency), step, torch.tensor([1]))


def test_rows_of_a_block_stand_at_their_own_frontiers(pair: Pair):
    target = load_target(pair.folder, taps=TAPS, lanes=4, page_size=16)
    residencies = [acquire(target, 160) for _ in range(4)]
    starts, live = (3, 64, 100, 130), (8, 1, 5, 0)
    for residency, start in zip(residencies, starts, strict=True):
        target.prefill(residency, pair.token_ids[:start], 0, want_logits=False)
    order = (2, 0, 3, 1)  # a batch row is no lane
    before = target.state.gdn.clone(), target.state.conv_history.clone()
    columns = draw(4 * WIDTH, seed=3).view(4, WIDTH)
    for row, index in enumerate(order):
        columns[row, : live[index]] = pair.token_ids[starts[index] :][: live[index]]
    forward = target.verify(
        rows_of(*(residencies[index] for index in order)),
        columns,
        torch.tensor([starts[index] for index in order]),
        torch.tensor([live[index] for index in order]),
    )
    assert torch.equal(target.state.gdn, before[0]), "verify moves no state"
    assert torch.equal(target.state.conv_history, before[1])
    assert forward.logits is not None
    for row, index in enumerate(order):
        span = slice(starts[index], starts[index] + live[index])
        if live[index]:
            assert_near(forward.logits[row, : live[index]], pair.run.logits[span])
            assert_near(forward.features[row, : live[index]], pair.run.features(TAPS)[span])

    kept = (4, 1, 0, 0)  # of residency 0, 1, 2, 3
    continuation = target.state.continuation.clone()
    target.commit(
        rows_of(*(residencies[index] for index in order)),
        forward,
        torch.tensor([kept[index] for index in order]),
    )
    for index in (2, 3):
        slot, lane = residencies[index].state_slot, residencies[index].lane
        assert torch.equal(target.state.gdn[:, slot], before[0][:, slot])
        assert torch.equal(target.state.conv_history[:, slot], before[1][:, slot])
        assert torch.equal(target.state.continuation[lane], continuation[lane])
    for index in range(4):
        frontier = starts[index] + kept[index]
        step = verify_one(
            target, residencies[index], pair.token_ids[frontier : frontier + 1], frontier, WIDTH
        )
        assert step.logits is not None
        assert_near(step.logits[0, :1], pair.run.logits[frontier : frontier + 1])


@pytest.mark.parametrize("kept", [1, 3, 8])
def test_the_continuation_hidden_is_that_of_the_last_kept_column(dense: Pair, kept: int):
    target = load_target(dense.folder)
    residency = acquire(target)
    target.prefill(residency, dense.token_ids[:60], 0, want_logits=False)
    head = target.weights.head
    assert_near(target.state.continuation[residency.lane] @ head.T, dense.run.logits[59])
    forward = verify_one(target, residency, dense.token_ids[60:68], 60)
    target.commit(rows_of(residency), forward, torch.tensor([kept]))
    assert_near(target.state.continuation[residency.lane] @ head.T, dense.run.logits[59 + kept])


def test_a_plain_step_is_a_block_of_one_column(dense: Pair):
    target = load_target(dense.folder)
    residency = acquire(target)
    target.prefill(residency, dense.token_ids[:60], 0, want_logits=False)
    plain = verify_one(target, residency, dense.token_ids[60:61], 60)
    block = verify_one(target, residency, dense.token_ids[60:61], 60, WIDTH)
    assert plain.logits is not None
    assert block.logits is not None
    assert_near(block.logits[:, :1], plain.logits)


def test_a_block_verified_twice_commits_as_once(dense: Pair):
    target = load_target(dense.folder)
    residency = acquire(target)
    target.prefill(residency, dense.token_ids[:60], 0, want_logits=False)
    verify_one(target, residency, draw(WIDTH, seed=5), 60)
    forward = verify_one(target, residency, dense.token_ids[60:64], 60)
    target.commit(rows_of(residency), forward, torch.tensor([4]))
    step = verify_one(target, residency, dense.token_ids[64:65], 64)
    assert_near(step.logits, dense.run.logits[None, 64:65])


def test_old_bytes_of_a_lane_reach_nobody(dense: Pair):
    target = load_target(dense.folder, taps=TAPS, lanes=1, page_size=16)
    state = target.state
    for plane in (*state.records, state.key_pages, state.value_pages, state.gdn):
        plane.fill_(torch.nan)
    state.conv_history.fill_(torch.nan)
    state.continuation.fill_(torch.nan)
    residency = acquire(target, 160)
    forward = target.prefill(residency, dense.token_ids[:70], 0, want_logits=True)
    assert_near(forward.logits, dense.run.logits[None, 69:70])
    for plane in state.records:
        plane.fill_(torch.nan)
    block = verify_one(target, residency, dense.token_ids[70:73], 70, WIDTH)
    assert block.logits is not None
    assert_near(block.logits[0, :3], dense.run.logits[70:73])
    target.commit(rows_of(residency), block, torch.tensor([2]))
    step = verify_one(target, residency, dense.token_ids[72:73], 72)
    assert_near(step.logits, dense.run.logits[None, 72:73])


# ---- greedy text ---------------------------------------------------------------------------------


@pytest.mark.parametrize("corrupt_each", [2, 5, 10**9], ids=["often", "seldom", "never"])
def test_greedy_rounds_give_the_text_of_transformers_generate(pair: Pair, corrupt_each: int):
    new_tokens = 40
    prompt = pair.token_ids[:37]
    with torch.inference_mode():
        wanted = pair.oracle.generate(
            prompt[None],
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=new_tokens,
            do_sample=False,
        )[0, len(prompt) :]
    target = load_target(pair.folder)
    residency = acquire(target)
    forward = target.prefill(residency, prompt, 0, want_logits=True)
    assert forward.logits is not None
    text = [int(forward.logits[0, -1].argmax())]
    frontier = len(prompt)
    while len(text) < new_tokens:
        # drafts that look ahead in the wanted text, now and then wrong
        drafts = wanted[len(text) : len(text) + WIDTH - 1].clone()
        for index in range(len(drafts)):
            if (frontier + index) % corrupt_each == corrupt_each - 1:
                drafts[index] = (drafts[index] + 1) % TEXT["vocab_size"]
        block = torch.cat([torch.tensor(text[-1:]), drafts])
        forward = verify_one(target, residency, block, frontier, WIDTH)
        assert forward.logits is not None
        chosen = forward.logits[0, : len(block)].argmax(-1)
        accepted = int((chosen[:-1] == drafts).cumprod(0).sum())
        text += chosen[: accepted + 1].tolist()
        target.commit(rows_of(residency), forward, torch.tensor([accepted + 1]))
        frontier += accepted + 1
    assert text[:new_tokens] == wanted.tolist()


# ---- taps ----------------------------------------------------------------------------------------


def write_counting_target(folder: Path) -> None:
    """A target whose block l adds l to channel 0 of the residual and leaves the rest at zero.

    A vector with one positive entry is normed to sqrt(H) there whatever its size, so gate and up
    are constants: SiLU(30) = 30 times l / 30.
    """
    hidden, blocks = TEXT["hidden_size"], TEXT["num_hidden_layers"]
    save_target(folder, Variant("counting"))
    text = json.loads((folder / "config.json").read_text())
    tensors = {
        "model.embed_tokens.weight": torch.zeros(TEXT["vocab_size"], hidden),
        "model.norm.weight": torch.zeros(hidden),
        "lm_head.weight": torch.zeros(TEXT["vocab_size"], hidden),
    }
    tensors["model.embed_tokens.weight"][:, 0] = 2.0
    for block in range(blocks):
        at = f"model.layers.{block}."
        mixer = "linear_attn" if text["layer_types"][block] == "linear_attention" else "self_attn"
        gate, up, down = torch.zeros(96, hidden), torch.zeros(96, hidden), torch.zeros(hidden, 96)
        gate[0, 0], up[0, 0], down[0, 0] = 30 / hidden**0.5, block / 30 / hidden**0.5, 1.0
        tensors |= {
            f"{at}input_layernorm.weight": torch.zeros(hidden),
            f"{at}post_attention_layernorm.weight": torch.zeros(hidden),
            f"{at}mlp.gate_proj.weight": gate,
            f"{at}mlp.up_proj.weight": up,
            f"{at}mlp.down_proj.weight": down,
        }
        if mixer == "linear_attn":
            tensors |= {
                f"{at}linear_attn.in_proj_qkv.weight": torch.zeros(128, hidden),
                f"{at}linear_attn.in_proj_z.weight": torch.zeros(64, hidden),
                f"{at}linear_attn.in_proj_a.weight": torch.zeros(4, hidden),
                f"{at}linear_attn.in_proj_b.weight": torch.zeros(4, hidden),
                f"{at}linear_attn.conv1d.weight": torch.zeros(128, 1, 4),
                f"{at}linear_attn.A_log": torch.zeros(4),
                f"{at}linear_attn.dt_bias": torch.zeros(4),
                f"{at}linear_attn.norm.weight": torch.ones(16),
                f"{at}linear_attn.out_proj.weight": torch.zeros(hidden, 64),
            }
        else:
            tensors |= {
                f"{at}self_attn.q_proj.weight": torch.zeros(256, hidden),
                f"{at}self_attn.k_proj.weight": torch.zeros(64, hidden),
                f"{at}self_attn.v_proj.weight": torch.zeros(64, hidden),
                f"{at}self_attn.q_norm.weight": torch.zeros(32),
                f"{at}self_attn.k_norm.weight": torch.zeros(32),
                f"{at}self_attn.o_proj.weight": torch.zeros(hidden, 128),
            }
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("taps", [(0, 1, 2), (3,), (2, 0, 3)], ids=str)
def test_features_are_block_outputs_by_zero_based_id(tmp_path: Path, taps: tuple[int, ...]):
    write_counting_target(tmp_path)
    target = load_target(tmp_path, taps=taps)
    residency = acquire(target)
    hidden = TEXT["hidden_size"]
    expected = torch.zeros(len(taps), hidden)
    expected[:, 0] = torch.tensor([2.0 + sum(range(block + 1)) for block in taps])
    prefilled = target.prefill(residency, draw(5, seed=1), 0, want_logits=False)
    verified = verify_one(target, residency, draw(3, seed=2), 5)
    for features in (prefilled.features[0], verified.features[0]):
        for row in features.view(-1, len(taps), hidden):
            assert (row - expected).abs().max() < 1e-4


@pytest.mark.parametrize("taps", [(), (4,), (-1,)], ids=str)
def test_taps_outside_the_target_are_refused(dense: Pair, taps: tuple[int, ...]):
    with pytest.raises(ValueError, match="target_layer_ids: expected"):
        load_target(dense.folder, taps=taps)


# ---- numeric profiles and speed ------------------------------------------------------------------


@pytest.mark.parametrize("variant", [VARIANTS[0], VARIANTS[5]], ids=lambda v: v.name)
def test_the_bfloat16_profile_is_no_further_from_float32_than_transformers(
    tmp_path: Path, variant: Variant
):
    save_target(tmp_path, variant)
    path = tmp_path / "model.safetensors"
    stored = {name: tensor.bfloat16() for name, tensor in load_file(path).items()}
    save_file(stored, path, {"format": "pt"})
    oracle, token_ids = load_oracle(tmp_path), draw(LENGTH, seed=7)
    expected = run_oracle(oracle, token_ids).logits
    theirs = run_oracle(oracle.bfloat16(), token_ids).logits.float()

    target = load_target(tmp_path, taps=TAPS, dtype=torch.bfloat16)
    assert target.state.key_pages.dtype == torch.bfloat16
    assert target.state.value_pages.dtype == torch.float16
    residency = acquire(target)
    ours: list[Tensor] = []
    for first in range(0, LENGTH, WIDTH):
        block = token_ids[first : first + WIDTH]
        forward = verify_one(target, residency, block, first)
        target.commit(rows_of(residency), forward, torch.tensor([len(block)]))
        assert forward.logits is not None
        assert forward.logits.dtype == torch.bfloat16
        assert forward.features.dtype == torch.bfloat16
        ours.append(forward.logits[0].float())
    assert (torch.cat(ours) - expected).norm() <= (theirs - expected).norm()
