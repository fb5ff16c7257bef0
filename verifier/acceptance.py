"""What acceptance reads and reports: the sampling tables, licensed tokens, logprobs.

The tables hold one row a lane: what a request asked for and what it has generated so far. They
live on the device; a batch row reads its lane's row by index.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from kernels.target_distribution import SamplingRows
from kernels.token_logprobs import token_logprobs
from verifier.request import Request, TokenLogprobs


@dataclass(frozen=True)
class LicensedRow:
    """What the target allows one row to publish: y = [d_1..d_A, correction or bonus]."""

    token_ids: tuple[int, ...]  # L = A + 1
    accepted: int  # A
    logprobs: tuple[TokenLogprobs, ...]  # empty unless asked for
    finite: bool  # False: the target's logits were not, and nothing is licensed
    columns: tuple[int, ...] = ()  # of a tree, those of the A accepted; empty for a chain

    @property
    def branch(self) -> tuple[int, ...]:
        """Columns of the A accepted, of a chain too."""
        return self.columns or tuple(range(1, self.accepted + 1))


class SamplingTables:
    """Sampling parameters and token counts of every lane, on ``device``.

    Args:
        lanes: B.
        vocab_size: Rows of the head.
        public_vocab: Ids at or above it have p = 0.
    """

    def __init__(
        self, lanes: int, vocab_size: int, public_vocab: int, device: torch.device
    ) -> None:
        def table(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.public_vocab = public_vocab
        self.device = device
        self._floats = table(torch.float32, lanes, 6)
        self._ints = table(torch.int64, lanes, 2)  # top_k, min_tokens
        self._seeds = table(torch.int64, lanes)
        self._generated_counts = table(torch.int32, lanes, vocab_size)
        self._prompt_seen = table(torch.bool, lanes, vocab_size)
        self._logit_bias = table(torch.float32, lanes, vocab_size)
        self._stop_mask = table(torch.bool, lanes, vocab_size)

    def byte_count(self) -> int:
        """Device bytes of all tables."""
        tensors = [value for value in vars(self).values() if isinstance(value, torch.Tensor)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def admit(self, lane: int, request: Request) -> None:
        """Fills the lane's rows for a new request."""
        sampling = request.sampling
        self._floats[lane] = torch.tensor(
            [
                sampling.temperature,
                sampling.top_p,
                sampling.min_p,
                sampling.presence_penalty,
                sampling.frequency_penalty,
                sampling.repetition_penalty,
            ]
        )
        self._ints[lane] = torch.tensor([sampling.top_k, request.min_tokens])
        self._seeds[lane] = signed(sampling.seed)
        self._generated_counts[lane] = 0
        self._prompt_seen[lane] = False
        self._prompt_seen[lane, torch.tensor(request.prompt_ids)] = True
        self._logit_bias[lane] = 0.0
        for token_id, bias in sampling.logit_bias:
            self._logit_bias[lane, token_id] = bias
        self._stop_mask[lane] = False
        self._stop_mask[lane, torch.tensor(sorted(request.stop_token_ids), dtype=torch.int64)] = (
            True
        )

    def recount(self, lane: int, token_ids: Rows[int]) -> None:
        """Sets the lane's generated counts to those of ``token_ids``."""
        counts = torch.bincount(
            torch.tensor(token_ids, dtype=torch.int64), minlength=self._generated_counts.shape[1]
        )
        self._generated_counts[lane] = counts.to(self.device)

    def count(self, lanes: torch.Tensor, tokens: torch.Tensor, kept: torch.Tensor) -> None:
        """Adds published tokens to the generated counts of their lanes.

        Args:
            lanes: [B] int64.
            tokens: [B, W] int64, y.
            kept: [B] int64, N: how many of each row's tokens are published.
        """
        counted = torch.arange(tokens.shape[1], device=self.device) < kept.unsqueeze(1)
        vocab = self._generated_counts.shape[1]
        cells = torch.where(counted, lanes.unsqueeze(1) * vocab + tokens, 0)
        self._generated_counts.view(-1).scatter_add_(0, cells.flatten(), counted.flatten().int())

    def rows(self, lanes: torch.Tensor, output_index: torch.Tensor) -> SamplingRows:
        """The batch's view: ``lanes`` and ``output_index`` (tokens generated so far) are [B]."""
        temperature, top_p, min_p, presence, frequency, repetition = self._floats[lanes].unbind(1)
        top_k, min_tokens = self._ints[lanes].unbind(1)
        return SamplingRows(
            temperature=temperature,
            top_p=top_p,
            min_p=min_p,
            presence_penalty=presence,
            frequency_penalty=frequency,
            repetition_penalty=repetition,
            top_k=top_k,
            min_tokens=min_tokens,
            output_index=output_index,
            lanes=lanes,
            generated_counts=self._generated_counts,
            prompt_seen=self._prompt_seen,
            logit_bias=self._logit_bias,
            stop_mask=self._stop_mask,
        )

    def seeds(self, lanes: torch.Tensor) -> torch.Tensor:
        """[B] int64 bit patterns of the rows' seeds."""
        return self._seeds[lanes]

    def logprobs(
        self, logits: torch.Tensor, token_ids: tuple[int, ...], top: int
    ) -> tuple[TokenLogprobs, ...]:
        """Of a row's licensed tokens under its raw ``logits`` [W, V], with ``top`` others each."""
        chosen, ids, values = token_logprobs(
            logits[: len(token_ids)],
            torch.tensor(token_ids, device=self.device),
            top,
            public_vocab=self.public_vocab,
        )
        return tuple(
            TokenLogprobs(logprob, tuple(row_ids), tuple(row_values))
            for logprob, row_ids, row_values in zip(
                chosen.tolist(), ids.tolist(), values.tolist(), strict=True
            )
        )


def signed(seed: int) -> int:
    """The int64 with the bits of a uint64 seed."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
