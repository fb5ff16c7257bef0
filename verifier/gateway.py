"""`vllm.grpc.engine.VllmEngine`, the protocol of an OpenAI-compatible gateway, over Generate.

A translation and nothing more: a request becomes this server's own GenerateRequest and takes the
way of every other one, with its checks, queue, limits and faults; what Generate writes leaves as
the gateway's messages. The gateway renders templates, tokenizes, makes text of ids and parses tool
calls itself, from the tokenizer that it fetches here. Needs the extra `gateway`.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import io
import json
import time
import zipfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Self

import grpc.aio
from smg_grpc_proto import vllm_engine_pb2 as engine_pb
from smg_grpc_proto import vllm_engine_pb2_grpc as engine_grpc
from smg_grpc_proto.generated import common_pb2

import outrider
from outrider.checkpoint import Checkpoint, tokenizer_files
from outrider.faults import FaultError, abort_async
from outrider.v1 import generation_service_pb2 as pb
from verifier.service import GenerationService

_CHUNK_BYTES = 1 << 20  # of a tokenizer on its way
_FLUSH_POLL_S = 0.05
_U64 = (1 << 64) - 1

_FINISH_REASONS: Mapping[int, str] = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
    pb.FINISH_REASON_ABORTED: "abort",
}
# what generation_config.json may suggest for fields that a request leaves out
_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class TargetFolder:
    """What a gateway asks of the target's folder, read once at start.

    Attributes:
        path: Where it is.
        model_type: Of config.json.
        bos_token_id: Of config.json; 0 where it names none.
        pad_token_id: Likewise.
        bundle: A zip of tokenizer, template and config; None without a tokenizer.
        sampling_defaults: JSON object of suggested sampling, empty where requests stay neutral.
    """

    path: str
    model_type: str
    bos_token_id: int
    pad_token_id: int
    bundle: bytes | None
    sampling_defaults: str

    @classmethod
    def read(cls, checkpoint: Checkpoint, *, model_defaults: bool) -> Self:
        """Reads an open folder.

        Raises:
            CheckpointError: a tokenizer or config that cannot be used.
        """
        config = checkpoint.config
        text_config = config.get("text_config") or config
        files = tokenizer_files(checkpoint)
        suggested = checkpoint.generation_config if model_defaults else {}
        given = {name: suggested.get(name) for name in _DEFAULTED}
        defaults = {name: value for name, value in given.items() if value is not None}
        if suggested.get("do_sample") is False:
            defaults["temperature"] = 0.0
        return cls(
            path=str(checkpoint.folder),
            model_type=str(config.get("model_type", "")),
            bos_token_id=text_config.get("bos_token_id") or 0,
            pad_token_id=text_config.get("pad_token_id") or 0,
            bundle=_zipped(files) if files else None,
            sampling_defaults=json.dumps(defaults) if defaults else "",
        )


def add_to_server(
    folder: TargetFolder, server: grpc.aio.Server, service: GenerationService
) -> None:
    """Serves the protocol on a server that is not started yet, beside `service`."""
    engine_grpc.add_VllmEngineServicer_to_server(VllmEngine(service, folder), server)


class VllmEngine(engine_grpc.VllmEngineServicer):  # type: ignore[misc]
    """The gateway's view of one verifier."""

    def __init__(self, service: GenerationService, folder: TargetFolder) -> None:
        self._service = service
        self._folder = folder
        self._last_request_time = 0.0  # seconds since the epoch
        self._throughput = _Throughput()

    async def Generate(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Chunks and one complete message a sample; without `stream` the latter alone."""
        self._last_request_time = time.time()
        try:
            request = _to_request(message)
        except FaultError as fault:
            await abort_async(context, fault)
        translation = _Translation(
            len(request.token_ids.ids), max(1, request.n), stream=message.stream
        )
        outgoing: Any = _Outgoing(context, translation)
        await self._service.Generate(request, outgoing)

    async def Abort(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Ends requests; unknown ids are no error."""
        for request_id in message.request_ids:
            await self._service.Abort(pb.AbortRequest(request_id=request_id), context)
        return engine_pb.AbortResponse()

    async def HealthCheck(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Healthy while new requests are taken; the drafter has no say in it.

        While weights load the call fails: a gateway takes any answer as a sign that it may ask for
        the model, and asks once.
        """
        try:
            self._service.backend  # noqa: B018 - raises LOADING
        except FaultError as fault:
            await abort_async(context, fault)
        healthy = self._service.ready
        return engine_pb.HealthCheckResponse(
            healthy=healthy, message="" if healthy else "draining, takes no new requests"
        )

    async def GetModelInfo(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Describes the target; served_model_name is the id that OpenAI clients ask for."""
        answer = await self._service.GetModelInfo(pb.GetModelInfoRequest(), context)
        folder = self._folder
        return engine_pb.GetModelInfoResponse(
            model_path=folder.path,
            tokenizer_path=folder.path,
            served_model_name=answer.model_name,
            is_generation=True,
            max_context_length=answer.max_context,
            max_req_input_len=answer.max_context - 1,
            vocab_size=answer.vocab_size,
            model_type=folder.model_type,
            architectures=[answer.architecture],
            eos_token_ids=answer.eos_token_ids,
            bos_token_id=folder.bos_token_id,
            pad_token_id=folder.pad_token_id,
            default_sampling_params_json=folder.sampling_defaults,
        )

    async def GetServerInfo(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Describes the process. One verifier is one data-parallel rank."""
        answer = await self._service.GetServerInfo(pb.GetServerInfoRequest(), context)
        return engine_pb.GetServerInfoResponse(
            active_requests=answer.resident_requests + answer.queued_requests,
            last_receive_timestamp=self._last_request_time,
            uptime_seconds=answer.uptime_seconds,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=answer.max_concurrency,
            model_dtype=f"torch.{answer.dtype}",
        )

    async def GetLoads(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """What runs and waits now."""
        answer = await self._service.GetServerInfo(pb.GetServerInfoRequest(), context)
        running, waiting = answer.resident_requests, answer.queued_requests
        held, capacity = self._service.backend.engine.positions()
        load = engine_pb.SchedulerLoad(
            num_running_reqs=running,
            num_waiting_reqs=waiting,
            num_total_reqs=running + waiting,
            max_running_requests=answer.max_concurrency,
            num_used_tokens=held,
            max_total_num_tokens=capacity,
            token_usage=held / capacity,
            utilization=running / answer.max_concurrency,
            gen_throughput=self._throughput.measure(answer.counters["output_tokens"]),
        )
        return engine_pb.GetLoadsResponse(
            timestamp=datetime.datetime.now(datetime.UTC).isoformat(),
            version=outrider.__version__,
            dp_rank_count=1,
            loads=[load],
        )

    async def GetTokenizer(
        self, message: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """The bundle in pieces, then its SHA-256."""
        bundle = self._folder.bundle
        if bundle is None:
            await _refuse(context, "tokenizer: the target's folder brings none")
        for first in range(0, len(bundle), _CHUNK_BYTES):
            yield common_pb2.GetTokenizerChunk(data=bundle[first : first + _CHUNK_BYTES])
        yield common_pb2.GetTokenizerChunk(sha256=hashlib.sha256(bundle).hexdigest())

    async def FlushCache(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Drops the kept prefixes once nothing runs, if that comes within the time given."""
        try:
            engine = self._service.backend.engine
        except FaultError as fault:
            await abort_async(context, fault)
        end = time.monotonic() + message.timeout_s
        while not await asyncio.wrap_future(engine.forget_prefixes()):
            if time.monotonic() >= end:
                return common_pb2.FlushCacheResponse(
                    success=False, message="requests run or wait; nothing was dropped"
                )
            await asyncio.sleep(_FLUSH_POLL_S)
        return common_pb2.FlushCacheResponse(success=True, message="every kept prefix was dropped")

    async def Embed(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Refused."""
        await _refuse(context, "embeddings: the target only generates")

    async def StartProfile(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Refused."""
        await _refuse(context, "profiler: there is none behind this protocol")

    async def StopProfile(self, message: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        """Refused."""
        await _refuse(context, "profiler: there is none behind this protocol")

    async def SubscribeKvEvents(
        self, message: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        """Refused; the gateway then asks GetLoads."""
        await _refuse(context, "cache events: recurrent state has no blocks to tell of")


async def _refuse(context: grpc.aio.ServicerContext[Any, Any], message: str) -> NoReturn:
    await abort_async(context, FaultError("FEATURE_UNSUPPORTED", message))


# --- a request on its way in


def _to_request(message: Any) -> pb.GenerateRequest:
    """The same request in this server's words.

    Raises:
        FaultError: MEDIA_UNSUPPORTED or FEATURE_UNSUPPORTED, for what has no words here. All other
            checks are Generate's.
    """
    _require_supported(message)
    params = message.sampling_params
    request = pb.GenerateRequest(
        request_id=message.request_id,
        sampling=_to_sampling(params),
        min_tokens=_fitting("min_tokens", params.min_tokens),
        stop=params.stop,
        ignore_eos=params.ignore_eos,
        stop_token_ids=[_fitting("stop_token_ids", each) for each in params.stop_token_ids],
    )
    if message.WhichOneof("input") == "text":
        request.text = message.text
    elif message.WhichOneof("input") == "tokenized":
        ids = message.tokenized.input_ids
        # one look at the largest instead of a call for each of many thousands
        _fitting("input_ids", max(ids, default=0))
        request.token_ids.ids.extend(ids)
        request.token_ids.SetInParent()
    if params.HasField("max_tokens"):
        request.max_tokens = _fitting("max_tokens", params.max_tokens)
    if params.HasField("logprobs"):
        request.logprobs = params.logprobs
    if params.n:
        request.n = _fitting("n", params.n)
    return request


def _to_sampling(params: Any) -> pb.Sampling:
    sampling = pb.Sampling(
        top_k=_fitting("top_k", params.top_k),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=dict(params.logit_bias),
    )
    if params.HasField("temperature"):
        sampling.temperature = params.temperature
    # these two have no presence, and 0 is none of their values
    if params.top_p:
        sampling.top_p = params.top_p
    if params.repetition_penalty:
        sampling.repetition_penalty = params.repetition_penalty
    if params.HasField("seed"):
        sampling.seed = params.seed & _U64
    return sampling


def _fitting(name: str, value: int) -> int:
    """An unsigned field's value in a signed field of the same width."""
    if value >= 1 << 31:
        raise FaultError(
            "REQUEST_INVALID", f"{name}: expected less than 2^31, got {value}", field=name
        )
    return value


def _require_supported(message: Any) -> None:
    """Refuses what would change the output if it were left out."""
    params = message.sampling_params
    media_count = len(message.extra_mm_inputs) + len(message.media_refs.items)
    if media_count or message.HasField("mm_inputs"):
        raise FaultError("MEDIA_UNSUPPORTED", "request: expected text only, got media")
    constraint = params.WhichOneof("constraint")
    for name, asked in (
        (f"constraint {constraint}", constraint is not None),
        ("prompt_logprobs", params.HasField("prompt_logprobs")),
        ("truncate_prompt_tokens", params.HasField("truncate_prompt_tokens")),
        ("kv_transfer_params", message.HasField("kv_transfer_params")),
        ("kv_transfer_params_json", message.HasField("kv_transfer_params_json")),
        ("data_parallel_rank", message.data_parallel_rank > 0),
    ):
        if asked:
            raise FaultError(
                "FEATURE_UNSUPPORTED", f"request: expected no {name}, got one", field=name
            )


# --- responses on their way out


class _Outgoing:
    """A call's context as Generate sees it: what is written to it leaves translated."""

    def __init__(
        self, context: grpc.aio.ServicerContext[Any, Any], translation: _Translation
    ) -> None:
        self._context = context
        self._translation = translation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, response: pb.GenerateResponse) -> None:
        """Writes what the response becomes, which may be nothing yet."""
        for message in self._translation.messages(response):
            await self._context.write(message)


@dataclass
class _Sample:
    """What one sample has sent: of a stream its count, otherwise everything."""

    token_count: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: Any = None  # OutputLogProbs, once there are any


class _Translation:
    """One call's responses, in order, as the gateway's.

    Args:
        prompt_count: Tokens of the prompt; 0 while they are not known, for a text.
        sample_count: Samples of it.
        stream: Whether tokens leave as they come.
    """

    def __init__(self, prompt_count: int, sample_count: int, *, stream: bool) -> None:
        self._prompt_count = prompt_count
        self._sample_count = sample_count
        self._stream = stream
        self._samples: dict[int, _Sample] = defaultdict(_Sample)
        self._finished: list[Any] = []  # ends that wait for the others

    def messages(self, response: pb.GenerateResponse) -> Iterator[Any]:
        """The messages for one response; there may be none yet."""
        index = response.sample_index
        sample = self._samples[index]
        sample.token_count += len(response.token_ids)
        logprobs = _output_logprobs(response)
        if not self._stream:
            sample.token_ids.extend(response.token_ids)
            if logprobs is not None and sample.logprobs is not None:
                sample.logprobs.MergeFrom(logprobs)
            elif logprobs is not None:
                sample.logprobs = logprobs
        elif response.token_ids:
            chunk = engine_pb.GenerateStreamChunk(
                token_ids=response.token_ids,
                prompt_tokens=self._prompt_count,
                completion_tokens=sample.token_count,
                output_logprobs=logprobs,
                index=index,
            )
            yield engine_pb.GenerateResponse(chunk=chunk)
        if response.HasField("finish"):
            complete = self._complete(index, sample, response.finish)
            yield from self._leaving(engine_pb.GenerateResponse(complete=complete))

    def _leaving(self, complete: Any) -> Sequence[Any]:
        """A stream's ends leave as they come, others together and in the order of the samples.

        The gateway lists choices in the order in which it hears of them.
        """
        if self._stream:
            return [complete]
        self._finished.append(complete)
        if len(self._finished) < self._sample_count:
            return []
        for message in self._finished:
            message.complete.prompt_tokens = self._prompt_count
        return sorted(self._finished, key=lambda message: int(message.complete.index))

    def _complete(self, index: int, sample: _Sample, finish: pb.Finish) -> Any:
        usage = finish.usage
        # counted in sample 0 alone, which need not end first; each of the gateway's carries it
        self._prompt_count = self._prompt_count or usage.prompt_tokens
        complete = engine_pb.GenerateComplete(
            output_ids=sample.token_ids,
            finish_reason=_FINISH_REASONS.get(finish.reason, "error"),
            prompt_tokens=self._prompt_count,
            completion_tokens=usage.output_tokens,
            cached_tokens=usage.cached_tokens,
            output_logprobs=sample.logprobs,
            index=index,
            spec_accepted_tokens=usage.accepted,
            spec_draft_tokens=usage.proposed,
        )
        matched = finish.WhichOneof("matched")
        if matched == "stop_token_id":
            complete.matched_token_id = finish.stop_token_id
        elif matched == "stop_string":
            complete.matched_stop_str = finish.stop_string
        return complete


def _output_logprobs(response: pb.GenerateResponse) -> Any:
    """The logprobs of a delta's tokens; None where none were asked for."""
    if not response.logprobs:
        return None
    return engine_pb.OutputLogProbs(
        token_ids=response.token_ids,
        token_logprobs=[entry.logprob for entry in response.logprobs],
        top_logprobs=[
            engine_pb.TopLogProbs(values=entry.top_logprobs, token_ids=entry.top_token_ids)
            for entry in response.logprobs
        ],
    )


# --- facts


class _Throughput:
    """Tokens a second between one look and the next."""

    def __init__(self) -> None:
        self._count = 0
        self._time = time.monotonic()

    def measure(self, count: int) -> float:
        """The rate since the last look."""
        now = time.monotonic()
        rate = (count - self._count) / max(now - self._time, 1e-3)
        self._count, self._time = count, now
        return rate


def _zipped(files: Mapping[str, bytes]) -> bytes:
    """A zip of the files; the same bytes for the same files, so that its digest names them."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    return buffer.getvalue()
