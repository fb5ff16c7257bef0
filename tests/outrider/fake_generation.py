"""A scripted GenerationService: what a prompt's text asks for is what happens.

Run as a script it stands in for `python -m verifier` or `python -m drafter` under `outrider serve`.
"""

import threading
import time
from concurrent import futures

import grpc

from outrider import faults, serving
from outrider.v1 import generation_service_pb2 as pb
from outrider.v1 import generation_service_pb2_grpc as pb_grpc

# an accepted euro sign split over two tokens, a correction, and a bonus that comes later
DELTAS = (
    {
        "token_ids": [11],
        "text": "Once",
        "text_ends": [4],
        "origins": [pb.TOKEN_ORIGIN_TARGET],
    },
    {
        "token_ids": [12, 13, 14],
        "text": " €!",
        "text_ends": [2, 4, 5],
        "origins": [pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_ACCEPTED, pb.TOKEN_ORIGIN_CORRECTION],
    },
    {
        "token_ids": [15],
        "text": " end\n",
        "text_ends": [5],
        "origins": [pb.TOKEN_ORIGIN_BONUS],
    },
)
TOKEN_IDS = (11, 12, 13, 14, 15)
TEXT = "Once €! end\n"
USAGE = {
    "prompt_tokens": 3,
    "output_tokens": 5,
    "rounds": 2,
    "proposed": 9,
    "accepted": 2,
    "accepted_per_position": [1, 1, 0],
    "seed": 2**64 - 1,
    "ttft_ns": 1_500_000,
    "draft_ns": 2_000_000,
    "verify_ns": 3_000_000,
    "wire_ns": 500_000,
    "total_ns": 401_500_000,
}


# what a request that asks for trees gets besides
TREE = {"proposed": [14], "parents": [0, 1, 0], "columns": [1, 2]}
TREE_USAGE = {"tree_rounds": 2, "side_accepted": 1, "tree_columns": 8}


class FakeGeneration(pb_grpc.GenerationServiceServicer):
    """Records requests; `gone` is set when a slow call's client has left."""

    def __init__(self):
        self.requests = []
        self.aborted = []
        self.gone = threading.Event()
        self.loading_until = 0.0

    def Generate(self, request, context):
        self.requests.append(request)
        prompt = request.text
        if prompt == "slow":
            yield from self._slow(context)
        elif prompt.startswith("fault "):
            faults.abort(context, fault(prompt.split()[1]))
        elif prompt == "fault-later":
            yield pb.GenerateResponse(request_id=request.request_id, **DELTAS[0])
            faults.abort(context, fault("LOGITS_NOT_FINITE"))
        elif prompt == "no finish":
            yield pb.GenerateResponse(request_id=request.request_id, **DELTAS[0])
        elif prompt == "raise":
            raise RuntimeError("scripted")
        else:
            for index in range(max(1, request.n)):
                yield from self._whole(request, index)

    def _whole(self, request, index):
        for number, delta in enumerate(DELTAS):
            message = pb.GenerateResponse(
                request_id=request.request_id, sample_index=index, **delta
            )
            if request.HasField("logprobs"):
                for _ in delta["token_ids"]:
                    top = list(range(request.logprobs))
                    message.logprobs.add(
                        logprob=-0.5, top_token_ids=top, top_logprobs=[-0.5 - each for each in top]
                    )
            if request.return_rounds and number > 0:
                message.rounds.add(frontier=2 + number, proposed=[12, 13], accepted=2, committed=3)
                if request.draft_trees:
                    message.rounds[-1].MergeFrom(pb.RoundTrace(**TREE))
            if number == len(DELTAS) - 1 and request.draft_trees:
                message.finish.usage.MergeFrom(pb.Usage(**TREE_USAGE))
            if number == len(DELTAS) - 1:
                message.finish.reason = pb.FINISH_REASON_STOP
                message.finish.stop_token_id = 15
                message.finish.usage.MergeFrom(pb.Usage(**USAGE))
            yield message

    def _slow(self, context):
        context.add_callback(self.gone.set)
        while context.is_active():
            yield pb.GenerateResponse(token_ids=[1], text="x", text_ends=[1], origins=[1])
            self.gone.wait(0.02)

    def Abort(self, request, context):
        self.aborted.append(request.request_id)
        return pb.AbortResponse(found=request.request_id == "live")

    def GetModelInfo(self, request, context):
        return pb.GetModelInfoResponse(
            model_name="fake",
            vocab_size=320,
            public_vocab=300,
            eos_token_ids=[15, 16],
            draft_format="dflash2",
            draft_tokens=7,
            max_context=512,
        )

    def GetServerInfo(self, request, context):
        if time.monotonic() < self.loading_until:
            faults.abort(context, fault("LOADING"))
        return pb.GetServerInfoResponse(
            version="0.1.0", drafter_state=pb.DRAFTER_STATE_CONNECTED, counters={"rounds": 2}
        )

    def Tokenize(self, request, context):
        text = request.text or "".join(
            f"<{each.role}>{each.content}" for each in request.chat.messages
        )
        return pb.TokenizeResponse(token_ids=list(text.encode()), text=text)

    def Detokenize(self, request, context):
        return pb.DetokenizeResponse(text=bytes(request.token_ids).decode())


def fault(reason):
    return faults.FaultError(
        reason, f"scripted: expected 1, got {reason}", got=reason, retry_after_ms=250
    )


def serve(service, listen="127.0.0.1:0"):
    """A started server of the fake and its address."""
    server = grpc.server(futures.ThreadPoolExecutor(8), options=serving.SERVER_OPTIONS)
    pb_grpc.add_GenerationServiceServicer_to_server(service, server)
    address = serving.bind(server, listen)
    server.start()
    return server, address
