"""Host and device twins, and replayed functions where there is no device."""

import torch

from kernels.replay import Replays
from kernels.staging import Staging

CPU = torch.device("cpu")


def fields() -> Staging:
    return Staging(
        CPU,
        {
            "frontiers": (torch.int64, (3,)),
            "temperatures": (torch.float32, (3,)),
            "law": (torch.float32, (3, 2, 5)),
            "finite": (torch.bool, (3,)),
            "nothing": (torch.int64, (3, 0)),
        },
    )


def test_fields_do_not_overlap():
    staging = fields()
    for index, tensor in enumerate(staging.host.values()):
        tensor.fill_(index % 2)
    for index, tensor in enumerate(staging.host.values()):
        assert (tensor == index % 2).all()


def test_fields_have_the_shapes_and_types_asked_for_and_start_at_zero():
    staging = fields()
    assert staging.host["law"].shape == (3, 2, 5)
    assert staging.host["finite"].dtype == torch.bool
    assert staging.host["nothing"].shape == (3, 0)
    assert all(not tensor.any() for tensor in staging.host.values())


def test_every_field_begins_at_a_multiple_of_sixteen_bytes():
    staging = fields()
    starts = [tensor.storage_offset() * tensor.element_size() for tensor in staging.host.values()]
    assert all(start % 16 == 0 for start in starts)
    assert staging.byte_count % 16 == 0


def test_what_the_host_writes_the_device_reads():
    staging = fields()
    staging.host["frontiers"][:] = torch.tensor([1, 2, 3])
    staging.to_device()
    assert staging.device["frontiers"].tolist() == [1, 2, 3]
    staging.device["frontiers"].add_(1)
    staging.to_host()
    assert staging.host["frontiers"].tolist() == [2, 3, 4]


def test_without_a_device_a_replay_is_the_function_itself():
    replays = Replays(CPU)
    value = torch.tensor([1.0])
    double = replays.capture(lambda: value * 2)
    value.fill_(3.0)
    with replays.stream():
        assert double().item() == 6.0
    replays.wait()
    assert replays.graph_count == 0
    assert replays.byte_count == 0
