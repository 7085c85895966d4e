"""An option that has no effect in a mode of a command is refused by its name."""

from pathlib import Path

import pytest

from paceline.cli.main import main

TARGET = str(Path(__file__).parents[2] / "models" / "demo" / "target")
HERE = "--address=127.0.0.1:1"

LINES = [
    ("generate hello", "--tls-server-name=a --top-k=3 --top-p=0.9 --min-p=0.1"),
    ("generate hello --drafter none", "--draft-always --draft-timeout=1 --max-nodes=3 --isolated"),
    ("chat", "--top-k=3 --top-p=0.9"),
    ("health 127.0.0.1:1", "--tls-server-name=a"),
    ("gateway --address=127.0.0.1:0", "--tls-server-name=a"),
    ("chat", "--weights=int4 --load=ngram"),
    (f"chat {TARGET}", "--verifier-address=a:1 --tls --token-file=x"),
    (f"chat {TARGET}", "--tls-ca=x --tls-cert=x --tls-key=x --tls-server-name=x"),
    (f"drafters list {HERE} --json", "--wide"),
    (f"drafters load a ngram {HERE}", "--verifier-address=a:1"),
    (f"serve {TARGET} --gateway-address none", "--open --strict --http-tls-cert=x --max-body=1MiB"),
    (f"drafter --load=a=ngram --target={TARGET}", ""),
    ("drafter --load=a=ngram", "--target-weights=int4"),
    ("drafter", "--target-weights=int4"),
    ("bench replay x.json.gz", "--count=2 --weights=int8 --label=x --nodes=3"),
    ("bench table", "--llama-server=x --openvino-python=x --vllm-drafter=a=ngram"),
    ("bench step", "--llama-model=x --vllm-python=x --openvino-model=x"),
    ("bench step --profile", "--repeats=3 --synthetic --rivals --cold --llama-model=x"),
    ("bench step", "--resume"),
    (f"bench step --target={TARGET}", "--models=x"),
    ("bench papers attention", "--users=1 --speed --temperature=1"),
    ("bench papers load", "--contexts=5 --ratios=0.1 --rows=3 --policies=streaming"),
]


CASES = [(line, option) for line, options in LINES for option in options.split() or [""]]


@pytest.mark.parametrize(("line", "option"), CASES, ids=[" ".join(each) for each in CASES])
def test_an_option_without_effect_is_refused(
    line: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*line.split(), *option.split()]) == 2
    said = capsys.readouterr().err
    assert " no effect " in said
    assert option.partition("=")[0] in said
    assert "Traceback" not in said


def test_every_unused_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--weights=int4", "--load", "ngram"]) == 2
    assert "--weights, --load have no effect without MODEL" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["--signals=x", "--vocabulary=9", "--no-card", "--budgets=0,64"])
def test_a_preset_on_files_reads_nothing_about_conversations(
    words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "longspec", "--preset", "cpu", words]) == 1
    assert f"{words.partition('=')[0]}: no effect on the preset cpu" in capsys.readouterr().err
