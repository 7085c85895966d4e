"""The REJECTION mode with real drafters: every chain they send is one that the verifier takes."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from system_support import EAGER, THREADS, make_prompts
from test_dspark import make_drafter
from test_longspec import make_layer

from paceline.client import Client, GenerationResult
from paceline.harness import ServiceProcess

TOKENS = 48
FEW = {3: 9.0, 7: 9.0, 11: 9.0}
"""So that texts repeat themselves and prompt lookup has something to say."""
REFUSALS = {"invalid_tree", "malformed_tree", "drafter_refused"}


async def test_drafts_of_every_method_are_taken(
    models: dict[str, Path],
    verifiers: Callable[[str], ServiceProcess],
    drafter: ServiceProcess,
    tmp_path: Path,
) -> None:
    target = models["llama"]
    block = make_drafter(target, tmp_path / "dspark")
    layer = make_layer(target, tmp_path / "longspec")
    loads = [
        "--load", f"lm=lm:{target}",  # the target itself: nearly all is accepted
        "--load", f"dspark=dspark:{block},target={target}",
        "--load", f"longspec=longspec:{layer},target={target}",
        "--load", f"selfspec=selfspec:{target}",
        "--load", "ngram=ngram",
    ]  # fmt: skip
    served = await asyncio.to_thread(verifiers, "llama")
    with ServiceProcess("drafter", loads, environment=THREADS) as drafters:

        async def generate(client: Client, name: str) -> list[GenerationResult]:
            runs = (
                client.generate(
                    prompt,
                    max_new_tokens=TOKENS,
                    temperature=0.8,
                    top_p=0.95,
                    logit_bias=FEW,
                    seed=seed,
                    acceptance="rejection",
                    drafter=name,
                    ignore_eos=True,
                )
                for seed, prompt in enumerate(make_prompts(6, seed=5))
            )
            return await asyncio.gather(*runs)

        async with Client(served.address, drafter=drafters.address, drafting=EAGER) as client:
            for name in ("lm", "dspark", "longspec", "selfspec", "ngram"):
                results = await generate(client, name)
                assert all(len(result.token_ids) == TOKENS for result in results)
                assert any(result.stats.drafted for result in results), name
                reasons = {reason for r in results for reason in r.stats.fallbacks}
                assert not reasons & REFUSALS, name
                if name == "lm":
                    rounds = [e for r in results for e in r.stats.rounds if e.drafted]
                    accepted = sum(entry.accepted for entry in rounds)
                    assert accepted > 0.8 * sum(entry.drafted for entry in rounds)
        async with Client(served.address, drafter=drafter.address, drafting=EAGER) as client:
            for name in ("random-tree", "malformed", "failing"):
                results = await generate(client, name)
                assert all(len(result.token_ids) == TOKENS for result in results), name
