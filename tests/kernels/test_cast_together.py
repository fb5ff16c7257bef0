"""What is copied arrives whole, in another type."""

import pytest
import torch

from kernels.cast_together import cast_together


def pairs():
    """Sources, one of them a view and one empty, and destinations."""
    tokens = torch.tensor([[0, 5, 248_319], [1, 2, 3]])
    law = torch.tensor([0.0, 1.0, 2.0**-126, float("nan"), -0.0]).expand(3, 5)
    sources = [tokens[:, 1:], torch.tensor([True, False]), law, tokens[:, :0], tokens[0, 2]]
    types = [torch.int32, torch.bool, torch.float32, torch.int32, torch.int64]
    return sources, [torch.full(s.shape, 7, dtype=t) for s, t in zip(sources, types, strict=True)]


def test_each_number_arrives():
    sources, destinations = pairs()
    cast_together(sources, destinations)
    for source, destination in zip(sources, destinations, strict=True):
        assert destination.nan_to_num(9).tolist() == source.nan_to_num(9).tolist()


def test_what_does_not_fit_is_refused():
    sources, destinations = pairs()
    with pytest.raises(ValueError, match=r"^destinations: expected 5, got 4$"):
        cast_together(sources, destinations[:4])
    with pytest.raises(ValueError, match=r"^destination: expected \[2, 2\], got \[2\] bool$"):
        cast_together(sources, destinations[1:] + destinations[:1])
    with pytest.raises(ValueError, match=r"^destination: expected contiguous memory"):
        cast_together(sources[:1], [torch.zeros(2, 2).T])
    with pytest.raises(ValueError, match=r"^sources: expected 1\.\.8, got 0$"):
        cast_together([], [])
