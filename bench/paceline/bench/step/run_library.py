"""Times vLLM or ik_llama.cpp; started by its path, with a Python that need not have Paceline.

Arguments: vllm or ik_llama, the model, threads, size of the vocabulary, longest text. Reads lines
of JSON, each with the tokens of a prompt and the number of new ones, and answers with lines.
"""

import json
import os
import random
import sys
import time
from collections.abc import Callable

Generate = Callable[[list[int], int], int]
"""Generates so many tokens behind a prompt; returns how many came."""


def vllm(model: str, threads: int, longest: int) -> Generate:
    """vLLM's engine in this process, in bfloat16, without a cache of prefixes."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(model, dtype="bfloat16", max_model_len=longest, enable_prefix_caching=False)

    def generate(prompt: list[int], tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        [found] = engine.generate(TokensPrompt(prompt_token_ids=prompt), params, use_tqdm=False)
        return len(found.outputs[0].token_ids)

    return generate


def ik_llama(model: str, threads: int, longest: int) -> Generate:
    """ik_llama.cpp through the loop of its Python package."""
    from ik_llama_cpp import IkLlama

    engine = IkLlama(model, n_ctx=longest, n_threads=threads, verbose=False)
    return lambda prompt, tokens: len(engine.generate(prompt, max_tokens=tokens))


def main() -> None:
    """Answer until the input ends. Libraries may print; their output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    library, model, *numbers = sys.argv[1:]
    threads, vocab, longest = map(int, numbers)
    generate = {"vllm": vllm, "ik_llama": ik_llama}[library](model, threads, longest)
    for line in sys.stdin:
        context, tokens = json.loads(line)
        times, came = [], 0
        for new in (8, 1, tokens):  # the first time everything is slower
            prompt = random.choices(range(vocab), k=context)
            began = time.perf_counter()
            came = generate(prompt, new)
            times.append(time.perf_counter() - began)
        rate = (came - 1) / (times[2] - times[1]) if came > 1 else 0.0
        print(json.dumps({"prefill_s": times[1], "tokens_per_s": rate}), file=answers)


if __name__ == "__main__":
    main()
