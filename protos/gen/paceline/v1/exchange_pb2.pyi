from paceline.v1 import drafter_pb2 as _drafter_pb2
from paceline.v1 import sampling_pb2 as _sampling_pb2
from paceline.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class JoinRequest(_message.Message):
    __slots__ = ("drafters", "use_stream", "opened", "refused", "trees")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    USE_STREAM_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TREES_FIELD_NUMBER: _ClassVar[int]
    drafters: DrafterList
    use_stream: bool
    opened: _containers.RepeatedCompositeFieldContainer[SequenceOpened]
    refused: _containers.RepeatedCompositeFieldContainer[SequenceRefused]
    trees: _containers.RepeatedCompositeFieldContainer[DraftedTree]
    def __init__(self, drafters: _Optional[_Union[DrafterList, _Mapping]] = ..., use_stream: _Optional[bool] = ..., opened: _Optional[_Iterable[_Union[SequenceOpened, _Mapping]]] = ..., refused: _Optional[_Iterable[_Union[SequenceRefused, _Mapping]]] = ..., trees: _Optional[_Iterable[_Union[DraftedTree, _Mapping]]] = ...) -> None: ...

class DrafterList(_message.Message):
    __slots__ = ("drafters", "default_drafter")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[_drafter_pb2.DrafterInfo]
    default_drafter: str
    def __init__(self, drafters: _Optional[_Iterable[_Union[_drafter_pb2.DrafterInfo, _Mapping]]] = ..., default_drafter: _Optional[str] = ...) -> None: ...

class SequenceOpened(_message.Message):
    __slots__ = ("sequence", "drafter", "version", "method", "max_nodes", "kv_transport")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    drafter: str
    version: str
    method: str
    max_nodes: int
    kv_transport: str
    def __init__(self, sequence: _Optional[int] = ..., drafter: _Optional[str] = ..., version: _Optional[str] = ..., method: _Optional[str] = ..., max_nodes: _Optional[int] = ..., kv_transport: _Optional[str] = ...) -> None: ...

class SequenceRefused(_message.Message):
    __slots__ = ("sequence", "reason", "message")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    reason: str
    message: str
    def __init__(self, sequence: _Optional[int] = ..., reason: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DraftedTree(_message.Message):
    __slots__ = ("sequence", "round", "tree", "draft_us", "queue_us", "kv_bytes")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    round: int
    tree: _tree_pb2.TokenTree
    draft_us: int
    queue_us: int
    kv_bytes: int
    def __init__(self, sequence: _Optional[int] = ..., round: _Optional[int] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ..., draft_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("joined", "step", "closed", "open", "rounds", "lists")
    JOINED_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    LISTS_FIELD_NUMBER: _ClassVar[int]
    joined: Joined
    step: int
    closed: _containers.RepeatedScalarFieldContainer[int]
    open: _containers.RepeatedCompositeFieldContainer[OpenSequence]
    rounds: _containers.RepeatedCompositeFieldContainer[DraftRound]
    lists: int
    def __init__(self, joined: _Optional[_Union[Joined, _Mapping]] = ..., step: _Optional[int] = ..., closed: _Optional[_Iterable[int]] = ..., open: _Optional[_Iterable[_Union[OpenSequence, _Mapping]]] = ..., rounds: _Optional[_Iterable[_Union[DraftRound, _Mapping]]] = ..., lists: _Optional[int] = ...) -> None: ...

class Joined(_message.Message):
    __slots__ = ("target_fingerprint", "tokenizer_digest", "vocab_size", "max_tree_nodes", "instance_id", "socket_path", "socket_token")
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    SOCKET_TOKEN_FIELD_NUMBER: _ClassVar[int]
    target_fingerprint: str
    tokenizer_digest: str
    vocab_size: int
    max_tree_nodes: int
    instance_id: str
    socket_path: str
    socket_token: bytes
    def __init__(self, target_fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_tree_nodes: _Optional[int] = ..., instance_id: _Optional[str] = ..., socket_path: _Optional[str] = ..., socket_token: _Optional[bytes] = ...) -> None: ...

class OpenSequence(_message.Message):
    __slots__ = ("sequence", "drafter", "version", "tokens", "prompt_length", "sampling", "read_grant", "owner", "traceparent")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    READ_GRANT_FIELD_NUMBER: _ClassVar[int]
    OWNER_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    drafter: str
    version: str
    tokens: _containers.RepeatedScalarFieldContainer[int]
    prompt_length: int
    sampling: _sampling_pb2.SamplingParams
    read_grant: bytes
    owner: str
    traceparent: str
    def __init__(self, sequence: _Optional[int] = ..., drafter: _Optional[str] = ..., version: _Optional[str] = ..., tokens: _Optional[_Iterable[int]] = ..., prompt_length: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., read_grant: _Optional[bytes] = ..., owner: _Optional[str] = ..., traceparent: _Optional[str] = ...) -> None: ...

class DraftRound(_message.Message):
    __slots__ = ("sequence", "round", "new_tokens", "node_budget", "max_depth", "timeout_us", "committed_length", "total_length", "traceparent")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_US_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    round: int
    new_tokens: _containers.RepeatedScalarFieldContainer[int]
    node_budget: int
    max_depth: int
    timeout_us: int
    committed_length: int
    total_length: int
    traceparent: str
    def __init__(self, sequence: _Optional[int] = ..., round: _Optional[int] = ..., new_tokens: _Optional[_Iterable[int]] = ..., node_budget: _Optional[int] = ..., max_depth: _Optional[int] = ..., timeout_us: _Optional[int] = ..., committed_length: _Optional[int] = ..., total_length: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...
