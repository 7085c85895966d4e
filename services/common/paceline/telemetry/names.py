"""Every name of Paceline's telemetry. `docs/telemetry.md` says what each of them means."""

from typing import Final


class Span:
    """Names of spans."""

    GENERATION: Final = "text_completion"
    """Client, the whole generation; the model's name follows."""
    PREFILL: Final = "specdec.prefill"
    ROUND: Final = "specdec.round"
    DRAFT: Final = "specdec.draft"
    VERIFY: Final = "specdec.verify"
    VERIFIER_PREFILL: Final = "specdec.verifier.prefill"
    VERIFIER_ROUND: Final = "specdec.verifier.round"
    DRAFTER_ATTACH: Final = "specdec.drafter.attach"
    DRAFTER_ROUND: Final = "specdec.drafter.round"


class Attribute:
    """Keys of span attributes."""

    # OpenTelemetry's conventions for generative AI, errors, servers and RPCs.
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
    ERROR_TYPE: Final = "error.type"
    SERVER_ADDRESS: Final = "server.address"
    SERVER_PORT: Final = "server.port"
    RPC_SYSTEM: Final = "rpc.system"
    RPC_SERVICE: Final = "rpc.service"
    RPC_METHOD: Final = "rpc.method"
    RPC_STATUS: Final = "rpc.grpc.status_code"

    # Speculation: no convention covers it.
    ROUND_INDEX: Final = "specdec.round.index"
    ROUND_ID: Final = "specdec.round.id"
    NUM_DRAFTS: Final = "specdec.num_drafts"
    NUM_DRAFT_TOKENS: Final = "specdec.num_draft_tokens"
    NUM_ACCEPTED: Final = "specdec.num_accepted_draft_tokens"
    NUM_EMITTED: Final = "specdec.num_emitted_tokens"
    NODE_BUDGET: Final = "specdec.node_budget"
    TREE_DEPTH: Final = "specdec.tree.depth"
    FREE_RUN_STEPS: Final = "specdec.free_run.steps"
    QUEUE_US: Final = "specdec.queue_us"
    COMPUTE_US: Final = "specdec.compute_us"
    BATCH_TOKENS: Final = "specdec.batch_tokens"
    REUSED_TOKENS: Final = "specdec.reused_tokens"
    CACHE_GENERATION: Final = "specdec.cache.generation"
    DRAFTER_NAME: Final = "specdec.drafter.name"
    DRAFTER_METHOD: Final = "specdec.drafter.method"
    DRAFTER_VERSION: Final = "specdec.drafter.version"
    KV_TRANSPORT: Final = "specdec.kv.transport"
    KV_BYTES: Final = "specdec.kv.bytes"


class Metric:
    """Names of metrics as Prometheus shows them, `_total` of counters left out."""

    NUM_DRAFTS: Final = "specdec_num_drafts"
    NUM_DRAFT_TOKENS: Final = "specdec_num_draft_tokens"
    NUM_ACCEPTED: Final = "specdec_num_accepted_tokens"
    NUM_ACCEPTED_PER_POS: Final = "specdec_num_accepted_tokens_per_pos"
    PROMPT_TOKENS: Final = "specdec_prompt_tokens"
    GENERATION_TOKENS: Final = "specdec_generation_tokens"
    FREE_RUN_TOKENS: Final = "specdec_free_run_tokens"
    ROUNDS: Final = "specdec_rounds"
    REQUESTS_RUNNING: Final = "specdec_num_requests_running"
    REQUESTS_WAITING: Final = "specdec_num_requests_waiting"
    VERIFY_SECONDS: Final = "specdec_verify_seconds"
    VERIFY_QUEUE_SECONDS: Final = "specdec_verify_queue_seconds"
    PREFILL_SECONDS: Final = "specdec_prefill_seconds"
    PREFILL_QUEUE_SECONDS: Final = "specdec_prefill_queue_seconds"
    EMITTED_PER_ROUND: Final = "specdec_accepted_length"

    REQUEST_DURATION: Final = "gen_ai_server_request_duration_seconds"
    TIME_TO_FIRST_TOKEN: Final = "gen_ai_server_time_to_first_token_seconds"
    TIME_PER_OUTPUT_TOKEN: Final = "gen_ai_server_time_per_output_token_seconds"

    ENGINE_STEPS: Final = "specdec_engine_steps"
    ENGINE_BUSY_SECONDS: Final = "specdec_engine_busy_seconds"
    ENGINE_BATCH_TOKENS: Final = "specdec_engine_batch_tokens"
    ENGINE_QUEUE: Final = "specdec_engine_queue_length"

    KV_USED_BYTES: Final = "specdec_kv_cache_used_bytes"
    KV_RESERVED_BYTES: Final = "specdec_kv_cache_reserved_bytes"
    KV_LIMIT_BYTES: Final = "specdec_kv_cache_limit_bytes"
    LEASES: Final = "specdec_leases"
    LEASES_LIMIT: Final = "specdec_leases_limit"
    LEASES_EXPIRED: Final = "specdec_leases_expired"
    TARGET: Final = "specdec_target"

    DRAFTER_ROUNDS: Final = "specdec_drafter_rounds"
    DRAFTER_DRAFT_TOKENS: Final = "specdec_drafter_draft_tokens"
    DRAFTER_DRAFT_SECONDS: Final = "specdec_drafter_draft_seconds"
    DRAFTER_QUEUE_SECONDS: Final = "specdec_drafter_queue_seconds"
    DRAFTER_STREAMS: Final = "specdec_drafter_streams"
    DRAFTER_TRAFFIC_SHARE: Final = "specdec_drafter_traffic_share"
    DRAFTER_STATE: Final = "specdec_drafter_state"
    DRAFTER_WEIGHT_BYTES: Final = "specdec_drafter_weight_bytes"
    DRAFTER_MAPPED_KV_BYTES: Final = "specdec_drafter_mapped_kv_bytes"
    DRAFTER_QUEUE: Final = "specdec_drafter_queue_length"

    RPCS: Final = "specdec_rpcs"


PROVIDER: Final = "paceline"
"""What gen_ai.provider.name says: required by the conventions."""
