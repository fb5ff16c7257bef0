"""Calls of fixed extents: dead rows, buckets, and, on a GPU, what capture and replay keep."""

from __future__ import annotations

import pytest
import torch

from drafter import graphs as graphs_module
from drafter.config import DraftConfig, DrafterOptions
from drafter.context import ContextMemory
from drafter.graphs import DraftGraphs, Extents
from drafter.model import DraftModel, ProposalAsk
from drafter.selector import Proposals, selector_for
from drafter.weights import load_weights
from outrider.checkpoint import Checkpoint, bundled
from outrider.tensors import row_bytes

LENGTHS = (5, 130, 1, 9, 70)
LIVES = (7, 1, 4, 7, 2)


@pytest.fixture
def few(monkeypatch):
    """Has calls of few extents made on the CPU too, as on a GPU."""

    class Few(Extents):
        def __init__(self, config):
            super().__init__(config)
            most = config.max_concurrency
            self.feature_rows = [min(8, self.feature_rows[-1]), self.feature_rows[-1]]
            self.batches = [most - 1, most]

    def make(drafting):
        """A second drafter of the same weights, whose calls have dead rows."""
        memory = ContextMemory(drafting.config.context_plan, drafting.config.device)
        for cells in cells_of(memory):
            cells.fill_(torch.nan)
        model = DraftModel(drafting.config.draft, drafting.weights, memory)
        with monkeypatch.context() as patched:
            patched.setattr(graphs_module, "Extents", Few)
            return DraftGraphs(drafting.config, model, drafting.selector)

    return make


def cells_of(memory: ContextMemory) -> tuple[torch.Tensor, ...]:
    return memory.key_rings, memory.value_rings, memory.key_pages, memory.value_pages


def feed(graphs: DraftGraphs, pieces, size=64) -> list:
    """Contexts that took the rows, a piece of each in every call."""
    contexts = [graphs.memory.open(3 * index) for index in range(len(pieces))]
    with graphs.stream():
        for first in range(0, max(map(len, pieces)), size):
            parts = [
                (context, rows[first : first + size])
                for context, rows in zip(contexts, pieces, strict=True)
                if first < len(rows)
            ]
            append = graphs.memory.append([(context, len(rows)) for context, rows in parts])
            graphs.materialize([row_bytes(rows) for _, rows in parts], append)
            append.commit()
    return contexts


def asks_of(contexts) -> list[ProposalAsk]:
    return [
        ProposalAsk(context, 5 + row, LIVES[row % 5], 0.9 if row % 2 else 0.0, 2**64 - 1 - row)
        for row, context in enumerate(contexts)
    ]


def drafted(graphs: DraftGraphs, asks) -> list[list[torch.Tensor | None]]:
    """Each ask's tokens, candidates and q."""
    with graphs.stream():
        proposals, _ = graphs.draft(asks)
    assert all(proposals.finite.tolist()[: len(asks)])
    parts = (proposals.tokens, proposals.candidate_ids, proposals.probabilities)
    return [
        [None if part is None else part[row, : ask.live].clone() for part in parts]
        for row, ask in enumerate(asks)
    ]


def assert_equal_rows(actual, expected, **tolerances) -> None:
    for mine, wanted in zip(actual, expected, strict=True):
        for got, part in zip(mine, wanted, strict=True):
            if part is not None:
                torch.testing.assert_close(got, part, **(tolerances or {"atol": 0, "rtol": 0}))


@pytest.mark.parametrize("draft_format", ["dflash", "dflash2"])
def test_dead_rows_reach_no_context_and_no_result(make_pair, load, features, few, draft_format):
    drafting = load(make_pair(draft_format, "lf", is_causal=False), max_concurrency=6)
    padded = few(drafting)
    pieces = [features(count, seed) for seed, count in enumerate(LENGTHS)]
    exact_contexts, padded_contexts = (feed(g, pieces) for g in (drafting.graphs, padded))
    for exact, other in zip(cells_of(drafting.memory), cells_of(padded.memory), strict=True):
        torch.testing.assert_close(other, exact, atol=2e-6, rtol=0, equal_nan=True)
    before = [cells.clone() for cells in cells_of(padded.memory)]
    for count in (1, 2, 5):
        assert_equal_rows(
            drafted(padded, asks_of(padded_contexts[:count])),
            drafted(drafting.graphs, asks_of(exact_contexts[:count])),
            atol=1e-5,
            rtol=0,
        )
    for cells, earlier in zip(cells_of(padded.memory), before, strict=True):
        torch.testing.assert_close(cells, earlier, atol=0, rtol=0, equal_nan=True)


def test_more_rows_than_the_widest_call_go_in_several(make_pair, load, features, few, monkeypatch):
    drafting = load(make_pair("dflash2", "lf", is_causal=False), max_concurrency=6)
    padded, taken = few(drafting), []
    for rows, call in padded._materialize_calls.items():
        padded._materialize_calls[rows] = lambda rows=rows, call=call: (taken.append(rows), call())
    pieces = [features(count, seed) for seed, count in enumerate((40, 64, 64, 3))]
    feed(padded, pieces)
    assert taken == [64, 64, 64]
    feed(drafting.graphs, pieces)
    for exact, other in zip(cells_of(drafting.memory), cells_of(padded.memory), strict=True):
        torch.testing.assert_close(other, exact, atol=2e-6, rtol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("options", "feature_rows", "batches", "pages"),
    [
        ({"max_concurrency": 1}, [8, 16, 32, 64], [1], [32, 64]),
        ({"max_concurrency": 3, "draft_tokens": 15}, [8, 16, 32, 64], [1, 2, 3], [32, 64]),
        ({"max_concurrency": 8, "max_context": 64}, [8, 16, 32, 64], [1, 2, 4, 8], [1]),
        (
            {"max_concurrency": 8, "draft_tokens": 15, "max_context": 2049},
            [8, 16, 32, 64, 128],
            [1, 2, 4, 8],
            [32, 33],
        ),
    ],
)
def test_a_gpu_has_a_few_extents(make_pair, load, options, feature_rows, batches, pages):
    config = load(make_pair("dflash", "lf", is_causal=False), **options).config
    object.__setattr__(config, "device", torch.device("cuda"))
    extents = Extents(config)
    assert (extents.feature_rows, extents.batches, extents.pages) == (feature_rows, batches, pages)
    for count in range(1, batches[-1] + 1):
        assert extents.batch_for(count) == min(b for b in batches if b >= count)
    for frontier in (0, 1, 64 * pages[0], config.max_context):
        assert extents.pages_for(frontier) == min(p for p in pages if p * 64 >= frontier)


def test_a_draft_without_full_layers_has_no_page_tables(make_pair, load):
    config = load(make_pair("dflash2", "ll", is_causal=False)).config
    object.__setattr__(config, "device", torch.device("cuda"))
    assert Extents(config).pages == [0]
    assert Extents(config).pages_for(4000) == 0


# ---- on a GPU -----------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["dflash", "dflash2"])
def on_device(request):
    """The bundled draft in bfloat16 on a CUDA device: config, weights, graphs."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    options = DrafterOptions(device="cuda", dtype="bfloat16", max_concurrency=8)
    with Checkpoint(bundled("target")) as target, Checkpoint(bundled(request.param)) as draft:
        config = DraftConfig.read(options, target, draft)
        weights = load_weights(config, target, draft)
    return config, weights, graphs_of(config, weights)


def graphs_of(config, weights) -> DraftGraphs:
    memory = ContextMemory(config.context_plan, config.device)
    for cells in cells_of(memory):
        cells.fill_(torch.nan)
    model = DraftModel(config.draft, weights, memory)
    return DraftGraphs(config, model, selector_for(config, weights))


def bf16_rows(config, count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, config.feature_width, generator=generator).bfloat16()


@pytest.mark.gpu
def test_a_row_has_the_same_bits_in_any_batch_bucket_and_run(on_device):
    config, _, graphs = on_device
    pieces = [bf16_rows(config, count, seed) for seed, count in enumerate((*LENGTHS, 300, 64, 2))]
    contexts = feed(graphs, pieces)
    asks = asks_of(contexts)
    together = drafted(graphs, asks)
    assert_equal_rows(drafted(graphs, asks), together)
    for count in (1, 2, 3, 5):
        for first in range(0, 8 - count + 1):
            part = slice(first, first + count)
            assert_equal_rows(drafted(graphs, asks[part]), together[part])
    for context in contexts:
        graphs.memory.release(context)


@pytest.mark.gpu
def test_contexts_have_the_same_bits_in_any_pieces_and_no_buffer_is_overtaken(on_device):
    """A hundred calls go out before the first is waited for, from ten host buffers."""
    config, weights, graphs = on_device
    rows = bf16_rows(config, 150, 7)
    expected = None
    for size in (150, 64, 17, 1):
        other = graphs_of(config, weights) if size == 1 else graphs
        (context,) = feed(other, [rows], size)
        other.replays.wait()
        plan, ring = config.context_plan, torch.arange(150).cuda() % config.context_plan.window
        kept = torch.arange(max(0, 150 - plan.window), 150).cuda()
        cells = [rings[:, context.slot, ring[kept]] for rings in cells_of(other.memory)[:2]]
        page = context.slot * plan.pages_per_sequence * 64 + torch.arange(150).cuda()
        cells += [p.flatten(1, 2)[:, page] for p in cells_of(other.memory)[2:] if len(p)]
        expected = cells if expected is None else expected
        assert not any(part.isnan().any() for part in cells)
        assert all(torch.equal(a, b) for a, b in zip(cells, expected, strict=True))
        other.memory.release(context)


@pytest.mark.gpu
def test_a_graph_proposes_what_its_functions_do_and_what_the_reference_does(on_device, monkeypatch):
    from kernels import dispatch

    config, weights, graphs = on_device
    rows = bf16_rows(config, 90, 11)
    (context,) = feed(graphs, [rows])
    ask = ProposalAsk(context, 9, config.draft_tokens, 0.9, 77)
    ((tokens, ids, q),) = drafted(graphs, [ask])
    buffers = graphs_module.BlockBuffers(config, 1)
    with torch.inference_mode():
        buffers.write([ask])
        buffers.send()
        block = buffers.block(graphs.memory, config.context_plan.pages_per_sequence)
        hidden = graphs._model.draft_block(block)
        selector = selector_for(config, weights)
        eager: Proposals = selector.select(hidden, block)
        assert eager.tokens[0].tolist() == tokens.tolist()
        monkeypatch.setenv(dispatch.VARIABLE, "reference")
        dispatch.forget()
        try:
            reference = selector.select(hidden, block)
        finally:
            monkeypatch.undo()
            dispatch.forget()
    assert reference.tokens[0].tolist() == tokens.tolist()
    if q is not None:
        assert torch.equal(eager.probabilities[0].cpu(), q)
        assert reference.candidate_ids[0].tolist() == ids.tolist()
        wanted = reference.probabilities[0].cpu()
        assert ((q - wanted).abs() <= 2e-6 + 2e-5 * wanted).all()
    graphs.memory.release(context)


@pytest.mark.gpu
def test_the_plan_counts_graphs(on_device):
    config, _, graphs = on_device
    extents = Extents(config)
    expected = len(extents.feature_rows) + len(extents.batches) * len(extents.pages)
    assert graphs.replays.graph_count == expected
    assert graphs.replays.byte_count > 0
    assert graphs.capture_seconds > 0
