"""Rounds over trees from the ops alone: a small target emits what it emits step by step."""

import pytest
import torch

from kernels.candidate_tree import candidate_tree
from kernels.causal_attention import causal_attention
from kernels.gdn_fold import gdn_fold
from kernels.gdn_verify import GdnRecord, gdn_verify
from kernels.head_norm_rope import head_norm_rope
from kernels.linear import linear
from kernels.rms_norm import rms_norm
from kernels.target_distribution import target_distribution
from kernels.tree_accept import tree_accept
from kernels.tree_compact import compact_columns, compact_pages
from kernels.trees import ancestor_masks, depths
from tests.kernels.test_target_distribution import Row, tables

V, H, D, PAGE, K, WIDTH, LENGTH = 30, 32, 8, 4, 4, 14, 48
PENALTIES = {
    "plain": {},
    "penalised": {"presence": 1.5, "frequency": 0.7, "repetition": 1.2},
    "early": {"min_tokens": 40, "stops": frozenset(range(0, V, 2)), "presence": 1.0},
}


class Target:
    """One layer of each mixer over one sequence, and the state that its rounds move."""

    def __init__(self, seed):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape, scale=1.0):
            return scale * torch.randn(*shape, generator=generator)

        self.embedding, self.head = random(V, H), random(V, H)
        self.channels, self.heads = 4 * D, 2  # one key head and two value heads
        self.delta = random(self.channels + 2 * self.heads, H, scale=0.3)
        self.conv, self.rate, self.bias = random(self.channels, 4, scale=0.5), random(2), random(2)
        self.delta_out, self.out = random(H, 2 * D), random(H, 2 * D)
        self.attention = random(6 * D, H, scale=0.4)  # two queries, a key, a value, two gates
        self.state, self.history = torch.zeros(1, 2, D, D), torch.zeros(1, 3, self.channels)
        self.pages = torch.zeros(2, 1, (LENGTH + 40) // PAGE, PAGE, 1, D)
        self.table = torch.randperm(self.pages.shape[2], generator=generator).unsqueeze(0)
        self.slots = torch.tensor([0])

    def verify(self, tokens, frontier, masks=None):
        """Logits of a block's columns; keeps its records."""
        width = tokens.shape[1]
        count, place = torch.tensor([width]), torch.tensor([frontier])
        after = torch.arange(width).unsqueeze(0) if masks is None else depths(masks)
        x = self.embedding[tokens]
        raw, a, b = linear(rms_norm(x, torch.ones(H), 1e-6), self.delta).split(
            [self.channels, 2, 2], dim=2
        )
        planes = (self.channels,), (1, D), (2, D), (2, 2)
        self.record = GdnRecord(*(torch.empty(1, width, *plane) for plane in planes))
        mixed = gdn_verify(
            raw,
            a,
            b,
            self.conv,
            self.rate,
            self.bias,
            self.state,
            self.history,
            self.slots,
            count,
            self.record,
            masks,
        )
        x = x + linear(mixed.flatten(2), self.delta_out)
        heads = linear(rms_norm(x, torch.ones(H), 1e-6), self.attention).unflatten(2, (6, D))
        rotated = head_norm_rope(
            heads[:, :, :3],
            torch.ones(3, D),
            place + after,
            eps=1e-6,
            theta=1e4,
            rotary_dim=D,
        )
        query, key = rotated.split([2, 1], dim=2)
        value, gate = heads[:, :, 3:4], heads[:, :, 4:]
        pages = self.pages[:, 0]
        attended = causal_attention(
            query, key, value, gate, *pages, self.table, place, count, masks
        )
        return linear(x + linear(attended, self.out), self.head)

    def compact(self, frontier, columns):
        compact_columns([plane.unsqueeze(0) for plane in self.record], columns)
        compact_pages(*self.pages, self.table, torch.tensor([frontier]), columns)

    def commit(self, kept):
        records = GdnRecord(*(plane.unsqueeze(0) for plane in self.record))
        state, history = self.state.unsqueeze(0), self.history.unsqueeze(0)
        gdn_fold(records, state, history, self.slots, self.slots, torch.tensor([kept]))


def law(logits, tokens, output, wishes, masks=None):
    """p of a block's columns, greedy."""
    counts = {token: output.count(token) for token in output}
    row = Row(temperature=0.0, generated=counts, output_index=len(output), **wishes)
    width = torch.tensor([logits.shape[1]])
    return target_distribution(
        logits, tokens[:, 1:], width, tables([row], V), public_vocab=V, ancestors=masks
    )


def step_by_step(seed, wishes):
    target, anchor, output = Target(seed), 0, []
    for frontier in range(LENGTH + K + 1):
        tokens = torch.tensor([[anchor]])
        p = law(target.verify(tokens, frontier), tokens, output, wishes)
        anchor = int(p[0, 0].argmax())
        output.append(anchor)
        target.commit(1)
    return output


def guesses(expected, generator):
    """A lattice around what will come: it is the second or third guess as often as the first."""
    ids = torch.stack([torch.randperm(V, generator=generator)[:4] for _ in range(K)])
    for position, token in enumerate(expected):
        rank = int(torch.randint(4, (1,), generator=generator))
        if token not in ids[position].tolist() and rank < 3:
            ids[position, rank] = token
    scores = torch.tensor([1.2, 0.8, 0.5, 0.0]).expand(1, K, 4).contiguous()
    nothing = torch.zeros(V, 1)
    return scores, ids.unsqueeze(0), torch.zeros(1, K, 1), nothing, nothing


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize("seed", range(4), ids="seed={}".format)
def test_greedy_rounds_over_trees_emit_what_single_steps_emit(name, seed):
    wishes = PENALTIES[name]
    expected = step_by_step(seed, wishes)
    target, output, frontier, anchor = Target(seed), [], 0, torch.tensor([0])
    generator = torch.Generator().manual_seed(seed)
    rounds = moved = 0
    while len(output) < LENGTH:
        place, greedy, key = torch.tensor([frontier]), torch.zeros(1), torch.tensor([seed])
        tree = candidate_tree(
            *guesses(expected[frontier : frontier + K], generator),
            anchor,
            greedy,
            key,
            place,
            torch.tensor([WIDTH]),
            torch.tensor([6]),
            width=WIDTH,
        )
        count = int(tree.counts)
        tokens = torch.cat([anchor.unsqueeze(0), tree.tokens[:, :count]], dim=1)
        masks = ancestor_masks(tree.parents[:, :count])
        p = law(target.verify(tokens, frontier, masks), tokens, output, wishes, masks)
        result = tree_accept(
            p,
            tokens[:, 1:],
            tree.counts,
            masks,
            tree.candidate_ids[:, :count],
            tree.probabilities[:, :count],
            key,
            place,
        )
        target.compact(frontier, result.columns)
        licensed = int(result.accepted) + 1
        target.commit(licensed)
        output += result.tokens[0, :licensed].tolist()
        anchor, frontier = result.tokens[:, licensed - 1], frontier + licensed
        moved += not torch.equal(result.columns, torch.arange(count + 1).unsqueeze(0))
        rounds += 1
    assert output == expected[: len(output)]
    assert moved >= 5
    assert len(output) > 1.5 * rounds
