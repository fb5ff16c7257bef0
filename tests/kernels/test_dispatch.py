"""Which form of an op runs where."""

from types import SimpleNamespace

import pytest
import torch

import kernels
from kernels import dispatch

CPU = torch.zeros(1)
CUDA = SimpleNamespace(device=torch.device("cuda"))


@pytest.fixture(autouse=True)
def fresh_choices(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    dispatch.forget()
    yield
    dispatch.forget()


@pytest.fixture
def probe(tmp_path, monkeypatch):
    """An op folder with both forms, `both`, and one with the reference alone, `plain`."""
    for op, forms in (("both", ("reference", "kernel")), ("plain", ("reference",))):
        folder = tmp_path / f"probe_{op}"
        folder.mkdir()
        for form in ("__init__", *forms):
            (folder / f"{form}.py").write_text(f"FORM = {form!r}\n")
    monkeypatch.setattr(kernels, "__path__", [*kernels.__path__, str(tmp_path)])


@pytest.mark.parametrize(
    ("choice", "op", "tensor", "form"),
    [
        (None, "probe_both", CPU, "reference"),
        (None, "probe_both", CUDA, "kernel"),
        (None, "probe_plain", CUDA, "reference"),
        ("auto", "probe_both", CUDA, "kernel"),
        ("auto", "probe_both", CPU, "reference"),
        ("", "probe_both", CUDA, "kernel"),
        ("reference", "probe_both", CUDA, "reference"),
        ("reference", "probe_both", CPU, "reference"),
        ("triton", "probe_both", CUDA, "kernel"),
    ],
)
def test_form_follows_device_and_environment(probe, monkeypatch, choice, op, tensor, form):
    if choice is not None:
        monkeypatch.setenv(dispatch.VARIABLE, choice)
    assert form == dispatch.select(op, tensor).FORM


@pytest.mark.parametrize(
    ("choice", "op", "tensor", "message"),
    [
        ("triton", "probe_both", CPU, "expected a cuda tensor, got cpu"),
        ("triton", "probe_plain", CUDA, "expected a kernel for probe_plain, got none"),
        ("fast", "probe_both", CPU, "expected one of auto, triton, reference, got 'fast'"),
    ],
)
def test_impossible_wish_is_refused(probe, monkeypatch, choice, op, tensor, message):
    monkeypatch.setenv(dispatch.VARIABLE, choice)
    with pytest.raises(ValueError, match=message):
        dispatch.select(op, tensor)
    # a refusal is not remembered as a choice
    with pytest.raises(ValueError, match=message):
        dispatch.select(op, tensor)


def test_interpreter_runs_kernels_on_cpu_tensors(probe, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert dispatch.select("probe_both", CPU).FORM == "reference"
    dispatch.forget()
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    assert dispatch.select("probe_both", CPU).FORM == "kernel"


def test_choice_is_made_once_until_forgotten(probe, monkeypatch):
    first = dispatch.select("probe_both", CUDA)
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.select("probe_both", CUDA) is first
    dispatch.forget()
    assert dispatch.select("probe_both", CUDA).FORM == "reference"
