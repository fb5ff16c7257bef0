from outrider.v1 import status_pb2 as _status_pb2
from outrider.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftFormat(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_FORMAT_UNSPECIFIED: _ClassVar[DraftFormat]
    DRAFT_FORMAT_DFLASH: _ClassVar[DraftFormat]
    DRAFT_FORMAT_DFLASH2: _ClassVar[DraftFormat]
DRAFT_FORMAT_UNSPECIFIED: DraftFormat
DRAFT_FORMAT_DFLASH: DraftFormat
DRAFT_FORMAT_DFLASH2: DraftFormat

class DraftRoundsRequest(_message.Message):
    __slots__ = ("hello", "open", "features", "round", "release", "capture", "restore", "fork", "drop", "look")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    FORK_FIELD_NUMBER: _ClassVar[int]
    DROP_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    open: Open
    features: Features
    round: Round
    release: Release
    capture: Capture
    restore: Restore
    fork: Fork
    drop: Drop
    look: Look
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., round: _Optional[_Union[Round, _Mapping]] = ..., release: _Optional[_Union[Release, _Mapping]] = ..., capture: _Optional[_Union[Capture, _Mapping]] = ..., restore: _Optional[_Union[Restore, _Mapping]] = ..., fork: _Optional[_Union[Fork, _Mapping]] = ..., drop: _Optional[_Union[Drop, _Mapping]] = ..., look: _Optional[_Union[Look, _Mapping]] = ...) -> None: ...

class DraftRoundsResponse(_message.Message):
    __slots__ = ("welcome", "round_reply", "sequence_fault", "capture_reply", "restore_reply", "fork_reply", "drop_reply")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ROUND_REPLY_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FAULT_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_REPLY_FIELD_NUMBER: _ClassVar[int]
    RESTORE_REPLY_FIELD_NUMBER: _ClassVar[int]
    FORK_REPLY_FIELD_NUMBER: _ClassVar[int]
    DROP_REPLY_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    round_reply: RoundReply
    sequence_fault: SequenceFault
    capture_reply: CaptureReply
    restore_reply: RestoreReply
    fork_reply: ForkReply
    drop_reply: DropReply
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., round_reply: _Optional[_Union[RoundReply, _Mapping]] = ..., sequence_fault: _Optional[_Union[SequenceFault, _Mapping]] = ..., capture_reply: _Optional[_Union[CaptureReply, _Mapping]] = ..., restore_reply: _Optional[_Union[RestoreReply, _Mapping]] = ..., fork_reply: _Optional[_Union[ForkReply, _Mapping]] = ..., drop_reply: _Optional[_Union[DropReply, _Mapping]] = ...) -> None: ...

class GetDraftInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetDraftInfoResponse(_message.Message):
    __slots__ = ("version", "protocol_revision", "geometry", "draft_tokens", "max_concurrency", "free_sequences", "checkpoint_slots", "max_context", "device", "stream_count", "layer_causal", "counters", "tree_nodes")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    FREE_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STREAM_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAYER_CAUSAL_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    version: str
    protocol_revision: int
    geometry: DraftGeometry
    draft_tokens: int
    max_concurrency: int
    free_sequences: int
    checkpoint_slots: int
    max_context: int
    device: str
    stream_count: int
    layer_causal: _containers.RepeatedScalarFieldContainer[bool]
    counters: _containers.ScalarMap[str, int]
    tree_nodes: int
    def __init__(self, version: _Optional[str] = ..., protocol_revision: _Optional[int] = ..., geometry: _Optional[_Union[DraftGeometry, _Mapping]] = ..., draft_tokens: _Optional[int] = ..., max_concurrency: _Optional[int] = ..., free_sequences: _Optional[int] = ..., checkpoint_slots: _Optional[int] = ..., max_context: _Optional[int] = ..., device: _Optional[str] = ..., stream_count: _Optional[int] = ..., layer_causal: _Optional[_Iterable[bool]] = ..., counters: _Optional[_Mapping[str, int]] = ..., tree_nodes: _Optional[int] = ...) -> None: ...

class DraftGeometry(_message.Message):
    __slots__ = ("format", "target_layer_ids", "mask_token_id", "window", "layer_count", "full_layer_count", "hidden_size", "vocab_size", "public_vocab", "rope_theta", "activation_dtype", "target_config_digest", "tokenizer_digest", "embedding_digest", "head_digest", "target_layer_count", "projection_digest")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    MASK_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    FULL_LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_VOCAB_FIELD_NUMBER: _ClassVar[int]
    ROPE_THETA_FIELD_NUMBER: _ClassVar[int]
    ACTIVATION_DTYPE_FIELD_NUMBER: _ClassVar[int]
    TARGET_CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TARGET_LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    PROJECTION_DIGEST_FIELD_NUMBER: _ClassVar[int]
    format: DraftFormat
    target_layer_ids: _containers.RepeatedScalarFieldContainer[int]
    mask_token_id: int
    window: int
    layer_count: int
    full_layer_count: int
    hidden_size: int
    vocab_size: int
    public_vocab: int
    rope_theta: float
    activation_dtype: _tensor_pb2.DType
    target_config_digest: bytes
    tokenizer_digest: bytes
    embedding_digest: bytes
    head_digest: bytes
    target_layer_count: int
    projection_digest: bytes
    def __init__(self, format: _Optional[_Union[DraftFormat, str]] = ..., target_layer_ids: _Optional[_Iterable[int]] = ..., mask_token_id: _Optional[int] = ..., window: _Optional[int] = ..., layer_count: _Optional[int] = ..., full_layer_count: _Optional[int] = ..., hidden_size: _Optional[int] = ..., vocab_size: _Optional[int] = ..., public_vocab: _Optional[int] = ..., rope_theta: _Optional[float] = ..., activation_dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ..., target_config_digest: _Optional[bytes] = ..., tokenizer_digest: _Optional[bytes] = ..., embedding_digest: _Optional[bytes] = ..., head_digest: _Optional[bytes] = ..., target_layer_count: _Optional[int] = ..., projection_digest: _Optional[bytes] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_revision", "verifier_id", "max_concurrency", "draft_tokens", "checkpoint_slots", "tree_nodes", "tree_paths", "geometry", "max_context", "max_message_bytes", "shared_memory")
    PROTOCOL_REVISION_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    TREE_PATHS_FIELD_NUMBER: _ClassVar[int]
    GEOMETRY_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SHARED_MEMORY_FIELD_NUMBER: _ClassVar[int]
    protocol_revision: int
    verifier_id: bytes
    max_concurrency: int
    draft_tokens: int
    checkpoint_slots: int
    tree_nodes: int
    tree_paths: int
    geometry: DraftGeometry
    max_context: int
    max_message_bytes: int
    shared_memory: SharedMemoryOffer
    def __init__(self, protocol_revision: _Optional[int] = ..., verifier_id: _Optional[bytes] = ..., max_concurrency: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., checkpoint_slots: _Optional[int] = ..., tree_nodes: _Optional[int] = ..., tree_paths: _Optional[int] = ..., geometry: _Optional[_Union[DraftGeometry, _Mapping]] = ..., max_context: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., shared_memory: _Optional[_Union[SharedMemoryOffer, _Mapping]] = ...) -> None: ...

class SharedMemoryOffer(_message.Message):
    __slots__ = ("name", "key", "row_count")
    NAME_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    name: str
    key: bytes
    row_count: int
    def __init__(self, name: _Optional[str] = ..., key: _Optional[bytes] = ..., row_count: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("max_context", "max_message_bytes", "checkpoint_ids", "version", "shares_memory")
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    MAX_MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_IDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SHARES_MEMORY_FIELD_NUMBER: _ClassVar[int]
    max_context: int
    max_message_bytes: int
    checkpoint_ids: _containers.RepeatedScalarFieldContainer[int]
    version: str
    shares_memory: bool
    def __init__(self, max_context: _Optional[int] = ..., max_message_bytes: _Optional[int] = ..., checkpoint_ids: _Optional[_Iterable[int]] = ..., version: _Optional[str] = ..., shares_memory: _Optional[bool] = ...) -> None: ...

class SharedRows(_message.Message):
    __slots__ = ("first_row", "row_count")
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    first_row: int
    row_count: int
    def __init__(self, first_row: _Optional[int] = ..., row_count: _Optional[int] = ...) -> None: ...

class Look(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Open(_message.Message):
    __slots__ = ("sequence_id", "epoch", "coverage_first", "trail")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIRST_FIELD_NUMBER: _ClassVar[int]
    TRAIL_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    coverage_first: int
    trail: Trail
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., coverage_first: _Optional[int] = ..., trail: _Optional[_Union[Trail, _Mapping]] = ...) -> None: ...

class Trail(_message.Message):
    __slots__ = ("request_id", "x_request_id", "traceparent")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    X_REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    x_request_id: str
    traceparent: str
    def __init__(self, request_id: _Optional[str] = ..., x_request_id: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("sequence_id", "epoch", "first_position", "rows", "shared_rows")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SHARED_ROWS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    first_position: int
    rows: _tensor_pb2.Tensor
    shared_rows: SharedRows
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., first_position: _Optional[int] = ..., rows: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., shared_rows: _Optional[_Union[SharedRows, _Mapping]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("round_index", "rows")
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    round_index: int
    rows: _containers.RepeatedCompositeFieldContainer[RoundRow]
    def __init__(self, round_index: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RoundRow, _Mapping]]] = ...) -> None: ...

class RoundRow(_message.Message):
    __slots__ = ("sequence_id", "epoch", "first_position", "features", "proposal", "shared_features")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    SHARED_FEATURES_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    first_position: int
    features: _tensor_pb2.Tensor
    proposal: ProposalRequest
    shared_features: SharedRows
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., first_position: _Optional[int] = ..., features: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., proposal: _Optional[_Union[ProposalRequest, _Mapping]] = ..., shared_features: _Optional[_Union[SharedRows, _Mapping]] = ...) -> None: ...

class ProposalRequest(_message.Message):
    __slots__ = ("frontier", "anchor", "live", "temperature", "seed", "tree_nodes", "tree_paths")
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_FIELD_NUMBER: _ClassVar[int]
    LIVE_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    TREE_PATHS_FIELD_NUMBER: _ClassVar[int]
    frontier: int
    anchor: int
    live: int
    temperature: float
    seed: int
    tree_nodes: int
    tree_paths: int
    def __init__(self, frontier: _Optional[int] = ..., anchor: _Optional[int] = ..., live: _Optional[int] = ..., temperature: _Optional[float] = ..., seed: _Optional[int] = ..., tree_nodes: _Optional[int] = ..., tree_paths: _Optional[int] = ...) -> None: ...

class RoundReply(_message.Message):
    __slots__ = ("round_index", "rows", "service_ns", "materialize_ns", "draft_ns")
    ROUND_INDEX_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SERVICE_NS_FIELD_NUMBER: _ClassVar[int]
    MATERIALIZE_NS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    round_index: int
    rows: _containers.RepeatedCompositeFieldContainer[RoundReplyRow]
    service_ns: int
    materialize_ns: int
    draft_ns: int
    def __init__(self, round_index: _Optional[int] = ..., rows: _Optional[_Iterable[_Union[RoundReplyRow, _Mapping]]] = ..., service_ns: _Optional[int] = ..., materialize_ns: _Optional[int] = ..., draft_ns: _Optional[int] = ...) -> None: ...

class RoundReplyRow(_message.Message):
    __slots__ = ("sequence_id", "epoch", "context_frontier", "proposal", "fault")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FRONTIER_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    context_frontier: int
    proposal: Proposal
    fault: _status_pb2.Status
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., context_frontier: _Optional[int] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., fault: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("frontier", "token_ids", "point_mass", "conditional", "parents")
    FRONTIER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    POINT_MASS_FIELD_NUMBER: _ClassVar[int]
    CONDITIONAL_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    frontier: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    point_mass: PointMass
    conditional: Conditional
    parents: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, frontier: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., point_mass: _Optional[_Union[PointMass, _Mapping]] = ..., conditional: _Optional[_Union[Conditional, _Mapping]] = ..., parents: _Optional[_Iterable[int]] = ...) -> None: ...

class PointMass(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Conditional(_message.Message):
    __slots__ = ("candidate_ids", "probabilities")
    CANDIDATE_IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    candidate_ids: _tensor_pb2.Tensor
    probabilities: _tensor_pb2.Tensor
    def __init__(self, candidate_ids: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ..., probabilities: _Optional[_Union[_tensor_pb2.Tensor, _Mapping]] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("sequence_id", "epoch")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class SequenceFault(_message.Message):
    __slots__ = ("sequence_id", "epoch", "fault")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    fault: _status_pb2.Status
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., fault: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Capture(_message.Message):
    __slots__ = ("checkpoint_id", "sequence_id", "epoch", "context_frontier")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FRONTIER_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: int
    sequence_id: int
    epoch: int
    context_frontier: int
    def __init__(self, checkpoint_id: _Optional[int] = ..., sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., context_frontier: _Optional[int] = ...) -> None: ...

class CaptureReply(_message.Message):
    __slots__ = ("checkpoint_id", "fault", "evicted_checkpoint_ids")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    EVICTED_CHECKPOINT_IDS_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: int
    fault: _status_pb2.Status
    evicted_checkpoint_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checkpoint_id: _Optional[int] = ..., fault: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., evicted_checkpoint_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Restore(_message.Message):
    __slots__ = ("checkpoint_id", "sequence_id", "epoch", "context_frontier", "trail")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FRONTIER_FIELD_NUMBER: _ClassVar[int]
    TRAIL_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: int
    sequence_id: int
    epoch: int
    context_frontier: int
    trail: Trail
    def __init__(self, checkpoint_id: _Optional[int] = ..., sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., context_frontier: _Optional[int] = ..., trail: _Optional[_Union[Trail, _Mapping]] = ...) -> None: ...

class RestoreReply(_message.Message):
    __slots__ = ("checkpoint_id", "sequence_id", "epoch", "coverage_first", "fault")
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIRST_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: int
    sequence_id: int
    epoch: int
    coverage_first: int
    fault: _status_pb2.Status
    def __init__(self, checkpoint_id: _Optional[int] = ..., sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., coverage_first: _Optional[int] = ..., fault: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Fork(_message.Message):
    __slots__ = ("source_sequence_id", "source_epoch", "sequence_id", "epoch", "context_frontier", "trail")
    SOURCE_SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_FRONTIER_FIELD_NUMBER: _ClassVar[int]
    TRAIL_FIELD_NUMBER: _ClassVar[int]
    source_sequence_id: int
    source_epoch: int
    sequence_id: int
    epoch: int
    context_frontier: int
    trail: Trail
    def __init__(self, source_sequence_id: _Optional[int] = ..., source_epoch: _Optional[int] = ..., sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., context_frontier: _Optional[int] = ..., trail: _Optional[_Union[Trail, _Mapping]] = ...) -> None: ...

class ForkReply(_message.Message):
    __slots__ = ("sequence_id", "epoch", "coverage_first", "fault")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COVERAGE_FIRST_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    epoch: int
    coverage_first: int
    fault: _status_pb2.Status
    def __init__(self, sequence_id: _Optional[int] = ..., epoch: _Optional[int] = ..., coverage_first: _Optional[int] = ..., fault: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class Drop(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: int
    def __init__(self, checkpoint_id: _Optional[int] = ...) -> None: ...

class DropReply(_message.Message):
    __slots__ = ("checkpoint_id",)
    CHECKPOINT_ID_FIELD_NUMBER: _ClassVar[int]
    checkpoint_id: int
    def __init__(self, checkpoint_id: _Optional[int] = ...) -> None: ...
