"""The kernel that copies several tensors, against the numbers themselves."""

import pytest
import torch

from kernels.cast_together import cast_together


@pytest.mark.parametrize("block", [4, 1024])
def test_each_number_arrives_and_nothing_beyond(random, monkeypatch, block):
    monkeypatch.setattr("kernels.cast_together.kernel._BLOCK", block)
    ids = torch.randint(0, 248_320, (3, 7, 5), generator=torch.Generator().manual_seed(1))
    law = random(3, 7, 5)
    law[1, 2] = float("nan")
    sources = [ids[:, 1:], law, torch.tensor([True, False, True]), ids[0, 0], ids[:0]]
    types = [torch.int32, torch.float32, torch.bool, torch.int64, torch.int32]
    rooms = [torch.full((s.numel() + 1,), 1, dtype=t) for s, t in zip(sources, types, strict=True)]
    cast_together(sources, [r[:-1].view(s.shape) for r, s in zip(rooms, sources, strict=True)])
    for source, room in zip(sources, rooms, strict=True):
        arrived = room[:-1].view(source.shape)
        assert torch.equal(arrived.nan_to_num(9), source.to(room.dtype).nan_to_num(9))
        assert room[-1] == 1
