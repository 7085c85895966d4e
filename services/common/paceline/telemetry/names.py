"""All names of Paceline's telemetry, described in `docs/metrics.md` and `docs/look-inside.md`.

Names outside of `specdec` are those of OpenTelemetry's semantic conventions.
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


class Metric:
    """Names of metrics as in Prometheus, without the `_total` of counters."""

    NUM_DRAFTS: Final = "specdec_num_drafts"
    NUM_DRAFT_TOKENS: Final = "specdec_num_draft_tokens"
    NUM_ACCEPTED: Final = "specdec_num_accepted_tokens"
    NUM_ACCEPTED_PER_POS: Final = "specdec_num_accepted_tokens_per_pos"
    NUM_CHECKED: Final = "specdec_num_checked_tokens"
    SOURCE_TOKENS: Final = "specdec_source_tokens"
    NODE_BUDGET: Final = "specdec_node_budget_tokens"
    SCHEDULE_SECONDS: Final = "specdec_schedule_seconds"
    PROMPT_TOKENS: Final = "specdec_prompt_tokens"
    CACHED_PROMPT_TOKENS: Final = "specdec_cached_prompt_tokens"
    GENERATION_TOKENS: Final = "specdec_generation_tokens"
    FREE_RUN_TOKENS: Final = "specdec_free_run_tokens"
    ROUNDS: Final = "specdec_rounds"
    DRAFT_SECONDS: Final = "specdec_draft_seconds"
    REQUESTS: Final = "specdec_requests"
    REQUESTS_RUNNING: Final = "specdec_num_requests_running"
    REQUESTS_WAITING: Final = "specdec_num_requests_waiting"
    VERIFY_SECONDS: Final = "specdec_verify_seconds"
    VERIFY_QUEUE_SECONDS: Final = "specdec_verify_queue_seconds"
    PREFILL_SECONDS: Final = "specdec_prefill_seconds"
    PREFILL_QUEUE_SECONDS: Final = "specdec_prefill_queue_seconds"
    EMITTED_PER_ROUND: Final = "specdec_accepted_length_tokens"

    REQUEST_DURATION: Final = "gen_ai_server_request_duration_seconds"
    TIME_TO_FIRST_TOKEN: Final = "gen_ai_server_time_to_first_token_seconds"
    TIME_PER_OUTPUT_TOKEN: Final = "gen_ai_server_time_per_output_token_seconds"

    DRAFT_LINKS: Final = "specdec_draft_links"
    UNUSED_DRAFTERS: Final = "specdec_unused_drafters"
    START_SECONDS: Final = "specdec_start_seconds"
    ENGINE_STEPS: Final = "specdec_engine_steps"
    ENGINE_BUSY_SECONDS: Final = "specdec_engine_busy_seconds"
    ENGINE_BATCH_TOKENS: Final = "specdec_engine_batch_tokens"
    ENGINE_QUEUE: Final = "specdec_engine_queue_length"
    CUDA_GRAPHS: Final = "specdec_cuda_graphs"

    KV_USED_BYTES: Final = "specdec_kv_cache_used_bytes"
    KV_PREFIX_BYTES: Final = "specdec_kv_cache_prefix_bytes"
    KV_LIMIT_BYTES: Final = "specdec_kv_cache_limit_bytes"
    KV_USAGE: Final = "specdec_kv_cache_usage_ratio"
    LEASES: Final = "specdec_leases"
    LEASES_LIMIT: Final = "specdec_leases_limit"
    LEASES_EXPIRED: Final = "specdec_leases_expired"
    TARGET: Final = "specdec_target"
    FOLLOW_STREAMS: Final = "specdec_follow_streams"
    FOLLOW_UPDATES: Final = "specdec_follow_updates"
    FOLLOW_BYTES: Final = "specdec_follow_bytes"

    DRAFTER_ROUNDS: Final = "specdec_drafter_rounds"
    DRAFTER_DRAFT_TOKENS: Final = "specdec_drafter_draft_tokens"
    DRAFTER_DRAFT_SECONDS: Final = "specdec_drafter_draft_seconds"
    DRAFTER_QUEUE_SECONDS: Final = "specdec_drafter_queue_seconds"
    DRAFTER_STREAMS: Final = "specdec_drafter_streams"
    DRAFTER_TRAFFIC: Final = "specdec_drafter_traffic_ratio"
    DRAFTER_STATE: Final = "specdec_drafter_state"
    DRAFTER_WEIGHT_BYTES: Final = "specdec_drafter_weight_bytes"
    DRAFTER_MAPPED_KV_BYTES: Final = "specdec_drafter_mapped_kv_bytes"
    DRAFTER_FOLLOWED_STREAMS: Final = "specdec_drafter_followed_streams"
    DRAFTER_FOLLOWED_UPDATES: Final = "specdec_drafter_followed_updates"
    DRAFTER_FOLLOWED_BYTES: Final = "specdec_drafter_followed_bytes"
    DRAFTER_FOLLOWED_POSITIONS: Final = "specdec_drafter_followed_positions"
    DRAFTER_LINKS: Final = "specdec_drafter_links"
    DRAFTER_QUEUE: Final = "specdec_drafter_queue_length"

    GATEWAY_REQUESTS: Final = "specdec_gateway_requests"
    GATEWAY_REQUEST_SECONDS: Final = "specdec_gateway_request_seconds"
    GATEWAY_FIRST_TOKEN_SECONDS: Final = "specdec_gateway_time_to_first_token_seconds"
    GATEWAY_TEXTS: Final = "specdec_gateway_texts"
    GATEWAY_PROMPT_TOKENS: Final = "specdec_gateway_prompt_tokens"
    GATEWAY_GENERATION_TOKENS: Final = "specdec_gateway_generation_tokens"
    GATEWAY_IN_FLIGHT: Final = "specdec_gateway_requests_in_flight"
    GATEWAY_VERIFIER_STATE: Final = "specdec_gateway_verifier_state"
    GATEWAY_VERIFIER_TEXTS: Final = "specdec_gateway_verifier_texts_running"
    GATEWAY_FALLBACKS: Final = "specdec_gateway_fallbacks"

    RPCS: Final = "specdec_rpcs"


CREATE_CACHE: Final = {
    Attribute.RPC_SYSTEM: "grpc",
    Attribute.RPC_METHOD: "paceline.v1.VerifierService/CreateCache",
}  # attributes of both spans of a prefill
