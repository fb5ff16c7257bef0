"""Kernels of one stream that overlap: each starts under the end of the one before it.

A decode round is several hundred kernels of a few microseconds, each of which would wait for the
last program of its predecessor, then for its own start, then for its first bytes. With
programmatic dependent launch (compute capability 9 and later) a kernel's programs take their places
as soon as all of its predecessor's have begun, and wait there. Three rules keep that safe:

* every program calls `wait` (or `enter`) before it reads what an earlier kernel wrote, and before
  it writes anything at all: past it, all earlier kernels have finished and can be seen;
* before `wait` it may compute from its arguments' values and from memory that nobody writes;
* it is launched with `**OVERLAPPED`. A kernel launched without waits for everything as usual.

Elsewhere, and under the interpreter, all of this is nothing.
"""

import os

import torch
import triton
import triton.language as tl


def _is_supported() -> bool:
    """Also where there is no device, for kernels are compiled there for one that supports it."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] >= 9


_SUPPORTED = tl.constexpr(_is_supported())

# launch options; cleared, kernels follow one another without overlap, to the same results
OVERLAPPED = {"launch_pdl": _is_supported()}


@triton.jit
def release():
    """Lets the next kernel's programs take their places once all of this one's have begun."""
    if _SUPPORTED:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait():
    """Waits until all earlier kernels have finished."""
    if _SUPPORTED:
        tl.extra.cuda.gdc_wait()


@triton.jit
def enter():
    """What a kernel without anything to do beforehand begins with."""
    release()
    wait()
