"""Blocks: the same tokens whatever a round proposes, however many rows share it, and twice.

A planted drafter proposes a plain run's own tokens with one wrong at a moving place, so that
accepted counts run through 0..K and every N is folded.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.replay import Replays
from outrider.checkpoint import Checkpoint, bundled
from outrider.pair import TargetFacts
from tests.tiny_target import TEXT, Variant, save_target
from verifier.acceptance import SamplingTables
from verifier.blocks import BlockRow, Blocks, rounded_up, table_lengths
from verifier.config import TargetConfig
from verifier.request import Request, Sampling
from verifier.state import TargetState
from verifier.target import Target
from verifier.weights import load_weights

WIDTH, LANES, CHUNK, CONTEXT = 8, 8, 64, 1024
NEW_TOKENS = 48


def make_blocks(
    folder: Path, taps: tuple[int, ...], device: torch.device, dtype: torch.dtype
) -> Blocks:
    facts = TargetFacts.read(Checkpoint(folder))
    config = TargetConfig.read(facts)
    weights = load_weights(facts, config, dtype=dtype, device=device)
    rows = rounded_up(LANES)
    state = TargetState(
        config,
        lanes=LANES,
        max_context=CONTEXT,
        width=WIDTH,
        dtype=dtype,
        device=device,
        block_rows=rows,
    )
    return Blocks(
        Target(config, weights, state, taps),
        SamplingTables(LANES, config.vocab_size, config.public_vocab, device),
        Replays(device),
        lanes=LANES,
        width=WIDTH,
        support=4,
        chunk=CHUNK,
    )


class Resident:
    """One sequence, decoded by hand."""

    def __init__(self, blocks: Blocks, prompt: Sequence[int], sampling: Sampling) -> None:
        self.blocks = blocks
        self.prompt = tuple(prompt)
        residency = blocks.target.state.acquire(len(prompt) + NEW_TOKENS + WIDTH)
        assert residency is not None
        self.residency = residency
        request = Request(
            "r",
            0,
            self.prompt,
            sampling,
            NEW_TOKENS,
            0,
            (),
            frozenset(),
            None,
            WIDTH - 1,
            False,
            0,
            None,
        )
        blocks.tables.admit(residency.lane, request)
        for first in range(0, len(prompt), CHUNK):
            end = min(len(prompt), first + CHUNK)
            block, _ = blocks.prefill(
                residency, prompt[first:end], first, last=end == len(prompt), features_from=None
            )
        assert block is not None
        (licensed,) = blocks.accept(block, [None])
        blocks.commit(block, [1])
        self.output = list(licensed.token_ids)

    @property
    def done(self) -> bool:
        return len(self.output) >= NEW_TOKENS

    def row(self, proposals: Sequence[int]) -> BlockRow:
        frontier = len(self.prompt) + len(self.output) - 1
        anchor = self.output[-1]
        return BlockRow(self.residency, frontier, len(self.output), (anchor, *proposals))

    def release(self) -> list[int]:
        self.blocks.target.state.release(self.residency)
        return self.output[:NEW_TOKENS]


def plain_run(blocks: Blocks, prompt: Sequence[int], sampling: Sampling) -> list[int]:
    with torch.inference_mode(), blocks.replays.stream():
        resident = Resident(blocks, prompt, sampling)
        while not resident.done:
            block = blocks.verify([resident.row(())])
            (licensed,) = blocks.accept(block, [None])
            blocks.commit(block, [1])
            resident.output += licensed.token_ids
        return resident.release()


def planted_run(
    blocks: Blocks,
    prompts: Sequence[Sequence[int]],
    foretold: Sequence[Sequence[int]],
    draft_tokens: int,
    sampling: Sampling,
) -> tuple[list[list[int]], set[int]]:
    """Outputs of all prompts side by side, and the numbers of columns that were kept."""
    kept_counts: set[int] = set()
    with torch.inference_mode(), blocks.replays.stream():
        residents = [Resident(blocks, prompt, sampling) for prompt in prompts]
        step = 0
        while active := [(i, r) for i, r in enumerate(residents) if not r.done]:
            rows = []
            for index, resident in active:
                at = len(resident.output)
                proposals = list(foretold[index][at : at + draft_tokens])
                wrong = (step + 3 * index) % (draft_tokens + 1)
                if wrong < len(proposals):
                    proposals[wrong] = (proposals[wrong] + 1) % blocks.tables.public_vocab
                rows.append(resident.row(proposals))
            block = blocks.verify(rows)
            kept = []
            for (_, resident), licensed in zip(
                active, blocks.accept(block, [None] * len(rows)), strict=True
            ):
                assert licensed.finite
                resident.output += licensed.token_ids
                kept.append(len(licensed.token_ids))
            blocks.commit(block, kept)
            kept_counts.update(kept)
            step += 1
        return [resident.release() for resident in residents], kept_counts


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Blocks:
    folder = tmp_path_factory.mktemp("target")
    save_target(folder, Variant("dense"))
    return make_blocks(folder, (0, 2, 3), torch.device("cpu"), torch.float32)


def prompts_of(count: int, vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randint(0, vocab, (20 + 37 * i,), generator=generator).tolist() for i in range(count)
    ]


@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
def test_planted_proposals_change_no_greedy_token(tiny: Blocks, draft_tokens: int):
    prompts, greedy = prompts_of(4, TEXT["vocab_size"]), Sampling(temperature=0.0)
    foretold = [plain_run(tiny, prompt, greedy) for prompt in prompts]
    together, kept = planted_run(tiny, prompts, foretold, draft_tokens, greedy)
    assert together == foretold
    assert kept == set(range(1, draft_tokens + 2))


def test_the_next_block_takes_the_records_of_the_one_before(tiny: Blocks):
    with torch.inference_mode():
        resident = Resident(tiny, [1, 2, 3], Sampling(temperature=0.0))
        older = tiny.verify([resident.row(())])
        tiny.verify([resident.row(())])
        with pytest.raises(AssertionError):
            tiny.commit(older, [1])
        resident.release()


def test_features_outlive_the_next_block(tiny: Blocks):
    with torch.inference_mode():
        resident = Resident(tiny, [1, 2, 3], Sampling(temperature=0.0))
        block = tiny.verify([resident.row((5, 6))])
        kept = tiny.features(block, 0, 2)
        before = kept.clone()
        tiny.verify([resident.row((7, 8))])
        assert torch.equal(kept, before)
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
    return make_blocks(bundled("target"), (1, 3, 5), torch.device("cuda"), torch.bfloat16)


def held_out(count: int) -> list[list[int]]:
    path = bundled("target").parent.parent / "prompts.json"
    return [p["token_ids"] for p in json.loads(path.read_text())["prompts"][:count]]


@pytest.mark.gpu
@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
def test_on_a_device_bfloat16_tokens_depend_on_no_neighbour(on_device: Blocks, draft_tokens: int):
    prompts, greedy = held_out(8), Sampling(temperature=0.0)
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
