"""Generates with transformers or OpenVINO GenAI; started by its path, without Paceline.

Arguments: transformers or openvino, the model, and the tokens that end a text.
Reads requests and writes answers as lines of JSON; times are in seconds since the request.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DRAFTED = 10  # tokens that prompt lookup proposes, at most
# New tokens of a request; calls its second argument when tokens come.
Generate = Callable[[dict[str, Any], Callable[[], None]], list[int]]


def transformers(model: Path, eos: list[int]) -> Generate:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.generation.streamers import BaseStreamer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    folder, file = (model, None) if model.is_dir() else (model.parent, model.name)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=file, dtype=torch.bfloat16
    ).eval()
    loaded.generation_config.eos_token_id = eos

    @torch.inference_mode()
    def generate(request: dict[str, Any], came: Callable[[], None]) -> list[int]:
        class TransformersStreamer(BaseStreamer):
            prompt = True

            def put(self, value: torch.Tensor) -> None:
                if not self.prompt:  # what comes first is the prompt
                    came()
                self.prompt = False

            def end(self) -> None: ...

        heat, ids = request["temperature"], torch.tensor([request["prompt"]])
        sampled = {"do_sample": True, "temperature": heat, "top_k": 0, "top_p": 1.0}
        torch.manual_seed(request["seed"])
        output = loaded.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request["tokens"],
            pad_token_id=0,
            streamer=TransformersStreamer(),
            **(sampled if heat else {"do_sample": False}),
            **({"prompt_lookup_num_tokens": DRAFTED} if request["lookup"] else {}),
        )
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens

    return generate


def openvino(model: Path, eos: list[int]) -> Generate:
    """Return the model in the format of its file."""
    import numpy as np
    import openvino_genai as genai
    from openvino import Tensor

    count = len(os.sched_getaffinity(0))
    pipelines = [
        genai.LLMPipeline(str(model), "CPU", INFERENCE_NUM_THREADS=count, **more)
        for more in ({}, {"prompt_lookup": True})
    ]

    def generate(request: dict[str, Any], came: Callable[[], None]) -> list[int]:
        class OpenVinoStreamer(genai.StreamerBase):  # type: ignore[misc]
            def write(self, token: Any) -> Any:
                came()
                return genai.StreamingStatus.RUNNING

            def end(self) -> None: ...

        config = genai.GenerationConfig()
        config.max_new_tokens, config.stop_token_ids = request["tokens"], set(eos)
        config.ignore_eos = not eos
        if request["temperature"]:
            config.do_sample, config.temperature = True, request["temperature"]
            config.rng_seed, config.top_k, config.top_p = request["seed"], 0, 1.0
        if request["lookup"]:
            config.num_assistant_tokens, config.max_ngram_size = DRAFTED, 3
        ids = np.array([request["prompt"]])
        inputs = genai.TokenizedInputs(Tensor(ids), Tensor(np.ones_like(ids)))
        return list(
            pipelines[request["lookup"]].generate(inputs, config, OpenVinoStreamer()).tokens[0]
        )

    return generate


def main() -> None:
    """Answer until the input ends. Libraries may print; their output goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    load = transformers if sys.argv[1] == "transformers" else openvino
    generate = load(Path(sys.argv[2]), json.loads(sys.argv[3]))
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        print(json.dumps(_timed(generate, json.loads(line))), file=answers)


def _timed(generate: Generate, request: dict[str, Any]) -> dict[str, Any]:
    times = [time.perf_counter()]
    tokens = generate(request, lambda: times.append(time.perf_counter()))
    return {"tokens": tokens, "first": times[1] - times[0], "seconds": times[-1] - times[0]}


if __name__ == "__main__":
    main()
