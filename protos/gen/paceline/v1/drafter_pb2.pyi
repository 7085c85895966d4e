from paceline.v1 import sampling_pb2 as _sampling_pb2
from paceline.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CanaryState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CANARY_STATE_UNSPECIFIED: _ClassVar[CanaryState]
    CANARY_STATE_RUNNING: _ClassVar[CanaryState]
    CANARY_STATE_PROMOTED: _ClassVar[CanaryState]
    CANARY_STATE_ROLLED_BACK: _ClassVar[CanaryState]
    CANARY_STATE_CANCELLED: _ClassVar[CanaryState]
CANARY_STATE_UNSPECIFIED: CanaryState
CANARY_STATE_RUNNING: CanaryState
CANARY_STATE_PROMOTED: CanaryState
CANARY_STATE_ROLLED_BACK: CanaryState
CANARY_STATE_CANCELLED: CanaryState

class DraftRequest(_message.Message):
    __slots__ = ("attach", "round")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    attach: DraftAttach
    round: DraftRound
    def __init__(self, attach: _Optional[_Union[DraftAttach, _Mapping]] = ..., round: _Optional[_Union[DraftRound, _Mapping]] = ...) -> None: ...

class DraftAttach(_message.Message):
    __slots__ = ("drafter", "version", "target_fingerprint", "tokenizer_digest", "vocab_size", "tokens", "sampling", "read_grant", "verifier_address", "prompt_length", "traceparent")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    READ_GRANT_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    version: str
    target_fingerprint: str
    tokenizer_digest: str
    vocab_size: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    read_grant: bytes
    verifier_address: str
    prompt_length: int
    traceparent: str
    def __init__(self, drafter: _Optional[str] = ..., version: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., read_grant: _Optional[bytes] = ..., verifier_address: _Optional[str] = ..., prompt_length: _Optional[int] = ..., traceparent: _Optional[str] = ...) -> None: ...

class DraftRound(_message.Message):
    __slots__ = ("round_id", "new_tokens", "node_budget", "max_depth", "deadline_ms", "traceparent", "committed_length", "total_length")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NODE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    MAX_DEPTH_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    TOTAL_LENGTH_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    new_tokens: _containers.RepeatedScalarFieldContainer[int]
    node_budget: int
    max_depth: int
    deadline_ms: int
    traceparent: str
    committed_length: int
    total_length: int
    def __init__(self, round_id: _Optional[int] = ..., new_tokens: _Optional[_Iterable[int]] = ..., node_budget: _Optional[int] = ..., max_depth: _Optional[int] = ..., deadline_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., committed_length: _Optional[int] = ..., total_length: _Optional[int] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("attached", "tree")
    ATTACHED_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    attached: DraftAttached
    tree: DraftTree
    def __init__(self, attached: _Optional[_Union[DraftAttached, _Mapping]] = ..., tree: _Optional[_Union[DraftTree, _Mapping]] = ...) -> None: ...

class DraftAttached(_message.Message):
    __slots__ = ("drafter", "version", "method", "hidden_state_layers", "hidden_state_window", "max_nodes", "kv_transport")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    KV_TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    version: str
    method: str
    hidden_state_layers: _containers.RepeatedScalarFieldContainer[int]
    hidden_state_window: int
    max_nodes: int
    kv_transport: str
    def __init__(self, drafter: _Optional[str] = ..., version: _Optional[str] = ..., method: _Optional[str] = ..., hidden_state_layers: _Optional[_Iterable[int]] = ..., hidden_state_window: _Optional[int] = ..., max_nodes: _Optional[int] = ..., kv_transport: _Optional[str] = ...) -> None: ...

class DraftTree(_message.Message):
    __slots__ = ("round_id", "tree", "draft_us", "queue_us", "version", "kv_bytes")
    ROUND_ID_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    round_id: int
    tree: _tree_pb2.TokenTree
    draft_us: int
    queue_us: int
    version: str
    kv_bytes: int
    def __init__(self, round_id: _Optional[int] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ..., draft_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., version: _Optional[str] = ..., kv_bytes: _Optional[int] = ...) -> None: ...

class ListDraftersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDraftersResponse(_message.Message):
    __slots__ = ("drafters", "default_drafter", "canaries", "records_texts")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    CANARIES_FIELD_NUMBER: _ClassVar[int]
    RECORDS_TEXTS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterInfo]
    default_drafter: str
    canaries: _containers.RepeatedCompositeFieldContainer[DrafterCanary]
    records_texts: bool
    def __init__(self, drafters: _Optional[_Iterable[_Union[DrafterInfo, _Mapping]]] = ..., default_drafter: _Optional[str] = ..., canaries: _Optional[_Iterable[_Union[DrafterCanary, _Mapping]]] = ..., records_texts: _Optional[bool] = ...) -> None: ...

class DrafterInfo(_message.Message):
    __slots__ = ("name", "version", "method", "folder", "traffic_share", "active_streams", "target_fingerprint", "tokenizer_digest", "weight_bytes", "draining", "check", "hidden_state_layers", "hidden_state_window")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_SHARE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_STREAMS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    CHECK_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    method: str
    folder: str
    traffic_share: float
    active_streams: int
    target_fingerprint: str
    tokenizer_digest: str
    weight_bytes: int
    draining: bool
    check: DrafterCheck
    hidden_state_layers: _containers.RepeatedScalarFieldContainer[int]
    hidden_state_window: int
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., method: _Optional[str] = ..., folder: _Optional[str] = ..., traffic_share: _Optional[float] = ..., active_streams: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., draining: _Optional[bool] = ..., check: _Optional[_Union[DrafterCheck, _Mapping]] = ..., hidden_state_layers: _Optional[_Iterable[int]] = ..., hidden_state_window: _Optional[int] = ...) -> None: ...

class DrafterCheck(_message.Message):
    __slots__ = ("texts", "rounds", "accepted_length", "draft_us")
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    texts: int
    rounds: int
    accepted_length: float
    draft_us: int
    def __init__(self, texts: _Optional[int] = ..., rounds: _Optional[int] = ..., accepted_length: _Optional[float] = ..., draft_us: _Optional[int] = ...) -> None: ...

class LoadDrafterRequest(_message.Message):
    __slots__ = ("name", "version", "method", "folder", "options", "activate")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    FOLDER_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    ACTIVATE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    method: str
    folder: str
    options: _containers.ScalarMap[str, str]
    activate: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., method: _Optional[str] = ..., folder: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ..., activate: _Optional[bool] = ...) -> None: ...

class LoadDrafterResponse(_message.Message):
    __slots__ = ("drafter",)
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    drafter: DrafterInfo
    def __init__(self, drafter: _Optional[_Union[DrafterInfo, _Mapping]] = ...) -> None: ...

class ActivateDrafterRequest(_message.Message):
    __slots__ = ("name", "version", "traffic_share", "canary")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_SHARE_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    traffic_share: float
    canary: CanarySettings
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., traffic_share: _Optional[float] = ..., canary: _Optional[_Union[CanarySettings, _Mapping]] = ...) -> None: ...

class CanarySettings(_message.Message):
    __slots__ = ("confidence", "length_margin", "time_margin", "max_generations")
    CONFIDENCE_FIELD_NUMBER: _ClassVar[int]
    LENGTH_MARGIN_FIELD_NUMBER: _ClassVar[int]
    TIME_MARGIN_FIELD_NUMBER: _ClassVar[int]
    MAX_GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    confidence: float
    length_margin: float
    time_margin: float
    max_generations: int
    def __init__(self, confidence: _Optional[float] = ..., length_margin: _Optional[float] = ..., time_margin: _Optional[float] = ..., max_generations: _Optional[int] = ...) -> None: ...

class DrafterCanary(_message.Message):
    __slots__ = ("name", "canary", "baseline", "settings", "state", "reason", "canary_statistics", "baseline_statistics")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    BASELINE_FIELD_NUMBER: _ClassVar[int]
    SETTINGS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CANARY_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    BASELINE_STATISTICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    canary: str
    baseline: str
    settings: CanarySettings
    state: CanaryState
    reason: str
    canary_statistics: CanaryStatistics
    baseline_statistics: CanaryStatistics
    def __init__(self, name: _Optional[str] = ..., canary: _Optional[str] = ..., baseline: _Optional[str] = ..., settings: _Optional[_Union[CanarySettings, _Mapping]] = ..., state: _Optional[_Union[CanaryState, str]] = ..., reason: _Optional[str] = ..., canary_statistics: _Optional[_Union[CanaryStatistics, _Mapping]] = ..., baseline_statistics: _Optional[_Union[CanaryStatistics, _Mapping]] = ...) -> None: ...

class CanaryStatistics(_message.Message):
    __slots__ = ("generations", "rounds", "accepted_length", "draft_us")
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    generations: int
    rounds: int
    accepted_length: float
    draft_us: int
    def __init__(self, generations: _Optional[int] = ..., rounds: _Optional[int] = ..., accepted_length: _Optional[float] = ..., draft_us: _Optional[int] = ...) -> None: ...

class ActivateDrafterResponse(_message.Message):
    __slots__ = ("drafter",)
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    drafter: DrafterInfo
    def __init__(self, drafter: _Optional[_Union[DrafterInfo, _Mapping]] = ...) -> None: ...

class UnloadDrafterRequest(_message.Message):
    __slots__ = ("name", "version", "force")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    force: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., force: _Optional[bool] = ...) -> None: ...

class UnloadDrafterResponse(_message.Message):
    __slots__ = ("unloaded",)
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    unloaded: bool
    def __init__(self, unloaded: _Optional[bool] = ...) -> None: ...
