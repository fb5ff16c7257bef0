"""Shared settings: one compute thread, quiet CUDA probing, deterministic torch."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)

import logging

import structlog

# servers in tests log what needs attention, not every round
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
