from paceline.v1 import drafter_pb2 as _drafter_pb2
from paceline.v1 import sampling_pb2 as _sampling_pb2
from paceline.v1 import tree_pb2 as _tree_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ProtocolVersion(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PROTOCOL_VERSION_UNSPECIFIED: _ClassVar[ProtocolVersion]
    PROTOCOL_VERSION_1: _ClassVar[ProtocolVersion]

class Carrier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CARRIER_UNSPECIFIED: _ClassVar[Carrier]
    CARRIER_SOCKET: _ClassVar[Carrier]
    CARRIER_STREAM: _ClassVar[Carrier]

class NoDraftReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    NO_DRAFT_REASON_UNSPECIFIED: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_NO_DRAFTER: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_NODE_BUDGET: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_NOT_READY: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_LATE: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_EMPTY: _ClassVar[NoDraftReason]
    NO_DRAFT_REASON_LAST_TOKEN: _ClassVar[NoDraftReason]
PROTOCOL_VERSION_UNSPECIFIED: ProtocolVersion
PROTOCOL_VERSION_1: ProtocolVersion
CARRIER_UNSPECIFIED: Carrier
CARRIER_SOCKET: Carrier
CARRIER_STREAM: Carrier
NO_DRAFT_REASON_UNSPECIFIED: NoDraftReason
NO_DRAFT_REASON_NO_DRAFTER: NoDraftReason
NO_DRAFT_REASON_NODE_BUDGET: NoDraftReason
NO_DRAFT_REASON_NOT_READY: NoDraftReason
NO_DRAFT_REASON_LATE: NoDraftReason
NO_DRAFT_REASON_EMPTY: NoDraftReason
NO_DRAFT_REASON_LAST_TOKEN: NoDraftReason

class GetModelRequest(_message.Message):
    __slots__ = ("known_tokenizer_digest", "omit_tokenizer")
    KNOWN_TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    OMIT_TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    known_tokenizer_digest: str
    omit_tokenizer: bool
    def __init__(self, known_tokenizer_digest: _Optional[str] = ..., omit_tokenizer: _Optional[bool] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "architecture", "vocab_size", "max_context", "eos_token_ids", "bos_token_id", "dtype", "target_fingerprint", "tokenizer_digest", "tokenizer_gzip", "chat_template", "max_tree_nodes", "layers", "kv_heads", "head_dim", "hidden_size", "instance_id", "batch_invariant", "lease_ms", "batch_invariance_reason", "weights", "kv_cache_dtype", "draining", "generations", "drafter_services", "protocol_version", "named_chat_templates", "special_tokens", "local_sources", "numerics")
    class NamedChatTemplatesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class SpecialTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BOS_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_GZIP_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    MAX_TREE_NODES_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_INVARIANCE_REASON_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_SERVICES_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NAMED_CHAT_TEMPLATES_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_SOURCES_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    name: str
    architecture: str
    vocab_size: int
    max_context: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bos_token_id: int
    dtype: str
    target_fingerprint: str
    tokenizer_digest: str
    tokenizer_gzip: bytes
    chat_template: str
    max_tree_nodes: int
    layers: int
    kv_heads: int
    head_dim: int
    hidden_size: int
    instance_id: str
    batch_invariant: bool
    lease_ms: int
    batch_invariance_reason: str
    weights: str
    kv_cache_dtype: str
    draining: bool
    generations: int
    drafter_services: _containers.RepeatedCompositeFieldContainer[JoinedService]
    protocol_version: ProtocolVersion
    named_chat_templates: _containers.ScalarMap[str, str]
    special_tokens: _containers.ScalarMap[str, str]
    local_sources: _containers.RepeatedScalarFieldContainer[str]
    numerics: _containers.RepeatedCompositeFieldContainer[RuleOfNumerics]
    def __init__(self, name: _Optional[str] = ..., architecture: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_context: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., bos_token_id: _Optional[int] = ..., dtype: _Optional[str] = ..., target_fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., tokenizer_gzip: _Optional[bytes] = ..., chat_template: _Optional[str] = ..., max_tree_nodes: _Optional[int] = ..., layers: _Optional[int] = ..., kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., hidden_size: _Optional[int] = ..., instance_id: _Optional[str] = ..., batch_invariant: _Optional[bool] = ..., lease_ms: _Optional[int] = ..., batch_invariance_reason: _Optional[str] = ..., weights: _Optional[str] = ..., kv_cache_dtype: _Optional[str] = ..., draining: _Optional[bool] = ..., generations: _Optional[int] = ..., drafter_services: _Optional[_Iterable[_Union[JoinedService, _Mapping]]] = ..., protocol_version: _Optional[_Union[ProtocolVersion, str]] = ..., named_chat_templates: _Optional[_Mapping[str, str]] = ..., special_tokens: _Optional[_Mapping[str, str]] = ..., local_sources: _Optional[_Iterable[str]] = ..., numerics: _Optional[_Iterable[_Union[RuleOfNumerics, _Mapping]]] = ...) -> None: ...

class RuleOfNumerics(_message.Message):
    __slots__ = ("region", "case", "implementation", "constants")
    class ConstantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    REGION_FIELD_NUMBER: _ClassVar[int]
    CASE_FIELD_NUMBER: _ClassVar[int]
    IMPLEMENTATION_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    region: str
    case: str
    implementation: str
    constants: _containers.ScalarMap[str, str]
    def __init__(self, region: _Optional[str] = ..., case: _Optional[str] = ..., implementation: _Optional[str] = ..., constants: _Optional[_Mapping[str, str]] = ...) -> None: ...

class JoinedService(_message.Message):
    __slots__ = ("drafters", "default_drafter", "carrier", "sequences")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[_drafter_pb2.DrafterInfo]
    default_drafter: str
    carrier: Carrier
    sequences: int
    def __init__(self, drafters: _Optional[_Iterable[_Union[_drafter_pb2.DrafterInfo, _Mapping]]] = ..., default_drafter: _Optional[str] = ..., carrier: _Optional[_Union[Carrier, str]] = ..., sequences: _Optional[int] = ...) -> None: ...

class CreateCacheRequest(_message.Message):
    __slots__ = ("prompt_tokens", "output_tokens", "sampling", "max_new_tokens", "stop_token_ids", "ignore_eos", "logprobs", "top_logprobs", "parent_handle", "traceparent", "drafter", "user", "prompt_logprobs")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PARENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: _containers.RepeatedScalarFieldContainer[int]
    output_tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.SamplingParams
    max_new_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: bool
    top_logprobs: int
    parent_handle: bytes
    traceparent: str
    drafter: str
    user: str
    prompt_logprobs: int
    def __init__(self, prompt_tokens: _Optional[_Iterable[int]] = ..., output_tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.SamplingParams, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logprobs: _Optional[bool] = ..., top_logprobs: _Optional[int] = ..., parent_handle: _Optional[bytes] = ..., traceparent: _Optional[str] = ..., drafter: _Optional[str] = ..., user: _Optional[str] = ..., prompt_logprobs: _Optional[int] = ...) -> None: ...

class CreateCacheResponse(_message.Message):
    __slots__ = ("progress", "created")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    progress: PrefillProgress
    created: CacheCreated
    def __init__(self, progress: _Optional[_Union[PrefillProgress, _Mapping]] = ..., created: _Optional[_Union[CacheCreated, _Mapping]] = ...) -> None: ...

class PrefillProgress(_message.Message):
    __slots__ = ("prefilled_tokens", "total_tokens")
    PREFILLED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prefilled_tokens: int
    total_tokens: int
    def __init__(self, prefilled_tokens: _Optional[int] = ..., total_tokens: _Optional[int] = ...) -> None: ...

class CacheCreated(_message.Message):
    __slots__ = ("handle", "read_grant", "first", "reused_tokens", "epoch", "lease_ms", "queue_us", "prefill_us", "prompt_logprobs", "top_prompt_logprobs")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    READ_GRANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    REUSED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    read_grant: bytes
    first: RoundResult
    reused_tokens: int
    epoch: int
    lease_ms: int
    queue_us: int
    prefill_us: int
    prompt_logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    def __init__(self, handle: _Optional[bytes] = ..., read_grant: _Optional[bytes] = ..., first: _Optional[_Union[RoundResult, _Mapping]] = ..., reused_tokens: _Optional[int] = ..., epoch: _Optional[int] = ..., lease_ms: _Optional[int] = ..., queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., prompt_logprobs: _Optional[_Iterable[float]] = ..., top_prompt_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("start", "credits")
    START_FIELD_NUMBER: _ClassVar[int]
    CREDITS_FIELD_NUMBER: _ClassVar[int]
    start: GenerateStart
    credits: int
    def __init__(self, start: _Optional[_Union[GenerateStart, _Mapping]] = ..., credits: _Optional[int] = ...) -> None: ...

class GenerateStart(_message.Message):
    __slots__ = ("handle", "position", "drafter", "always_draft", "max_nodes", "draft_timeout_ms", "traceparent", "isolated")
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ALWAYS_DRAFT_FIELD_NUMBER: _ClassVar[int]
    MAX_NODES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    position: int
    drafter: str
    always_draft: bool
    max_nodes: int
    draft_timeout_ms: int
    traceparent: str
    isolated: bool
    def __init__(self, handle: _Optional[bytes] = ..., position: _Optional[int] = ..., drafter: _Optional[str] = ..., always_draft: _Optional[bool] = ..., max_nodes: _Optional[int] = ..., draft_timeout_ms: _Optional[int] = ..., traceparent: _Optional[str] = ..., isolated: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("rounds",)
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    rounds: _containers.RepeatedCompositeFieldContainer[Round]
    def __init__(self, rounds: _Optional[_Iterable[_Union[Round, _Mapping]]] = ...) -> None: ...

class Round(_message.Message):
    __slots__ = ("position", "result", "steps", "tree", "checked_nodes", "no_draft", "drafter", "round_us", "draft_us", "verify_us", "queue_us", "kv_bytes", "node_budget", "batch_tokens", "epoch", "fallbacks", "fallback_message", "plain_us", "sources")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    CHECKED_NODES_FIELD_NUMBER: _ClassVar[int]
    NO_DRAFT_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    ROUND_US_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    NODE_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PLAIN_US_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    position: int
    result: RoundResult
    steps: int
    tree: _tree_pb2.TokenTree
    checked_nodes: int
    no_draft: NoDraftReason
    drafter: str
    round_us: int
    draft_us: int
    verify_us: int
    queue_us: int
    kv_bytes: int
    node_budget: int
    batch_tokens: int
    epoch: int
    fallbacks: _containers.RepeatedScalarFieldContainer[str]
    fallback_message: str
    plain_us: int
    sources: _containers.RepeatedCompositeFieldContainer[SourceShare]
    def __init__(self, position: _Optional[int] = ..., result: _Optional[_Union[RoundResult, _Mapping]] = ..., steps: _Optional[int] = ..., tree: _Optional[_Union[_tree_pb2.TokenTree, _Mapping]] = ..., checked_nodes: _Optional[int] = ..., no_draft: _Optional[_Union[NoDraftReason, str]] = ..., drafter: _Optional[str] = ..., round_us: _Optional[int] = ..., draft_us: _Optional[int] = ..., verify_us: _Optional[int] = ..., queue_us: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., node_budget: _Optional[int] = ..., batch_tokens: _Optional[int] = ..., epoch: _Optional[int] = ..., fallbacks: _Optional[_Iterable[str]] = ..., fallback_message: _Optional[str] = ..., plain_us: _Optional[int] = ..., sources: _Optional[_Iterable[_Union[SourceShare, _Mapping]]] = ...) -> None: ...

class SourceShare(_message.Message):
    __slots__ = ("source", "drafted", "checked", "accepted")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    CHECKED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    source: str
    drafted: int
    checked: int
    accepted: int
    def __init__(self, source: _Optional[str] = ..., drafted: _Optional[int] = ..., checked: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class RoundResult(_message.Message):
    __slots__ = ("tokens", "accepted_nodes", "logprobs", "top_logprobs", "finish_reason", "committed_length")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_NODES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    accepted_nodes: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    top_logprobs: _containers.RepeatedCompositeFieldContainer[TopLogprobs]
    finish_reason: _sampling_pb2.FinishReason
    committed_length: int
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., accepted_nodes: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., top_logprobs: _Optional[_Iterable[_Union[TopLogprobs, _Mapping]]] = ..., finish_reason: _Optional[_Union[_sampling_pb2.FinishReason, str]] = ..., committed_length: _Optional[int] = ...) -> None: ...

class TopLogprobs(_message.Message):
    __slots__ = ("tokens", "logprobs")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, tokens: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class HiddenStates(_message.Message):
    __slots__ = ("layer", "start", "count", "data")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    layer: int
    start: int
    count: int
    data: bytes
    def __init__(self, layer: _Optional[int] = ..., start: _Optional[int] = ..., count: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class RenewLeaseRequest(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    def __init__(self, handle: _Optional[bytes] = ...) -> None: ...

class RenewLeaseResponse(_message.Message):
    __slots__ = ("lease_ms", "epoch")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    epoch: int
    def __init__(self, lease_ms: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class ReleaseCacheRequest(_message.Message):
    __slots__ = ("handle",)
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    handle: bytes
    def __init__(self, handle: _Optional[bytes] = ...) -> None: ...

class ReleaseCacheResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: bool
    def __init__(self, released: _Optional[bool] = ...) -> None: ...
