"""All names of Paceline's spans, described in `docs/look-inside.md`.

Names outside of `specdec` are from OpenTelemetry's semantic conventions.
"""

from typing import Final

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"
"""Version of the conventions that names follow."""

PROVIDER: Final = "paceline"  # value of gen_ai.provider.name, which the conventions require


class Span:
    """Names of spans. Calls have the name of their method, requests of HTTP method and route."""

    GENERATION: Final = "text_completion"
    """A whole generation of the client; followed by the name of the model."""
    CHAT: Final = "chat"
    """An answer of the client in a conversation; followed by the name of the model."""
    PREFILL: Final = "specdec.prefill"
    ROUND: Final = "specdec.round"
    DRAFT: Final = "specdec.draft"
    VERIFY: Final = "specdec.verify"
    VERIFIER_PREFILL: Final = "specdec.verifier.prefill"
    DRAFTER_OPEN: Final = "specdec.drafter.open"
    DRAFTER_ROUND: Final = "specdec.drafter.round"


class Attribute:
    """Keys of span attributes."""

    OPERATION: Final = "gen_ai.operation.name"
    PROVIDER: Final = "gen_ai.provider.name"
    REQUEST_MODEL: Final = "gen_ai.request.model"
    RESPONSE_MODEL: Final = "gen_ai.response.model"
    REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
    REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
    REQUEST_TOP_P: Final = "gen_ai.request.top_p"
    REQUEST_TOP_K: Final = "gen_ai.request.top_k"
    REQUEST_SEED: Final = "gen_ai.request.seed"
    REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
    REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
    FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
    INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
    OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
    REUSED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
    ERROR_TYPE: Final = "error.type"
    SERVER_ADDRESS: Final = "server.address"
    SERVER_PORT: Final = "server.port"
    RPC_SYSTEM: Final = "rpc.system.name"
    RPC_METHOD: Final = "rpc.method"
    RPC_STATUS: Final = "rpc.response.status_code"
    HTTP_METHOD: Final = "http.request.method"
    HTTP_ROUTE: Final = "http.route"
    HTTP_STATUS: Final = "http.response.status_code"
    URL_PATH: Final = "url.path"
    URL_SCHEME: Final = "url.scheme"

    # Of resources.
    SERVICE_NAME: Final = "service.name"
    SERVICE_VERSION: Final = "service.version"
    HOST_NAME: Final = "host.name"

    # Speculative decoding: no convention covers it. Durations are in seconds.
    ROUND_INDEX: Final = "specdec.round.index"
    NUM_DRAFTS: Final = "specdec.num_drafts"
    NUM_DRAFT_TOKENS: Final = "specdec.num_draft_tokens"
    NUM_ACCEPTED: Final = "specdec.num_accepted_draft_tokens"
    NUM_EMITTED: Final = "specdec.num_emitted_tokens"
    SOURCES: Final = "specdec.sources"
    SOURCES_DRAFTED: Final = "specdec.sources.num_draft_tokens"
    SOURCES_ACCEPTED: Final = "specdec.sources.num_accepted_draft_tokens"
    TREE_DEPTH: Final = "specdec.tree.depth"
    QUEUE_DURATION: Final = "specdec.queue_duration"
    COMPUTE_DURATION: Final = "specdec.compute_duration"
    BATCH_TOKENS: Final = "specdec.batch_tokens"
    CACHE_EPOCH: Final = "specdec.cache.epoch"
    DRAFTER_NAME: Final = "specdec.drafter.name"
    DRAFTER_METHOD: Final = "specdec.drafter.method"
    DRAFTER_VERSION: Final = "specdec.drafter.version"
    DRAFT_CARRIER: Final = "specdec.draft.carrier"
    NO_DRAFT: Final = "specdec.no_draft"
    KV_TRANSPORT: Final = "specdec.kv.transport"
    KV_BYTES: Final = "specdec.kv.bytes"


CREATE_CACHE: Final = {
    Attribute.RPC_SYSTEM: "grpc",
    Attribute.RPC_METHOD: "paceline.v1.VerifierService/CreateCache",
}  # attributes of both spans of a prefill
