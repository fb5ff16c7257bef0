"""Blocks: the same tokens whatever a round proposes, however many rows share it, and twice.

A planted drafter proposes a plain run's own tokens with one wrong at a moving place, so that
accepted counts run through 0..K and every N is folded.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import planted
from kernels.replay import Replays
from outrider.checkpoint import Checkpoint, bundled
from outrider.pair import TargetFacts
from tests.tiny_target import TEXT, Variant, save_target
from verifier.acceptance import SamplingTables
from verifier.blocks import Blocks, most_columns, rounded_up, table_lengths
from verifier.config import TargetConfig
from verifier.features import FeatureRows
from verifier.projection import Projection
from verifier.request import Sampling
from verifier.state import TargetState
from verifier.target import Target
from verifier.trees import depths_of
from verifier.weights import load_weights

WIDTH, LANES, CHUNK, CONTEXT = 8, 8, 64, 1024
NEW_TOKENS = 48


def make_blocks(
    folder: Path,
    taps: tuple[int, ...],
    device: torch.device,
    dtype: torch.dtype,
    trees: dict[int, tuple[int, ...]] | None = None,
) -> Blocks:
    facts = TargetFacts.read(Checkpoint(folder))
    config = TargetConfig.read(facts)
    weights = load_weights(facts, config, dtype=dtype, device=device)
    # of one tap alone, so that the rows are easy to tell
    hidden = config.hidden_size
    selected = torch.zeros(hidden, len(taps) * hidden)
    selected[:, :hidden] = torch.eye(hidden)
    projection = Projection(selected.to(device, dtype), torch.ones(hidden, device=device), 1e-6)
    width = max([WIDTH, *(w for widths in (trees or {}).values() for w in widths)])
    rows = -(-most_columns(rounded_up(LANES), WIDTH, trees or {}) // width)
    state = TargetState(
        config,
        lanes=LANES,
        max_context=CONTEXT,
        width=width,
        dtype=dtype,
        device=device,
        block_rows=rows,
    )
    return Blocks(
        Target(config, weights, state, taps),
        SamplingTables(LANES, config.vocab_size, config.public_vocab, device),
        projection,
        Replays(device),
        lanes=LANES,
        width=WIDTH,
        support=4,
        chunk=CHUNK,
        tree_widths=trees,
    )


def plain_run(blocks: Blocks, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    return planted.plain_run(blocks, prompt, sampling, NEW_TOKENS, CHUNK)


def planted_run(
    blocks: Blocks,
    prompts: Sequence[Sequence[int]],
    foretold: Sequence[Sequence[int]],
    draft_tokens: int,
    sampling: Sampling,
) -> tuple[list[list[int]], set[int]]:
    run = planted.planted_run(blocks, prompts, foretold, draft_tokens, sampling, NEW_TOKENS, CHUNK)
    return run.outputs, run.kept_counts


def resident_of(blocks: Blocks) -> planted.Resident:
    return planted.Resident(blocks, [1, 2, 3], planted.GREEDY, NEW_TOKENS, CHUNK)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Blocks:
    folder = tmp_path_factory.mktemp("target")
    save_target(folder, Variant("dense"))
    trees = dict.fromkeys(range(1, 5), (16,))
    return make_blocks(folder, (0, 2, 3), torch.device("cpu"), torch.float32, trees)


def prompts_of(count: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, vocab, (20 + 37 * i,), generator=generator).tolist() for i in range(count)
    ]


@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
def test_planted_proposals_change_no_greedy_token(tiny: Blocks, draft_tokens: int):
    prompts, greedy = prompts_of(4, TEXT["vocab_size"]), planted.GREEDY
    foretold = [plain_run(tiny, prompt, greedy) for prompt in prompts]
    together, kept = planted_run(tiny, prompts, foretold, draft_tokens, greedy)
    assert together == foretold
    assert kept == set(range(1, draft_tokens + 2))


def branching_run(
    blocks: Blocks,
    prompts: Sequence[Sequence[int]],
    foretold: Sequence[Sequence[int]],
    sampling: Sampling,
) -> planted.Planted:
    return planted.planted_run(
        blocks, prompts, foretold, 7, sampling, NEW_TOKENS, CHUNK, branches=True
    )


def test_branches_change_no_greedy_token(tiny: Blocks):
    prompts, greedy = prompts_of(4, TEXT["vocab_size"]), planted.GREEDY
    foretold = [plain_run(tiny, prompt, greedy) for prompt in prompts]
    run = branching_run(tiny, prompts, foretold, greedy)
    assert run.outputs == foretold
    assert run.moved > 20


def grown(columns: int, *, most: int, seed: int) -> list[int]:
    """Parents of a chain as deep as a block allows, and of columns behind it at random.

    There are fewer columns where only leaves may be continued and all are that deep.
    """
    draw = random.Random(seed)
    parents = list(range(WIDTH - 1))
    while len(parents) + 1 < columns:
        depths = depths_of(parents)
        leaves = set(range(len(depths))) - set(parents)
        open_columns = range(len(depths)) if len(leaves) < most else leaves
        shallow = [c for c in open_columns if depths[c] + 1 < WIDTH]
        if not shallow:
            break
        parents.append(draw.choice(shallow))
    return parents


def compare_paths_with_chains(blocks: Blocks, columns: int, lengths: Sequence[int]) -> float:
    """The greatest difference of a tree's logits from those of chains, path by path.

    Trees of several rows in one block against the chain of each path alone.
    """
    vocab, difference = blocks.tables.public_vocab, 0.0
    draw = random.Random(columns)
    with torch.inference_mode(), blocks.replays.stream():
        prompts = [[draw.randrange(vocab) for _ in range(length)] for length in lengths]
        residents = [planted.Resident(blocks, p, planted.GREEDY, 1, CHUNK) for p in prompts]
        rows = []
        for index, resident in enumerate(residents):
            parents = grown(columns, most=2 + 2 * (index % 4), seed=index)
            tokens = [draw.randrange(vocab) for _ in parents]
            rows.append(replace(resident.row(tokens), parents=tuple(parents)))
        results = blocks.verify(rows).buffers.results
        trees = [plane[: len(rows)].clone() for plane in (results.logits, results.hidden)]
        for index, row in enumerate(rows):
            for leaf in set(range(len(row.token_ids))) - set(row.parents):
                path = [leaf]
                while path[0]:
                    path.insert(0, row.parents[path[0] - 1])
                tokens = tuple(row.token_ids[column] for column in path)
                chain = blocks.verify([replace(row, token_ids=tokens, parents=())])
                results = chain.buffers.results
                for tree, plane in zip(trees, (results.logits, results.hidden), strict=True):
                    gap = tree[index, path].double() - plane[0, : len(path)].double()
                    difference = max(difference, float(gap.abs().max()))
        for resident in residents:
            resident.release()
    return difference


@pytest.mark.parametrize("columns", [12, 16])
def test_a_path_of_a_tree_has_the_logits_of_a_chain(tiny: Blocks, columns: int):
    assert compare_paths_with_chains(tiny, columns, [59, 124, 253]) < 1e-4


def test_the_next_block_takes_the_records_of_the_one_before(tiny: Blocks):
    with torch.inference_mode():
        resident = resident_of(tiny)
        older = tiny.verify([resident.row(())])
        tiny.verify([resident.row(())])
        with pytest.raises(AssertionError):
            tiny.commit(older, [1])
        resident.release()


def test_features_that_were_kept_outlive_the_next_block(tiny: Blocks):
    with torch.inference_mode():
        resident, kept = resident_of(tiny), FeatureRows()
        block = tiny.verify([resident.row((5, 6))])
        features = tiny.features(block, 0, 2)
        before = features.copy()
        kept.append(0, features)
        tiny.verify([resident.row((7, 8))])
        assert not np.array_equal(features, before)
        assert np.array_equal(kept.read(0, 2), before)
        resident.release()


def test_a_committed_block_moves_the_counts_that_penalties_read(tiny: Blocks):
    prompt, penalty = [4, 5, 6], 1e4
    output = plain_run(tiny, prompt, Sampling(temperature=0.0, presence_penalty=penalty))
    assert len(set(output)) == len(output)


def test_table_lengths_grow_up_to_the_whole_table():
    assert table_lengths(16, 64) == [16]
    assert table_lengths(32, 64) == [32]
    assert table_lengths(2048, 64) == [32, 128, 512, 2048]
    assert table_lengths(513, 64) == [32, 128, 512, 513]


@pytest.fixture(scope="module")
def on_device() -> Blocks:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    trees = {1: (12, 16), 2: (16,), 4: (16,), 8: (16,)}
    return make_blocks(bundled("target"), (1, 3, 5), torch.device("cuda"), torch.bfloat16, trees)


def held_out(count: int) -> list[list[int]]:
    path = bundled("target").parent.parent / "prompts.json"
    return [p["token_ids"] for p in json.loads(path.read_text())["prompts"][:count]]


@pytest.mark.gpu
@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
def test_on_a_device_bfloat16_tokens_depend_on_no_neighbour(on_device: Blocks, draft_tokens: int):
    prompts, greedy = held_out(8), planted.GREEDY
    foretold = [plain_run(on_device, prompt, greedy) for prompt in prompts]
    assert [plain_run(on_device, prompt, greedy) for prompt in prompts[:2]] == foretold[:2]
    together, kept = planted_run(on_device, prompts, foretold, draft_tokens, greedy)
    assert together == foretold
    assert kept == set(range(1, draft_tokens + 2))
    alone, _ = planted_run(on_device, prompts[:1], foretold[:1], draft_tokens, greedy)
    assert alone == foretold[:1]


@pytest.mark.gpu
def test_on_a_device_seeded_samples_depend_on_no_neighbour(on_device: Blocks):
    prompts, sampling = held_out(8), Sampling(temperature=0.8, top_p=0.95, seed=11, seed_given=True)
    foretold = [plain_run(on_device, prompt, sampling) for prompt in prompts]
    together, _ = planted_run(on_device, prompts, foretold, 7, sampling)
    # the first row's errors are planted at the same places alone
    alone, _ = planted_run(on_device, prompts[:1], foretold[:1], 7, sampling)
    assert alone[0] == together[0]


@pytest.mark.gpu
def test_on_a_device_branches_change_no_token_of_anybody(on_device: Blocks):
    prompts, greedy = held_out(8), planted.GREEDY
    foretold = [plain_run(on_device, prompt, greedy) for prompt in prompts]
    together = branching_run(on_device, prompts, foretold, greedy)
    assert together.outputs == foretold
    assert together.moved > 50
    for count in (1, 2):
        alone = branching_run(on_device, prompts[:count], foretold[:count], greedy)
        assert alone.outputs == foretold[:count]
        assert alone.moved > 5


@pytest.mark.gpu
def test_on_a_device_seeded_branches_depend_on_no_neighbour(on_device: Blocks):
    prompts, sampling = held_out(8), Sampling(temperature=0.8, top_p=0.95, seed=11, seed_given=True)
    foretold = [plain_run(on_device, prompt, sampling) for prompt in prompts]
    together = branching_run(on_device, prompts, foretold, sampling)
    # the first row's errors and branches are planted at the same places alone
    alone = branching_run(on_device, prompts[:1], foretold[:1], sampling)
    assert alone.outputs[0] == together.outputs[0]


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [12, 16])
@pytest.mark.parametrize(
    "lengths", [[61], [59, 124, 253], [3, 60, 64, 126, 250, 255, 257, 510]], ids=str
)
def test_on_a_device_a_path_of_a_tree_has_the_bits_of_a_chain(
    on_device: Blocks, columns: int, lengths: list[int]
):
    assert compare_paths_with_chains(on_device, columns, lengths) == 0.0


@pytest.mark.gpu
def test_on_a_device_chains_have_the_graphs_they_had(on_device: Blocks):
    """A round without a tree is not as wide as one with."""
    with torch.inference_mode(), on_device.replays.stream():
        resident = resident_of(on_device)
        assert on_device.verify([resident.row((5, 6))]).buffers.width == WIDTH
        on_device.replays.wait()
        resident.release()
