from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListDraftersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListDraftersResponse(_message.Message):
    __slots__ = ("drafters", "default_drafter", "verifiers")
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterInfo]
    default_drafter: str
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierLink]
    def __init__(self, drafters: _Optional[_Iterable[_Union[DrafterInfo, _Mapping]]] = ..., default_drafter: _Optional[str] = ..., verifiers: _Optional[_Iterable[_Union[VerifierLink, _Mapping]]] = ...) -> None: ...

class VerifierLink(_message.Message):
    __slots__ = ("address", "carrier", "sequences", "error")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CARRIER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    address: str
    carrier: str
    sequences: int
    error: str
    def __init__(self, address: _Optional[str] = ..., carrier: _Optional[str] = ..., sequences: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class DrafterInfo(_message.Message):
    __slots__ = ("name", "version", "method", "folder", "traffic_share", "active_streams", "target_fingerprint", "tokenizer_digest", "weight_bytes", "draining", "hidden_state_layers", "hidden_state_window", "rounds", "accepted_length", "draft_us", "failing", "options", "previous_share", "scored_layers", "kv_policy", "reads_kv")
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
    TRAFFIC_SHARE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_STREAMS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATE_WINDOW_FIELD_NUMBER: _ClassVar[int]
    ROUNDS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_US_FIELD_NUMBER: _ClassVar[int]
    FAILING_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_SHARE_FIELD_NUMBER: _ClassVar[int]
    SCORED_LAYERS_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_FIELD_NUMBER: _ClassVar[int]
    READS_KV_FIELD_NUMBER: _ClassVar[int]
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
    hidden_state_layers: _containers.RepeatedScalarFieldContainer[int]
    hidden_state_window: int
    rounds: int
    accepted_length: float
    draft_us: int
    failing: str
    options: _containers.ScalarMap[str, str]
    previous_share: float
    scored_layers: _containers.RepeatedScalarFieldContainer[int]
    kv_policy: str
    reads_kv: bool
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., method: _Optional[str] = ..., folder: _Optional[str] = ..., traffic_share: _Optional[float] = ..., active_streams: _Optional[int] = ..., target_fingerprint: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., draining: _Optional[bool] = ..., hidden_state_layers: _Optional[_Iterable[int]] = ..., hidden_state_window: _Optional[int] = ..., rounds: _Optional[int] = ..., accepted_length: _Optional[float] = ..., draft_us: _Optional[int] = ..., failing: _Optional[str] = ..., options: _Optional[_Mapping[str, str]] = ..., previous_share: _Optional[float] = ..., scored_layers: _Optional[_Iterable[int]] = ..., kv_policy: _Optional[str] = ..., reads_kv: _Optional[bool] = ...) -> None: ...

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
    __slots__ = ("name", "version", "traffic_share")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_SHARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: str
    traffic_share: float
    def __init__(self, name: _Optional[str] = ..., version: _Optional[str] = ..., traffic_share: _Optional[float] = ...) -> None: ...

class ActivateDrafterResponse(_message.Message):
    __slots__ = ("drafter",)
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    drafter: DrafterInfo
    def __init__(self, drafter: _Optional[_Union[DrafterInfo, _Mapping]] = ...) -> None: ...

class RollbackDrafterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RollbackDrafterResponse(_message.Message):
    __slots__ = ("drafters",)
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterInfo]
    def __init__(self, drafters: _Optional[_Iterable[_Union[DrafterInfo, _Mapping]]] = ...) -> None: ...

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
