"""Conversion of protocol messages to the engine's types and back; all checks of requests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from paceline.checks import ParameterError
from paceline.kernels import SamplingRules
from paceline.sampling import CONSTRAINTS, Sampling
from paceline.service import ServiceError, limits
from paceline.service.tasks import in_thread
from paceline.text import Text, sampling_rules
from paceline.tree import MAX_NODES, TokenTree, TreeError
from paceline.v1 import sampling_pb2, tree_pb2, verifier_pb2
from paceline.verifier.engine.job import ConstraintFailed, Request, SequenceClosed, StepFailed
from paceline.verifier.engine.report import StepOutput
from paceline.verifier.grammar import Grammar, GrammarError, Grammars, GrammarsBusy, Kind
from paceline.verifier.kv.base import OutOfMemory, Taps
from paceline.verifier.store import CacheNotFound, StoreFull

# Delay that clients are advised to wait for KV memory. Generations take seconds.
RETRY_SECONDS = 0.5

Model = verifier_pb2.GetModelResponse  # description of the served model

_invalid = ServiceError.invalid_argument


@contextmanager
def as_service_errors() -> Iterator[None]:
    """Convert exceptions of the store and the engine to errors of an RPC."""
    try:
        yield
    except (CacheNotFound, SequenceClosed) as error:
        raise cache_not_found() from error
    except StoreFull as error:
        retry = None if error.forever else RETRY_SECONDS
        raise ServiceError.resource_exhausted("KV_FULL", str(error), retry) from error
    except OutOfMemory as error:
        raise ServiceError.resource_exhausted("KV_FULL", str(error), RETRY_SECONDS) from error
    except ConstraintFailed as error:
        raise _invalid("INVALID_SCHEMA", str(error)) from error
    except StepFailed as error:
        raise ServiceError.internal("STEP_FAILED", str(error)) from error


def grant_not_found() -> ServiceError:
    """The same error for unknown, expired and released grants."""
    return ServiceError.not_found(
        "CACHE_NOT_FOUND",
        "no cache has this read grant: it was released, its lease expired, or the verifier was "
        "restarted; attach again with the grant of the cache in use",
    )


def cache_not_found() -> ServiceError:
    """The same error for unknown, expired and released handles, and those of other clients."""
    return ServiceError.not_found(
        "CACHE_NOT_FOUND",
        "you have no cache with this handle: it was released, its lease expired, or the verifier "
        "was restarted; create one with the prompt and the tokens emitted so far",
    )


async def read_request(
    request: verifier_pb2.CreateCacheRequest,
    owner: str,
    model: Model,
    grammars: Grammars,
    taps: Taps | None,
) -> Request:
    """Read and check the request of an owner's text; ``taps`` are the hidden states that its
    drafter reads. Raises ``ServiceError``: INVALID_ARGUMENT."""
    prompt, output = request.prompt_tokens, request.output_tokens
    if not prompt:
        raise _invalid("PROMPT_EMPTY", "the prompt has no token; send at least one")
    length = len(prompt) + len(output)
    if length >= model.max_context:
        raise _invalid(
            "PROMPT_TOO_LONG",
            f"prompt and output so far have {length} tokens, expected fewer than the context of "
            f"{model.max_context}; shorten the prompt",
        )
    limit = model.max_context
    if request.max_new_tokens:
        limit = min(limit, len(prompt) + request.max_new_tokens)
    if length >= limit:
        raise _invalid(
            "NOTHING_LEFT",
            f"max_new_tokens is {request.max_new_tokens}, but {len(output)} tokens were emitted "
            "already; raise it or stop here",
        )
    _check_tokens("prompt_tokens", prompt, model)
    _check_tokens("output_tokens", output, model)
    if len(request.stop_token_ids) > limits.STOP_TOKENS:
        raise _invalid(
            "TOO_MANY_STOP_TOKENS",
            f"there are {len(request.stop_token_ids)} stop tokens, expected at most "
            f"{limits.STOP_TOKENS}",
        )
    _check_tokens("stop_token_ids", request.stop_token_ids, model)
    for name in ("top_logprobs", "prompt_logprobs"):
        if (count := getattr(request, name)) > limits.TOP_LOGPROBS:
            raise _invalid(
                "BAD_TOP_LOGPROBS", f"{name} is {count}, expected at most {limits.TOP_LOGPROBS}"
            )
    check_drafter(request.drafter)
    if len(request.user) > limits.NAME_CHARS:
        raise _invalid(
            "BAD_USER",
            f"the user's name has {len(request.user)} characters, expected at most "
            f"{limits.NAME_CHARS}; send a digest of it",
        )
    stop_ids = set(request.stop_token_ids)
    if not request.ignore_eos:
        stop_ids.update(model.eos_token_ids)
    sampling = sampling_pb2.SamplingParams()
    sampling.CopyFrom(request.sampling)  # a part would keep the whole message
    logprobs = request.logprobs or request.top_logprobs > 0
    text = Text(
        prompt,
        output,
        limit=limit,
        sampling=read_sampling(request.sampling, model),
        stop_ids=frozenset(stop_ids),
        owner=owner,
        message=sampling,
    )
    return Request(
        text,
        top_logprobs=request.top_logprobs if logprobs else None,
        prompt_logprobs=request.prompt_logprobs if request.HasField("prompt_logprobs") else None,
        taps=taps,
        grammar=await _read_grammar(request.sampling, tuple(output), grammars),
    )


def check_drafter(name: str) -> None:
    """Check the length of a drafter's name. Raises ``ServiceError``: INVALID_ARGUMENT."""
    if len(name) > limits.NAME_CHARS:
        raise _invalid(
            "BAD_DRAFTER",
            f"the drafter's name has {len(name)} characters, expected at most {limits.NAME_CHARS}; "
            "shorten it or leave it out",
        )


def read_sampling(message: sampling_pb2.SamplingParams, model: Model) -> SamplingRules:
    """Read and check sampling parameters. Raises ``ServiceError``: INVALID_ARGUMENT."""
    try:
        params = sampling_rules(Sampling.from_proto(message))
    except ParameterError as error:
        reason = "INVALID_SCHEMA" if error.parameter in CONSTRAINTS else "INVALID_SAMPLING"
        raise _invalid(reason, str(error)) from error
    _check_tokens("logit_bias", list(message.logit_bias), model)
    return params


def read_tree(message: tree_pb2.TokenTree, model: Model, text: Text) -> TokenTree:
    """Read and check a tree that was drafted for a text. Raises ``ServiceError``:
    INVALID_ARGUMENT."""
    sampling = text.sampling
    if len(message.distributions) and not sampling.rejection:
        raise _invalid(
            "BAD_TREE",
            "distributions belong to the mode REJECTION at temperatures above 0; send none",
        )
    try:
        tree = TokenTree.from_proto(message, MAX_NODES)
        tree.check(model.vocab_size)
        if sampling.rejection:
            tree.check_samples(sampling.seed, len(text))
    except TreeError as error:
        raise _invalid(error.reason, str(error)) from error
    return tree


def write_result(
    output: StepOutput, committed: int, accepted: Sequence[int] = ()
) -> verifier_pb2.RoundResult:
    """The message of an output after which so many tokens are committed. ``accepted`` are the
    accepted nodes of the drafted tree."""
    result = verifier_pb2.RoundResult(
        tokens=output.tokens,
        accepted_nodes=accepted,
        logprobs=output.logprobs,
        finish_reason=output.finish and f"FINISH_REASON_{output.finish.name}",
        committed_length=committed,
    )
    result.top_logprobs.extend(map(write_top, output.top_logprobs))
    return result


def write_top(top: Sequence[tuple[int, float]]) -> verifier_pb2.TopLogprobs:
    """The message of the likeliest tokens at one position."""
    return verifier_pb2.TopLogprobs(
        tokens=[token for token, _ in top], logprobs=[value for _, value in top]
    )


async def _read_grammar(
    message: sampling_pb2.SamplingParams, output: tuple[int, ...], grammars: Grammars
) -> Grammar | None:
    sources: dict[Kind, str] = {
        "json_schema": message.json_schema,
        "regex": message.regex,
        "grammar": message.grammar,
    }
    given = [(kind, source) for kind, source in sources.items() if source]
    if not given:
        return None
    ((kind, source),) = given
    try:
        grammar = await grammars.compile(kind, source)
        if output:
            return await in_thread(partial(grammar.after, output))
    except GrammarError as error:
        raise _invalid("INVALID_SCHEMA", str(error)) from error
    except GrammarsBusy as error:
        raise ServiceError.resource_exhausted(
            "TOO_MANY_CONSTRAINTS", f"{error}; try again later", RETRY_SECONDS
        ) from error
    return grammar


def _check_tokens(name: str, tokens: Sequence[int], model: Model) -> None:
    if len(tokens) and max(tokens) >= model.vocab_size:
        raise _invalid(
            "TOKEN_OUT_OF_VOCABULARY",
            f"{name} has token {max(tokens)}, but the model has {model.vocab_size} token ids, "
            "counted from 0; does the text come from another tokenizer?",
        )
