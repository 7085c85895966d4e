"""Whether counts look like a distribution (Pearson's test)."""

from collections.abc import Hashable, Iterable, Mapping

import torch

# A right sampler fails one test at this rate over seeds; the seeds are fixed, so it never does
# twice.
FALSE_ALARM = 1e-4
_MIN_EXPECTED = 5.0


def p_value(outcomes: Iterable[Hashable], chances: Mapping[Hashable, float]) -> float:
    """Chance of samples at least this far from their distribution; 0 if one is impossible.

    Outcomes expected fewer than five times are taken together.
    """
    samples = list(outcomes)
    counts = dict.fromkeys(chances, 0)
    for sample in samples:
        if chances.get(sample, 0.0) <= 0.0:
            return 0.0
        counts[sample] += 1
    rare = {o for o, chance in chances.items() if chance * len(samples) < _MIN_EXPECTED}
    pairs = [(counts[o], chances[o] * len(samples)) for o in chances if o not in rare]
    if sum(chances[o] for o in rare) * len(samples) >= 1:
        pairs.append((sum(counts[o] for o in rare), sum(chances[o] for o in rare) * len(samples)))
    statistic = sum((count - expected) ** 2 / expected for count, expected in pairs)
    half = torch.tensor([(len(pairs) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
