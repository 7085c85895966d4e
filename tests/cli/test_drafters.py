"""`paceline drafters` against real services, and `load --check`, which tries a version out."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from certificates import Authority

from paceline.cli.main import main
from paceline.harness import ServiceProcess, local_services, with_port


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")


def drafters(registry: ServiceProcess, action: str, *words: str) -> int:
    return main(["drafters", action, "--address", registry.address, *words])


def listed(
    registry: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> dict[tuple[str, str], dict[str, object]]:
    assert drafters(registry, "list", "--json") == 0
    return {(d["name"], d["version"]): d for d in json.loads(capsys.readouterr().out)["drafters"]}


def test_a_version_is_loaded_activated_and_unloaded(
    registry: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listed(registry, capsys)
    assert [(name, info["method"]) for (name, _), info in before.items()] == [("main", "ngram")]

    assert drafters(registry, "load", "main", "ngram", "--version", "next") == 0
    assert "next" in capsys.readouterr().out
    assert listed(registry, capsys)["main", "next"]["traffic_share"] == 0

    assert drafters(registry, "activate", "main", "next", "--share", "0.25") == 0
    capsys.readouterr()
    assert listed(registry, capsys)["main", "next"]["traffic_share"] == 0.25

    assert drafters(registry, "rollback", "main") == 0
    capsys.readouterr()
    assert listed(registry, capsys)["main", "1"]["traffic_share"] == 1

    assert drafters(registry, "unload", "main", "next") == 0
    assert "unloaded" in capsys.readouterr().out
    after = listed(registry, capsys)
    assert after["main", "1"].pop("previous_share") == 0.75
    assert before["main", "1"].pop("previous_share") == 0
    assert after == before


def test_the_list_fits_a_terminal(
    registry: ServiceProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert drafters(registry, "list") == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert "active, default" in shown


def test_an_action_reaches_every_service_of_a_list(
    registry: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    with ServiceProcess("drafter", ["--load", "other=ngram"]) as second:
        port = second.address.rpartition(":")[2]
        every = f"{registry.address},127.0.0.1:1,dns:///localhost:{port}"
        words = ("--address", every, "--timeout", "5")
        assert main(["drafters", "load", "everywhere", "ngram", *words]) == 1
        assert "127.0.0.1:1: " in capsys.readouterr().err  # the others are not left out
        for each in (registry, second):
            assert "everywhere" in [name for name, _ in listed(each, capsys)]
    assert drafters(registry, "unload", "everywhere") == 0


def test_loading_with_activate_and_options(
    registry: ServiceProcess, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("second", "ngram", "--version", "1", "--option", "max_nodes=4", "--activate")
    assert drafters(registry, "load", *words, "--json") == 0
    (info,) = json.loads(capsys.readouterr().out)
    assert (info["traffic_share"], info["options"]) == (1.0, {"max_nodes": "4"})
    assert drafters(registry, "unload", "second", "--force") == 0


@pytest.mark.parametrize(
    "words",
    [
        ("load", "x", "no-such-method"),
        ("load", "x", "ngram", "--option", "no_such_option=1"),
        ("load", "x", "lm", "/nowhere"),
        ("activate", "main", "no-such-version"),
        ("activate", "main", "1", "--share", "7"),
        ("unload", "nobody"),
    ],
)
def test_what_the_service_refuses_is_told_with_its_reason(
    registry: ServiceProcess, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert drafters(registry, *words) == 1
    message = capsys.readouterr().err
    assert message.startswith(f"paceline drafters: {registry.address}: ")
    assert message.rstrip().endswith("]"), "the reason is missing"


def test_a_wrong_token_is_refused(
    registry: ServiceProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = tmp_path / "token"
    wrong.write_text("wrong")
    assert drafters(registry, "list", "--token-file", str(wrong)) == 1
    assert "UNAUTHENTICATED" in capsys.readouterr().err


def test_beyond_loopback_with_mutual_tls_and_a_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    authority = Authority(tmp_path / "pki")
    pair, root = authority.sign("x"), str(authority.cert)
    own = ("--tls-cert", str(pair.cert), "--tls-key", str(pair.key))
    tls = (*own, "--tls-client-ca", root)
    with ServiceProcess("drafter", ["--load", "ngram", *tls], address="0.0.0.0:0") as drafter:
        address = drafter.address.replace("0.0.0.0", "127.0.0.1")
        mutual = ("--tls-ca", root, *own)
        for arguments, code in ((mutual, 0), (mutual[:2], 1), ((), 1)):
            listing = ["drafters", "list", "--address", address, "--timeout", "60"]
            assert main([*listing, *arguments]) == code
    assert "active, default" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("--token-file=/nowhere", 2, "paceline drafters: "),
        ("--tls-ca=/nowhere", 2, "paceline drafters: "),
        ("--tls-cert=only.pem", 2, "paceline drafters: "),
        # To no service of a list, if one is on another machine.
        ("--address=127.0.0.1:1,10.0.0.1:2", 2, "token would travel to 10.0.0.1:2 unencrypted"),
        ("--address=unix:/nowhere.sock", 1, "unix:/nowhere.sock"),
    ],
)
def test_connections_that_cannot_be_are_told(
    words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["drafters", "list", words]) == code
    assert said in capsys.readouterr().err


def test_an_option_needs_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["drafters", "load", "x", "ngram", "--option", "nodes"])
    assert "is not KEY=VALUE" in capsys.readouterr().err


EAGLE3 = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_act": "silu", "hidden_size": 64,
    "intermediate_size": 96, "max_position_embeddings": 512, "model_type": "llama",
    "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 16,
    "rms_norm_eps": 1e-6, "vocab_size": 200, "draft_vocab_size": 50,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
}  # fmt: skip


def test_a_folder_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What it is, which tensor does not fit, and whether it fits a target."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from paceline.convert.drafters import published_shape
    from paceline.drafter.methods.eagle3 import Eagle3Config
    from paceline.train.modules import Eagle3Model

    (tmp_path / "config.json").write_text(json.dumps(EAGLE3))
    config = Eagle3Config.from_json(published_shape(EAGLE3, "eagle3"))
    weights = Eagle3Model(config).state_dict()
    weights = {name.replace("layers.0.", "midlayer."): each for name, each in weights.items()}
    weights["d2t"] = torch.arange(50) * 2
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert main(["drafters", "inspect", str(tmp_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["layout"], found["problems"]) == ("eagle3", "EAGLE", [])
    target = Path("models/demo/target")
    assert main(["drafters", "inspect", str(tmp_path), "--target", str(target)]) == 1
    assert "with vocab_size 200, but models/demo/target has 4096" in capsys.readouterr().out
    weights["midlayer.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert main(["drafters", "inspect", str(tmp_path)]) == 1
    assert "q_proj.weight' of" in capsys.readouterr().out
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    for folder, why in {"none": "there is no such path", "empty": "it has no config.json"}.items():
        assert main(["drafters", "inspect", str(tmp_path / folder)]) == 2
        expected = f"paceline drafters: {tmp_path / folder} is no drafter: {why}; give a drafter's"
        assert capsys.readouterr().err.startswith(expected)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"rms_norm_eps": "x"}, "rms_norm_eps"),
        ({"attention_dropout": "x"}, "attention_dropout"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": []}, "vocab_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "x"}}, "factor"),
    ],
)
def test_a_drafter_s_wrong_field_is_named_in_one_line(
    change: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(EAGLE3 | change))
    assert main(["drafters", "inspect", str(tmp_path)]) in (1, 2)
    said = "".join(capsys.readouterr())
    line = next(line for line in said.splitlines() if named in line)
    assert "config.json" in line


@pytest.mark.parametrize("method", ["dspark", "longspec"])
def test_the_demo_drafters_fit_their_target(
    method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target = ["--target", "models/demo/target"]
    assert main(["drafters", "inspect", f"models/demo/{method}", *target, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["method"], found["fits"]) == (method, "models/demo/target")


def test_without_a_drafter_service_the_list_says_what_the_verifier_drafts(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the default addresses: one that was named has to answer."""
    free = with_port("127.0.0.1:0")
    monkeypatch.setenv("PACELINE_DRAFTER_ADDRESS", free)
    arguments = [f"--target={target}", "--kv-bytes=64MiB"]
    with ServiceProcess("verifier", arguments) as verifier:
        monkeypatch.setenv("PACELINE_VERIFIER_ADDRESS", verifier.address)
        assert main(["drafters", "list"]) == 0
        assert capsys.readouterr().out == (
            f"no drafter service at {free}; the verifier at {verifier.address} drafts by itself: "
            "ngram, grammar\n"
        )
        assert main(["ps", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found == {"drafters": [], "local_sources": ["ngram", "grammar"]}
        other = with_port("127.0.0.1:0")
        assert main(["drafters", "list", "--address", other]) == 1
    assert main(["drafters", "list"]) == 1
    assert "drafts by itself" not in capsys.readouterr().out


HELPERS = Path(__file__).parents[1] / "drafter"


@pytest.fixture(scope="module")
def services(target: Path) -> Iterator[tuple[str, str]]:
    """Addresses of a verifier, and of a drafter with methods that read KV, or fail."""
    paths = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(HELPERS)]))
    arguments = [f"--target={target}"], ["--load=main=ngram"]
    with local_services(*arguments, {"PYTHONPATH": paths}) as (verifier, drafter):
        yield verifier.address, drafter.address


def load(services: tuple[str, str], prompts: Path, *words: str) -> int:
    verifier, drafter = services
    where = ("--address", drafter, "--verifier-address", verifier, "--check", str(prompts))
    return main(["drafters", "load", *where, *words])


def versions_of(services: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> dict[str, float]:
    assert main(["drafters", "list", "--address", services[1], "--json"]) == 0
    infos = json.loads(capsys.readouterr().out)["drafters"]
    return {f"{info['name']}@{info['version']}": info["traffic_share"] for info in infos}


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": [1, 2, 3, 1, 2, 3, 1, 2]}\n{"prompt": [9, 8, 7]}\n')
    return path


def test_one_that_reads_kv_is_checked_and_takes_over(
    services: tuple[str, str], prompts: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        load(services, prompts, "main", "kv-reader", "--version", "7", "--activate", "--json") == 0
    )
    (info,) = json.loads(capsys.readouterr().out)
    assert info["check"]["texts"] == 2
    assert info["check"]["rounds"] > 0
    assert versions_of(services, capsys) == {"main@1": 0.0, "main@7": 1.0}
    assert main(["drafters", "unload", "main", "7", "--address", services[1]]) == 0


@pytest.mark.parametrize(
    ("method", "why"), [("raising", "failures while drafting"), ("silent", "it drafted no tree")]
)
def test_one_that_fails_is_gone_again(
    services: tuple[str, str],
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    method: str,
    why: str,
) -> None:
    """What the verifier guesses, knowing the text by the first load, is not the version's."""
    assert load(services, prompts, "main", "ngram", "--json") == 0
    version = json.loads(capsys.readouterr().out)[0]["version"]
    assert main(["drafters", "unload", "main", version, "--address", services[1]]) == 0
    assert load(services, prompts, "main", method, "--activate") == 1
    assert f"failed the check and was unloaded: {why}" in capsys.readouterr().err
    assert versions_of(services, capsys) == {"main@1": 1.0}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"prompt": []}', '{"prompt": [-1]}', '{"x": 1}'])
def test_a_file_of_another_form_loads_nothing(
    services: tuple[str, str], tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    assert load(services, path, "main", "ngram") == 2
    assert str(path) in capsys.readouterr().err
    assert versions_of(services, capsys) == {"main@1": 1.0}
