from paceline.v1 import verifier_pb2 as _verifier_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class KvDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    KV_DTYPE_UNSPECIFIED: _ClassVar[KvDtype]
    KV_DTYPE_FLOAT32: _ClassVar[KvDtype]
    KV_DTYPE_BFLOAT16: _ClassVar[KvDtype]
    KV_DTYPE_INT8: _ClassVar[KvDtype]
KV_DTYPE_UNSPECIFIED: KvDtype
KV_DTYPE_FLOAT32: KvDtype
KV_DTYPE_BFLOAT16: KvDtype
KV_DTYPE_INT8: KvDtype

class SegmentLayout(_message.Message):
    __slots__ = ("layers", "heads", "head_dim", "dtype", "capacity", "pages", "hidden_states")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    layers: int
    heads: int
    head_dim: int
    dtype: KvDtype
    capacity: int
    pages: KvPages
    hidden_states: HiddenStateLayout
    def __init__(self, layers: _Optional[int] = ..., heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[KvDtype, str]] = ..., capacity: _Optional[int] = ..., pages: _Optional[_Union[KvPages, _Mapping]] = ..., hidden_states: _Optional[_Union[HiddenStateLayout, _Mapping]] = ...) -> None: ...

class KvPages(_message.Message):
    __slots__ = ("memory", "page_size")
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    memory: CudaMemory
    page_size: int
    def __init__(self, memory: _Optional[_Union[CudaMemory, _Mapping]] = ..., page_size: _Optional[int] = ...) -> None: ...

class HiddenStateLayout(_message.Message):
    __slots__ = ("layers", "hidden_size", "slots", "offset", "dtype", "table_offset")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TABLE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    hidden_size: int
    slots: int
    offset: int
    dtype: KvDtype
    table_offset: int
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., hidden_size: _Optional[int] = ..., slots: _Optional[int] = ..., offset: _Optional[int] = ..., dtype: _Optional[_Union[KvDtype, str]] = ..., table_offset: _Optional[int] = ...) -> None: ...

class CudaMemory(_message.Message):
    __slots__ = ("device_uuid", "handle", "byte_offset", "byte_size")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    BYTE_OFFSET_FIELD_NUMBER: _ClassVar[int]
    BYTE_SIZE_FIELD_NUMBER: _ClassVar[int]
    device_uuid: bytes
    handle: bytes
    byte_offset: int
    byte_size: int
    def __init__(self, device_uuid: _Optional[bytes] = ..., handle: _Optional[bytes] = ..., byte_offset: _Optional[int] = ..., byte_size: _Optional[int] = ...) -> None: ...

class FollowCacheRequest(_message.Message):
    __slots__ = ("subscribe", "ack")
    SUBSCRIBE_FIELD_NUMBER: _ClassVar[int]
    ACK_FIELD_NUMBER: _ClassVar[int]
    subscribe: FollowSubscribe
    ack: FollowAck
    def __init__(self, subscribe: _Optional[_Union[FollowSubscribe, _Mapping]] = ..., ack: _Optional[_Union[FollowAck, _Mapping]] = ...) -> None: ...

class FollowSubscribe(_message.Message):
    __slots__ = ("read_grant", "layers", "budget", "policy", "positions_only", "hidden_state_layers", "hidden_state_window")
    READ_GRANT_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_ONLY_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    read_grant: bytes
    layers: _containers.RepeatedScalarFieldContainer[int]
    budget: int
    policy: str
    positions_only: bool
    hidden_state_layers: _containers.RepeatedScalarFieldContainer[int]
    hidden_state_window: int
    def __init__(self, read_grant: _Optional[bytes] = ..., layers: _Optional[_Iterable[int]] = ..., budget: _Optional[int] = ..., policy: _Optional[str] = ..., positions_only: _Optional[bool] = ..., hidden_state_layers: _Optional[_Iterable[int]] = ..., hidden_state_window: _Optional[int] = ...) -> None: ...

class FollowAck(_message.Message):
    __slots__ = ("update_id", "budget")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FIELD_NUMBER: _ClassVar[int]
    update_id: int
    budget: int
    def __init__(self, update_id: _Optional[int] = ..., budget: _Optional[int] = ...) -> None: ...

class FollowCacheResponse(_message.Message):
    __slots__ = ("update_id", "chunks", "committed_length", "epoch", "last", "drops", "shape", "hidden_states")
    UPDATE_ID_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    DROPS_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    update_id: int
    chunks: _containers.RepeatedCompositeFieldContainer[KvChunk]
    committed_length: int
    epoch: int
    last: bool
    drops: _containers.RepeatedCompositeFieldContainer[KvDrop]
    shape: KvShape
    hidden_states: _containers.RepeatedCompositeFieldContainer[_verifier_pb2.HiddenStates]
    def __init__(self, update_id: _Optional[int] = ..., chunks: _Optional[_Iterable[_Union[KvChunk, _Mapping]]] = ..., committed_length: _Optional[int] = ..., epoch: _Optional[int] = ..., last: _Optional[bool] = ..., drops: _Optional[_Iterable[_Union[KvDrop, _Mapping]]] = ..., shape: _Optional[_Union[KvShape, _Mapping]] = ..., hidden_states: _Optional[_Iterable[_Union[_verifier_pb2.HiddenStates, _Mapping]]] = ...) -> None: ...

class KvShape(_message.Message):
    __slots__ = ("layers", "heads", "head_dim", "dtype", "wire_dtype", "hidden_size")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    WIRE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SIZE_FIELD_NUMBER: _ClassVar[int]
    layers: int
    heads: int
    head_dim: int
    dtype: KvDtype
    wire_dtype: KvDtype
    hidden_size: int
    def __init__(self, layers: _Optional[int] = ..., heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[_Union[KvDtype, str]] = ..., wire_dtype: _Optional[_Union[KvDtype, str]] = ..., hidden_size: _Optional[int] = ...) -> None: ...

class KvChunk(_message.Message):
    __slots__ = ("layer", "positions", "keys", "values", "key_scales", "value_scales")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    KEYS_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    KEY_SCALES_FIELD_NUMBER: _ClassVar[int]
    VALUE_SCALES_FIELD_NUMBER: _ClassVar[int]
    layer: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    keys: bytes
    values: bytes
    key_scales: _containers.RepeatedScalarFieldContainer[float]
    value_scales: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, layer: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ..., keys: _Optional[bytes] = ..., values: _Optional[bytes] = ..., key_scales: _Optional[_Iterable[float]] = ..., value_scales: _Optional[_Iterable[float]] = ...) -> None: ...

class KvDrop(_message.Message):
    __slots__ = ("layer", "positions")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    layer: int
    positions: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, layer: _Optional[int] = ..., positions: _Optional[_Iterable[int]] = ...) -> None: ...
