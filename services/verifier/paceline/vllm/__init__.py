"""Paceline's drafters in vLLM: a proposer that drafter services join as they join a verifier.

``speculative_config={"method": "custom_class", "model": "paceline.vllm.PacelineProposer",
"num_speculative_tokens": 8}``. vLLM decides tokens, memory and batches; see docs/vllm.md.

``settings`` reads the environment and vLLM's configuration; ``texts`` follows the requests of a
batch; ``review`` says which drafters can be used; ``exchange_service`` and ``drafting_lock`` let
services join beside vLLM's engine; ``proposer`` drafts.
"""

from paceline.vllm.proposer import PacelineProposer

__all__ = ["PacelineProposer"]
