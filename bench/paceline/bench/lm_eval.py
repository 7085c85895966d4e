"""`paceline bench lm-eval`: lm-evaluation-harness with the gateway and with transformers.

Both compute in float32 and read the same requests, so scores are equal and log-probabilities differ
by rounding. No task needs a network: the questions are the five of each subject of MMLU that the
harness has as examples, and the text is that of the demo's held-out prompts.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from paceline.bench.models import Models
from paceline.bench.record import Results, make_console
from paceline.bench.services import gateway
from paceline.decoder import plain_folder

_EXAMPLES = "tasks/mmlu/flan_cot_fewshot/mmlu_*.yaml"
"""In the harness's package: questions with options, answer and reasoning."""
_OPTION = re.compile(r"\(([A-D])\) (.*?)(?= \([A-D]\) |$)", re.DOTALL)
_ANSWER = r"answer is \(?([A-D])\)?"
_TEXT_CHARACTERS = 4000
_TASKS: dict[str, dict[str, Any]] = {
    "paceline_choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{options}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "paceline_reasoning": {
        "output_type": "generate_until",
        "doc_to_text": "{{examples}}Q: {{question}}\nA:",
        "doc_to_target": "{{letter}}",
        "generation_kwargs": {"until": ["\n\nQ:", "Q:"], "max_gen_toks": 160},
        "filter_list": [
            {
                "name": "get-answer",
                "filter": [
                    {"function": "regex", "regex_pattern": _ANSWER},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match"}],
    },
    "paceline_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


def run(args: argparse.Namespace) -> int:
    """Measure; 0 if all scores are equal, else 1."""
    models, console = Models.of(args), make_console()
    program = Path(shutil.which(args.lm_eval) or args.lm_eval).absolute()
    with tempfile.TemporaryDirectory(prefix="paceline-lm-eval-") as scratch:
        folder = Path(scratch)
        target = plain_folder(models.target.resolve(), folder / "plain")
        _write_tasks(folder, program, models.prompts)

        def evaluate(model: str, arguments: str, *more: str) -> dict[str, Any]:
            out = folder / model
            command = [
                *(str(program), "run", "--model", model, "--model_args", arguments),
                *("--tasks", ",".join(_TASKS), "--include_path", scratch),
                *("--output_path", str(out), "--log_samples", *more),
            ]
            if args.limit:
                command += ["--limit", str(args.limit)]
            subprocess.run(command, check=True, cwd=scratch)
            return _read(out)

        # Speed does not matter: no profile of the model's steps.
        verifier = ["--device=cpu", "--weights=float32", "--schedule=off"]
        with gateway(models.target, verifier=verifier, drafter=["--load=ngram"]) as (url, _):
            ours = evaluate(
                "local-completions",
                f"model={models.target.name},base_url={url}/completions,tokenizer={target},"
                "num_concurrent=8,max_retries=1",
            )
        theirs = evaluate(
            "hf", f"pretrained={target},dtype=float32", "--device", "cpu", "--batch_size", "1"
        )
    results = Results("lm-eval", args.output, target=models.target.name)
    equal = True
    for task in _TASKS:
        entry = {"requests": len(ours[task]["responses"]), **_compared(ours[task], theirs[task])}
        results.add(task, {"harness": ours["version"], "limit": args.limit, **entry})
        equal &= entry["equal"]
        console.print(task, entry)
    console.print(f"written to {results.file}")
    return 0 if equal else 1


def _write_tasks(folder: Path, program: Path, prompts: Path) -> None:
    python = program.parent / "python"
    where = "import lm_eval; print(lm_eval.__path__[0])"
    found = subprocess.run([python, "-c", where], check=True, capture_output=True, text=True)
    questions = [
        question
        for file in sorted(Path(found.stdout.strip()).glob(_EXAMPLES))
        for question in _questions(file)
    ]
    texts = [
        {"text": text[start : start + _TEXT_CHARACTERS]}
        for file in sorted((prompts / "heldout").glob("*.txt"))
        for text in [file.read_text(encoding="utf-8")]
        for start in range(0, len(text), _TEXT_CHARACTERS)
    ]
    for task, fields in _TASKS.items():
        data = folder / f"{task}.json"
        data.write_text(json.dumps(texts if task == "paceline_text" else questions))
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
        settings = {"task": task, **source, "test_split": "test", "num_fewshot": 0, **fields}
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(settings))


def _questions(file: Path) -> Iterator[dict[str, Any]]:
    """The questions of a subject, each with the others as examples."""
    subject = yaml.safe_load(re.sub(r"!function", "", file.read_text(encoding="utf-8")))
    samples = subject["fewshot_config"]["samples"]
    for sample in samples:
        options = dict(_OPTION.findall(sample["question"]))
        letter = re.search(_ANSWER, sample["target"])
        if letter is None or list(options) != list("ABCD"):
            continue
        others = [other for other in samples if other is not sample][:2]
        yield {
            "question": sample["question"],
            "options": [f" {option.strip()}" for option in options.values()],
            "answer": "ABCD".index(letter[1]),
            "letter": letter[1],
            "examples": "".join(
                f"Q: {each['question']}\nA: {each['target']}\n\n" for each in others
            ),
        }


def _read(folder: Path) -> dict[str, Any]:
    """Scores and responses of each task."""
    (file,) = folder.rglob("results_*.json")
    written = json.loads(file.read_text())
    read: dict[str, Any] = {"version": written.get("lm_eval_version", "")}
    for task in _TASKS:
        (samples,) = folder.rglob(f"samples_{task}_*.jsonl")
        lines = map(json.loads, samples.read_text().splitlines())
        scores = {
            name.partition(",")[0]: value
            for name, value in written["results"][task].items()
            if isinstance(value, float) and "stderr" not in name
        }
        responses = {line["doc_id"]: line["resps"] for line in lines}
        read[task] = {
            "scores": scores,
            "responses": [responses[each] for each in sorted(responses)],
        }
    return read


def _compared(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """Scores of both, and how far single responses differ."""
    pairs = list(zip(ours["responses"], theirs["responses"], strict=True))
    numbers = [
        abs(a - b)
        for mine, other in pairs
        for a, b in zip(_numbers(mine), _numbers(other), strict=True)
    ]
    same = sum(mine == other for mine, other in pairs)
    detail = {"largest_difference": max(numbers)} if numbers else {"same_texts": same}
    scores = {name: (ours["scores"][name], theirs["scores"][name]) for name in ours["scores"]}
    return {
        "gateway_and_transformers": scores,
        "equal": all(abs(a - b) <= 1e-4 * max(1.0, abs(b)) for a, b in scores.values()),
        **detail,
    }


def _numbers(response: Any) -> Iterator[float]:
    """All log-probabilities of a response."""
    if isinstance(response, list):
        for each in response:
            yield from _numbers(each)
    elif isinstance(response, float):
        yield response
    elif isinstance(response, str) and re.fullmatch(r"-?\d+\.\d+(e-?\d+)?", response):
        yield float(response)
