"""Turns verify rows into licensed tokens: the processed target law, acceptance, logprobs.

Owns the sampling tables, one row a lane: what a request asked for and what it has generated so
far. They live on the device; a batch row reads its lane's row by index.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass

import torch

from kernels.speculative_accept import speculative_accept
from kernels.target_distribution import SamplingRows, target_distribution
from kernels.token_logprobs import token_logprobs
from verifier.request import Request, TokenLogprobs


@dataclass(frozen=True)
class LicensedRow:
    """What the target allows one row to publish: y = [d_1..d_A, correction or bonus]."""

    token_ids: tuple[int, ...]  # L = A + 1
    accepted: int  # A
    logprobs: tuple[TokenLogprobs, ...]  # empty unless asked for
    finite: bool  # False: the target's logits were not, and nothing is licensed


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

    def count(self, lane: int, token_ids: Rows[int]) -> None:
        """Adds published tokens to the lane's generated counts."""
        ids = torch.tensor(token_ids, device=self.device)
        ones = torch.ones(len(token_ids), dtype=torch.int32, device=self.device)
        self._generated_counts[lane].index_add_(0, ids, ones)

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

    def accept(
        self,
        logits: torch.Tensor,
        lanes: torch.Tensor,
        frontiers: torch.Tensor,
        output_index: torch.Tensor,
        proposals: torch.Tensor,
        live: torch.Tensor,
        candidate_ids: torch.Tensor,
        probabilities: torch.Tensor,
        logprobs: Rows[int | None],
    ) -> list[LicensedRow]:
        """Licenses y for every row of a verified block.

        Args:
            logits: [B, W, V] FP32 from the target; row b's columns 0..P_b are live.
            lanes: [B] int64.
            frontiers: [B] int64, F.
            output_index: [B] int64, tokens generated before column 0.
            proposals: [B, K] int64, d_1..d_K; beyond P ignored. K = W - 1.
            live: [B] int64, P.
            candidate_ids: [B, K, k] int64, support of q.
            probabilities: [B, K, k] FP32, q as drawn from.
            logprobs: For each row, how many alternatives it wants; None for no logprobs.
        """
        p = target_distribution(
            logits,
            proposals,
            live + 1,
            self.rows(lanes, output_index),
            public_vocab=self.public_vocab,
        )
        tokens, accepted = speculative_accept(
            p, proposals, live, candidate_ids, probabilities, self._seeds[lanes], frontiers
        )
        # the round's one read-back: tokens, A, and whether p was finite at all
        finite = p[:, 0, 0].isfinite()  # NaN in one live column is NaN in all of the row's
        egress = torch.cat([accepted[:, None], finite.long()[:, None], tokens], dim=1).tolist()
        licensed = []
        for row, (count, is_finite, *row_tokens) in enumerate(egress):
            token_ids = tuple(row_tokens[: count + 1]) if is_finite else ()
            wanted = logprobs[row]
            reported = (
                self._logprobs(logits[row], token_ids, wanted)
                if wanted is not None and token_ids
                else ()
            )
            licensed.append(LicensedRow(token_ids, count, reported, bool(is_finite)))
        return licensed

    def _logprobs(
        self, logits: torch.Tensor, token_ids: tuple[int, ...], top: int
    ) -> tuple[TokenLogprobs, ...]:
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
