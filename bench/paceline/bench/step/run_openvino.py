"""Times OpenVINO GenAI; started by its path, with a Python that need not have Paceline.

Arguments: GGUF file, threads, size of the vocabulary, tokens of the prompt, new tokens.
"""

import json
import random
import sys

import numpy as np
import openvino_genai
from openvino import Tensor

threads, vocab, context, tokens = map(int, sys.argv[2:])
pipeline = openvino_genai.LLMPipeline(sys.argv[1], "CPU", INFERENCE_NUM_THREADS=threads)
for count in (8, context):  # the first time everything is slower
    ids = np.array([random.choices(range(vocab), k=count)])
    prompt = openvino_genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
    found = pipeline.generate(prompt, max_new_tokens=tokens, ignore_eos=True).perf_metrics
rate = 1e3 / found.get_tpot().mean
print(json.dumps({"prefill_s": found.get_ttft().mean / 1e3, "tokens_per_s": rate}))
