"""The proposer beside a stand-in for vLLM: texts are followed, and no drafter costs a request."""

from __future__ import annotations

import random
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from stand_in import (
    VOCAB,
    Batch,
    Request,
    Service,
    chain,
    config,
    counting,
    expected,
    periodic,
    right,
)

from paceline.tree import TokenTree
from paceline.v1 import drafter_pb2, tree_pb2
from paceline.vllm import PacelineProposer, proposer, settings

Make = Callable[..., PacelineProposer]
SERVED = {"address": "127.0.0.1:0", "draft": "always", "lookup": "off", "timeout": "10"}


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Make a proposer by variables of the environment."""

    def build(given: Any = None, **variables: str) -> PacelineProposer:
        for name, value in variables.items():
            monkeypatch.setenv(f"PACELINE_VLLM_{name.upper()}", value)
        return PacelineProposer(given or config())

    return build


@pytest.fixture
def served(make: Make) -> PacelineProposer:
    """A proposer that drafts in every step, waits for each tree and looks nothing up."""
    return make(**SERVED)


def check(batch: Batch, *requests: Request) -> None:
    batch.run()
    for request in requests:
        assert request.output == expected(batch.target, request)


def until(condition: Callable[[], bool], batch: Batch | None = None) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        if batch is not None:
            batch.step()
        time.sleep(0.01)


def test_look_up_drafts_what_repeats(make: Make) -> None:
    batch = Batch(make(draft="always"))
    request = Request([10, 11, 12, 13], 100)
    batch.add(request)
    check(batch, request)
    assert request.accepted > 60


def test_rows_move_when_requests_end(served: PacelineProposer) -> None:
    """Requests end and begin at any time, prompts come in chunks, and two may be the same."""
    rng = random.Random(5)
    batch = Batch(served, periodic)
    requests = [
        Request(
            [10 * rng.randrange(90) + rng.randrange(10) for _ in range(rng.randrange(1, 30))],
            rng.randrange(1, 60),
            chunks=rng.randrange(3),
        )
        for _ in range(40)
    ]
    requests[7].tokens = list(requests[6].tokens)
    requests[7].prompt, requests[7].end = requests[6].prompt, requests[6].end
    with Service(served.address, right(periodic)) as service:
        waiting = list(requests)
        while waiting or batch.rows:
            while waiting and (len(batch.rows) < 6 or rng.random() < 0.2):
                batch.add(waiting.pop(0))
            if batch.rows and rng.random() < 0.2:
                rng.shuffle(batch.rows)
            batch.step()
        assert all(r.output == expected(periodic, r) for r in requests)
        # A text that was not followed would have been opened again after each move.
        assert len(service.opened) <= len(requests)
        assert sum(r.accepted for r in requests) == sum(r.drafted for r in requests) > 0
        until(lambda: len(service.closed) == len(service.opened))


def test_a_preempted_text_is_followed_when_it_comes_back(served: PacelineProposer) -> None:
    batch = Batch(served, counting)
    first, second = Request([1, 2, 3], 40), Request([4, 5, 6], 80)
    with Service(served.address, right(counting)) as service:
        batch.add(first, second)
        until(lambda: first.accepted > 0, batch)
        batch.rows.remove(first)
        for _ in range(3):
            batch.step()
        first.drafts = []
        first.chunks = 1  # its KV is computed again
        batch.add(first)
        check(batch, first, second)
        assert len(service.opened) == 2


def test_the_likeliest_path_of_a_tree_is_the_chain() -> None:
    message = tree_pb2.TokenTree(
        tokens=[1, 2, 3, 4, 5], parents=[-1, -1, 0, 1, 3], confidences=[0.3, 0.6, 0.9, 0.5, 0.4]
    )
    path = TokenTree.from_proto(message).best_chain().best_chain()
    assert path.tokens == (2, 4, 5)
    assert path.acceptance_probabilities == pytest.approx((0.6, 0.5, 0.4))


@pytest.mark.parametrize(
    "tree",
    [
        chain([1, VOCAB]),
        chain(list(range(300))),
        tree_pb2.TokenTree(tokens=[1, 2], parents=[-1]),
        tree_pb2.TokenTree(tokens=[1, 2], parents=[1, -1]),
        tree_pb2.TokenTree(tokens=[1], parents=[-1], confidences=[2.0]),
    ],
    ids=["beyond", "long", "parents", "order", "confidence"],
)
def test_a_wrong_tree_ends_the_connection_and_no_request(
    served: PacelineProposer, tree: tree_pb2.TokenTree
) -> None:
    batch = Batch(served, counting, step_seconds=0.002)
    request = Request([1, 2, 3], 400)
    batch.add(request)
    with Service(served.address, lambda text, message: tree) as service:
        until(service.ended.is_set, batch)
        assert service.error is not None
    with Service(served.address, right(counting)):  # the next one is used
        until(lambda: request.accepted > 0, batch)
    check(batch, request)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (drafter_pb2.DrafterInfo(name="d", method="lm", tokenizer_digest="ab" * 32), ["ab" * 32]),
        (
            drafter_pb2.DrafterInfo(name="d", method="dspark", hidden_state_layers=[1, 2]),
            ["hidden states", "dspark"],
        ),
        (drafter_pb2.DrafterInfo(name="d", method="longspec", reads_kv=True), ["KV", "longspec"]),
        (drafter_pb2.DrafterInfo(name="d", method="x", scored_layers=[0], kv_policy="p"), ["KV"]),
    ],
    ids=["tokenizer", "hidden-states", "kv", "scores"],
)
def test_a_drafter_that_does_not_fit_is_refused_with_the_reason(
    make: Make, drafter: drafter_pb2.DrafterInfo, words: list[str], tmp_path: Path
) -> None:
    from tiny_models import write_model, write_tokenizer

    write_model("llama", tmp_path)
    write_tokenizer(tmp_path)
    proposer = make(config(str(tmp_path)), address="127.0.0.1:0")
    own = proposer._settings.model.tokenizer_digest
    assert own
    fitting = drafter_pb2.DrafterInfo(name="good", version="1", method="lm", tokenizer_digest=own)
    service = Service(proposer.address, right(counting), drafter)
    assert service.ended.wait(10)
    assert service.error is not None
    details = str(service.error.details())
    assert all(word in details for word in words)
    if drafter.tokenizer_digest:
        assert own in details
    # Beside one that fits it is left out; one that is loaded later ends nothing.
    with Service(proposer.address, right(counting), fitting, drafter) as service:
        assert _joined(proposer) == ["good"]
        service.listed.clear()
        service.announce(fitting)
        assert service.listed.wait(10)


def _joined(proposer: PacelineProposer) -> list[str]:
    with proposer._lock.held() as drafting:
        return [each.name for link in drafting.links for each in link.drafters.drafters]


def test_a_drafter_that_never_answers_ends_no_request(make: Make) -> None:
    batch = Batch(make(address="127.0.0.1:0", draft="always"), counting, step_seconds=0.01)
    request = Request([1, 2, 3], 60)
    batch.add(request)
    with Service(batch.proposer.address, lambda text, message: None) as service:
        until(lambda: service.rounds > 0, batch)
        check(batch, request)
        assert service.rounds == 1  # it still owes that tree


def test_after_late_answers_a_service_is_asked_seldom(make: Make) -> None:
    batch = Batch(make(address="127.0.0.1:0", draft="always", timeout="0.001"), counting)
    late = threading.Event()

    def draft(text: list[int], message: Any) -> tree_pb2.TokenTree:
        late.wait(0.01)
        return chain([1])

    request = Request([1, 2, 3], 200)
    batch.add(request)
    with Service(batch.proposer.address, draft) as service:
        until(lambda: service.rounds > 1, batch)  # the first waits for the prompt to be read
        before = len(batch.steps)
        until(lambda: service.rounds > 2, batch)
        assert len(batch.steps) - before >= 7
        check(batch, request)
        assert service.rounds < 8
    assert request.accepted == 0


def test_a_service_that_dies_or_leaves_ends_no_request(served: PacelineProposer) -> None:
    batch = Batch(served, counting)
    request = Request([1, 2, 3], 480)
    batch.add(request)
    for _ in range(3):
        with Service(served.address, right(counting)):
            before = request.accepted
            until(lambda before=before: request.accepted > before, batch)
    check(batch, request)


def test_the_default_of_the_first_service_drafts_and_the_second_takes_over(
    served: PacelineProposer,
) -> None:
    batch = Batch(served, counting)
    other = drafter_pb2.DrafterInfo(name="second", version="1", method="ngram")
    first = Service(served.address, right(counting))
    with first, Service(served.address, right(counting), other) as second:
        request = Request([1, 2, 3], 480)
        batch.add(request)
        until(lambda: first.rounds > 0, batch)
        assert second.rounds == 0
        first.close()
        until(lambda: second.rounds > 0, batch)
        check(batch, request)


def test_drafting_that_does_not_pay_ends_by_itself(make: Make) -> None:
    """The verifier's controller: a drafter that is always wrong is given up."""
    proposer = make(address="127.0.0.1:0", lookup="off", timeout="10")
    batch = Batch(proposer, counting, step_seconds=0.002)
    wrong: list[int] = [0] * 8
    requests = [Request([n, 2, 3], 300) for n in range(2)]
    with Service(proposer.address, lambda text, message: chain(wrong)) as service:
        batch.add(*requests)
        check(batch, *requests)
        assert service.rounds < 200


def test_each_tensor_parallel_worker_but_the_first_drafts_nothing(make: Make) -> None:
    proposer = make(config(rank=1, ranks=2), address="127.0.0.1:0", draft="always")
    assert proposer.address == ""
    batch = Batch(proposer)
    request = Request([10, 11], 50)
    batch.add(request)
    check(batch, request)
    assert request.drafted == 0


def test_metrics_and_spans_tell_drafter_and_version(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spans import record

    with socket.create_server(("127.0.0.1", 0)) as found_free:
        port = found_free.getsockname()[1]
    recorder = record(monkeypatch, f"{proposer.__name__}.tracer")
    served = make(**SERVED, metrics_address=f"127.0.0.1:{port}")
    batch, request = Batch(served, counting), Request([1, 2, 3], 480)
    batch.add(request)
    with Service(served.address, right(counting)) as service:
        until(lambda: request.accepted > 0, batch)
        check(batch, request)
        until(lambda: service.closed == {1})  # without a step more
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    labels = 'drafter="d",model_name="m",version="1"'
    accepted = f"specdec_num_accepted_tokens_total{{{labels}}} "
    found = next(float(line.removeprefix(accepted)) for line in lines if line.startswith(accepted))
    # The last step's tokens end a request before a proposer is told.
    assert request.accepted - 8 <= found <= request.accepted
    named = {each.name: each for each in recorder.spans}
    assert {"text_completion", "specdec.round", "specdec.draft", "specdec.verify"} <= named.keys()
    attributes = named["specdec.draft"].attributes or {}
    assert attributes["specdec.drafter.name"] == "d"
    assert attributes["specdec.drafter.version"] == "1"
    assert service.opened[0].traceparent


@pytest.mark.parametrize(
    "broken",
    [{"speculative_config": None}, {"model_config": object()}, {"parallel_config": object()}],
    ids=lambda each: next(iter(each)),
)
def test_another_interface_is_refused_with_the_versions_tried(
    make: Make, broken: dict[str, Any]
) -> None:
    given = config()
    vars(given).update(broken)
    with pytest.raises(TypeError, match=r"has another interface.*0\.32\.0"):
        make(given)


@pytest.mark.parametrize("arguments", ["sampled_token_ids", "next_token_ids, token_ids_gpu"])
def test_a_vllm_that_gives_other_arguments_is_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, arguments: str
) -> None:
    package = tmp_path / "vllm" / "v1" / "spec_decode"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").touch()
    text = f"class NgramProposer:\n    def propose(self, {arguments}): ...\n"
    (package / "ngram_proposer.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(settings, "vllm_version", lambda: "0.99.0")
    with pytest.raises(TypeError, match=r"0\.99\.0.*num_tokens_no_spec.*0\.32\.0"):
        make()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"address": "0.0.0.0:0"}, "without TLS and a token"),
        ({"address": "nowhere"}, "neither host:port"),
        ({"address": "127.0.0.1:0", "lookup": "perhaps"}, "invalid choice"),
        ({"address": "127.0.0.1:0", "port": "1"}, "unrecognized"),
        ({"address": "127.0.0.1:0", "tls_cert": "/missing.pem"}, "both a certificate and a key"),
        ({"metrics_address": "127.0.0.1:0"}, "PACELINE_VLLM_ADDRESS"),
    ],
    ids=lambda each: next(reversed(each)) if isinstance(each, dict) else None,
)
def test_wrong_variables_are_refused(make: Make, variables: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make(**variables)


def test_a_token_is_required_where_one_is_set(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TOKEN", "secret")
    proposer = make(address="127.0.0.1:0")
    service = Service(proposer.address, right(counting))
    assert service.ended.wait(10)
    assert "UNAUTHENTICATED" in repr(service.error)
    with Service(proposer.address, right(counting), metadata=[("authorization", "Bearer secret")]):
        assert _joined(proposer) == ["d"]


def test_a_proposer_needs_no_package_that_vllm_lacks() -> None:
    """Models are read by drafter services, and not in vLLM's process."""
    program = "import sys; sys.modules['gguf'] = None; import paceline.vllm.exchange_service"
    subprocess.run([sys.executable, "-c", program], check=True)
