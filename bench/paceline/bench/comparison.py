"""The same prompts through transformers and through Paceline, in turn, in one run."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.bench.baseline import MODES, Transformers
from paceline.bench.prompts import Prompt
from paceline.bench.served import Sample, Services, generate, overhead_ms
from paceline.client import Stats

PLAIN = "paceline none"


@dataclass
class Runs:
    """Every run of one mode on one prompt set; rates in tokens per second."""

    rates: list[float] = field(default_factory=list)
    against_greedy: list[float] = field(default_factory=list)
    against_plain: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    identical: bool = True

    def summary(self) -> dict[str, object]:
        """Medians over prompts and repeats, how much was drafted, the split of a drafted round.

        `drafted_share` is the share of all tokens that a drafter guessed. Rounds without a tree are
        free runs, of up to some dozen tokens each.
        """
        figures: dict[str, object] = {
            "runs": len(self.rates),
            "tokens_per_second": statistics.median(self.rates),
            "against_paceline_none": statistics.median(self.against_plain),
            "identical_to_paceline_none": self.identical,
        }
        if self.against_greedy:
            figures["against_transformers_greedy"] = statistics.median(self.against_greedy)
        every = [entry for sample in self.samples for entry in sample.stats.rounds]
        rounds = [entry for entry in every if entry.drafted]
        if every:
            figures["rounds"] = len(every)
            figures["drafted_rounds"] = len(rounds)
            figures["free_run_tokens"] = sum(s.stats.free_run_tokens for s in self.samples)
            figures["drafted_share"] = sum(s.stats.accepted for s in self.samples) / sum(
                len(s.tokens) for s in self.samples
            )
        if rounds:
            emitted = sum(entry.emitted for entry in rounds)
            figures["accepted_length"] = emitted / len(rounds)
            figures["accepted_length_without_bonus"] = emitted / len(rounds) - 1
            split: dict[str, Callable[..., float]] = {
                "round_ms": lambda e: e.round_ms,
                "draft_ms": lambda e: e.draft_ms,
                "verify_ms": lambda e: e.verify_ms,
                "queue_ms": lambda e: e.queue_ms,
                "transport_ms": lambda e: e.transport_ms,
                "overhead_ms": overhead_ms,
            }
            between = [_between_rounds_ms(sample.stats) for sample in self.samples]
            figures["round"] = {
                **{name: statistics.median(map(value, rounds)) for name, value in split.items()},
                "client_ms": statistics.median(between),
            }
            seconds = sum(entry.round_ms for entry in rounds) / 1e3
            figures["tokens_per_second_while_drafting"] = emitted / seconds
        return figures


def _between_rounds_ms(stats: Stats) -> float:
    """A client's own time a round: what neither the first token nor any round accounts for."""
    rest = stats.total_ms - stats.first_token_ms - stats.round_ms
    return rest / len(stats.rounds)


async def compare(
    prompts: Iterable[Prompt],
    target: Path,
    assistant: Path | None,
    drafters: dict[str, str],
    *,
    dtype: str,
    tokens: int,
    repeats: int,
    progress: Callable[[str], None],
) -> dict[str, dict[str, dict[str, object]]]:
    """Continuations of `tokens` tokens by every mode; summaries by prompt set and mode.

    Sampled continuations have no rows of transformers: its noise is another one, and with it the
    text, so that rates would compare two texts.

    `drafters` maps names to specifications for `paceline drafter --load`. Modes take turns prompt
    by prompt, so that a drift of the machine's speed meets all of them; ratios are taken within a
    prompt. Rates count from the call to the last token, prefill included.
    """
    baseline = Transformers(target, assistant, dtype)
    runs: dict[str, dict[str, Runs]] = defaultdict(lambda: defaultdict(Runs))
    load = [f"{name}={spec}" for name, spec in drafters.items()]
    served = ["none", *drafters]
    with Services(target, load, dtype) as services:
        async with services.client() as client:
            prompts = list(prompts)
            for mode in baseline.modes():
                baseline.generate(mode, prompts[0].tokens, 16)
            for drafter in served:
                await generate(client, prompts[0].tokens, 32, drafter)
            for repeat in range(repeats):
                for prompt in prompts:
                    progress(f"{prompt.set} {prompt.name}, {repeat + 1} of {repeats}")
                    rates: dict[str, float] = {}
                    samples: dict[str, Sample] = {}
                    for mode in baseline.modes() if prompt.temperature == 0 else ():
                        output, seconds = baseline.generate(mode, prompt.tokens, tokens)
                        rates[mode] = len(output) / seconds
                    for drafter in served:
                        sample = await generate(
                            client,
                            prompt.tokens,
                            tokens,
                            drafter,
                            temperature=prompt.temperature,
                            seed=prompt.seed,
                        )
                        mode = f"paceline {drafter}"
                        rates[mode] = len(sample.tokens) / sample.seconds
                        samples[mode] = sample
                    _note(runs[prompt.set], rates, samples)
    return {
        name: {mode: found.summary() for mode, found in modes.items()}
        for name, modes in runs.items()
    }


def _note(runs: dict[str, Runs], rates: dict[str, float], samples: dict[str, Sample]) -> None:
    for mode, rate in rates.items():
        entry = runs[mode]
        entry.rates.append(rate)
        if MODES[0] in rates:
            entry.against_greedy.append(rate / rates[MODES[0]])
        entry.against_plain.append(rate / rates[PLAIN])
        if mode in samples:
            entry.samples.append(samples[mode])
            entry.identical &= samples[mode].tokens == samples[PLAIN].tokens
