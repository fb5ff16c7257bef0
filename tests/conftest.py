"""Shared settings: one compute thread, no network look-ups, quiet servers."""

import logging
import os

# before torch and transformers are imported
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import structlog
import torch

torch.set_num_threads(1)
# servers in tests log what needs attention, not every round, and tracebacks without all the locals
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S"),
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ],
    wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
)
