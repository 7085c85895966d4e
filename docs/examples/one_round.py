"""Speculative decoding in one screen: draft a tree, verify it in one pass, keep what is right.

    python docs/examples/one_round.py

The text is that of plain decoding, token for token, whatever the drafter drafts: each token is
chosen by the target, and noise depends on seed and position alone. The services do the same for
many texts at a time: `growth/` drafts, `engine/batch.py` verifies, `engine/acceptance.py` accepts.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer

from paceline.convert import load_decoder, open_model
from paceline.decoder import Decoder, LocalCache
from paceline.drafter import Budget, DraftSequence, GenerationInfo, Resources, Update
from paceline.drafter.methods import method_class
from paceline.kernels import History, QueryBlock, SamplingRules, choose_token, plan_trees
from paceline.tree import EMPTY, TokenTree


def run(target: Decoder, cache: LocalCache, tokens: list[int], parents: tuple[int, ...] | None):
    """Run a tree of tokens after the committed ones in one pass; return the logits of each."""
    cache.reserve(len(tokens))
    block = QueryBlock(0, len(cache), parents, len(tokens))
    plan = plan_trees([block])  # each token sees the committed ones and its ancestors
    return target.forward(torch.tensor(tokens), plan, [cache], logit_rows=None).logits


def verify(target: Decoder, cache: LocalCache, text: list[int], tree: TokenTree, params):
    """Return the new tokens: the accepted ones and one more, which the target alone chose."""
    parents = (-1, *(parent + 1 for parent in tree.parents))  # the newest token, the anchor, is 0
    logits = run(target, cache, [text[-1], *tree.tokens], parents)
    node, path, new = -1, [0], []
    while True:
        history = History([*text, *new])
        token = choose_token(logits[node + 1], params, len(text) + len(new), history)
        new.append(token)
        child = tree.child(node, token)
        if child is None:  # nobody drafted this token
            break
        node = child
        path.append(node + 1)
    cache.commit(path)  # keeps the keys and values of these, drops those of wrong guesses
    return new


def generate(target: Decoder, prompt: list[int], count: int, params, drafter: DraftSequence | None):
    """Return `count` new tokens or a few more, and the number of passes that they took."""
    cache, text, passes = LocalCache(target.config), list(prompt), 0
    run(target, cache, prompt[:-1], None)
    cache.commit(range(len(prompt) - 1))
    while len(text) < len(prompt) + count:
        tree = EMPTY if drafter is None else drafter.draft(Budget(nodes=8, depth=4))
        new = verify(target, cache, text, tree, params)
        text += new
        passes += 1
        if drafter is not None:
            drafter.extend(Update(new))
    return text[len(prompt) :], passes


if __name__ == "__main__":
    source = open_model(Path("models/demo/target"))
    target, tokenizer = load_decoder(source, "bfloat16"), Tokenizer.from_buffer(source.tokenizer)
    prompt = tokenizer.encode("def __init__(self, name, value):\n    self.name = name\n").ids
    method = method_class("lm").load(Path("models/demo/lm"), {}, Resources())
    for temperature in (0.0, 0.8):
        params = SamplingRules(temperature=temperature, seed=1)
        drafter = method.start(GenerationInfo(prompt, len(prompt), target.config.vocab_size))
        plain, _ = generate(target, prompt, 64, params, None)
        drafted, passes = generate(target, prompt, 64, params, drafter)
        assert drafted[:64] == plain
        print(f"T = {temperature}: {len(drafted)} tokens in {passes} passes")
        print(tokenizer.decode(drafted))
