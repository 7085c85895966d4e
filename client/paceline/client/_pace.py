"""When to speculate: a rule that learns from what rounds cost this generation.

It is for verifiers that do not weigh that themselves (`GetModelResponse.schedules_speculation`): a
verifier with a scheduler sees what trees cost all generations that share it, as no client can.

A drafted round is worth its time if it emits tokens at least as fast as plain steps do. Where it
does not, the client free-runs and probes again now and then, seldom enough that failed probes
cannot cost more than a few percent.
"""

from __future__ import annotations

_FIRST_RUN = 4
_LONGEST_RUN = 64
# Share of a free run's time that the failed probe before it may have wasted.
_WASTE = 0.01
# Drafted rounds in a row after which the plain speed is measured again: the least and the most.
_STALE_AFTER, _STALE_AFTER_AT_MOST = 32, 256


class Speed:
    """Tokens per second of the samples of late: each new one takes a share of the weight.

    Seconds and tokens are averaged apart. The mean of their quotients would be that of a drafter
    that is right now less often than it is: rounds that emit few tokens weigh as much as others.
    """

    def __init__(self, like: Speed | None = None, *, newest: float = 0.25) -> None:
        self._seconds: float = like._seconds if like else 0.0
        self._tokens: float = like._tokens if like else 0.0
        self._newest = newest

    @property
    def seconds_per_token(self) -> float | None:
        """None until something was measured."""
        return self._seconds / self._tokens if self._tokens else None

    @property
    def per_second(self) -> float | None:
        """None until something was measured."""
        return self._tokens / self._seconds if self._tokens else None

    def add(self, tokens: int, seconds: float) -> None:
        """Takes in a sample of at least one token."""
        share = self._newest if self._tokens else 1.0
        self._seconds += share * (max(seconds, 1e-9) - self._seconds)
        self._tokens += share * (tokens - self._tokens)

    def restart(self, tokens: int, seconds: float) -> None:
        """Forgets all but this sample."""
        self._seconds, self._tokens = max(seconds, 1e-9), float(tokens)


class SharedSpeeds:
    """What a client's generations learnt so far with one drafter; seeds the next generation."""

    def __init__(self) -> None:
        self.drafted = Speed(newest=0.05)
        self.plain = Speed(newest=0.1)


class Pace:
    """Decides round by round for one generation. Knows no clock: its user measures the seconds."""

    def __init__(self, shared: SharedSpeeds, *, adaptive: bool = True) -> None:
        """Know what ``shared`` does. Not adaptive: drafts whenever there is a drafter."""
        self._shared = shared
        self._adaptive = adaptive
        self._drafted = Speed(shared.drafted)
        self._plain = Speed(shared.plain, newest=0.5)
        self._next_run = _FIRST_RUN
        self._run = 0 if self._plain.per_second or not adaptive else _FIRST_RUN
        self._probing = not self._beats_plain(self._drafted.seconds_per_token)
        self._streak_tokens, self._streak_seconds, self._streak_rounds = 0, 0.0, 0

    def steps(self) -> int:
        """What to do next. 0: draft a tree. n > 0: free-run n steps."""
        return self._run

    def drafted(self, tokens: int, seconds: float) -> None:
        """A drafted round emitted `tokens` in `seconds`, the draft's time included."""
        self._shared.drafted.add(tokens, seconds)
        if self._probing:
            self._drafted.restart(tokens, seconds)
        else:
            self._drafted.add(tokens, seconds)
        if not self._adaptive:
            return
        self._streak_tokens += tokens
        self._streak_seconds += seconds
        self._streak_rounds += 1
        if self._beats_plain(self._drafted.seconds_per_token):
            self._probing = False
            if self._streak_rounds >= self._stale_after():
                self._free_run(_FIRST_RUN)
        else:
            self._stop()

    def missed(self, seconds: float) -> None:
        """Asking for a tree took `seconds` and brought none."""
        if not self._adaptive:
            self._free_run(_FIRST_RUN)
            return
        self._streak_seconds += seconds
        self._stop()

    def free_ran(self, tokens: int, seconds: float) -> None:
        """A free run emitted `tokens` in `seconds`: time to probe.

        Best without the run's first message, whose time holds what starting a run costs.
        """
        self._plain.add(tokens, seconds)
        self._shared.plain.add(tokens, seconds)
        self._run = 0

    def _stop(self) -> None:
        """Ends a streak of drafted rounds with a free run: a longer one if it did not pay."""
        streak = self._streak_seconds / max(self._streak_tokens, 1)
        if self._streak_tokens and self._beats_plain(streak):
            self._next_run = _FIRST_RUN
        self._free_run(min(self._next_run, self._affordable_run()))
        self._next_run = min(2 * self._next_run, _LONGEST_RUN)
        self._probing = True

    def _free_run(self, steps: int) -> None:
        self._run = steps
        self._streak_tokens, self._streak_seconds, self._streak_rounds = 0, 0.0, 0

    def _affordable_run(self) -> int:
        """Steps after which the streak's wasted time is a negligible share."""
        step = self._plain.seconds_per_token
        if step is None:
            return _LONGEST_RUN
        wasted = max(0.0, self._streak_seconds - self._streak_tokens * step)
        return max(_FIRST_RUN, min(_LONGEST_RUN, int(wasted / (_WASTE * step))))

    def _stale_after(self) -> float:
        """Rounds after which to measure plain steps again: soon where the race is close."""
        plain, drafted = self._plain.seconds_per_token, self._drafted.seconds_per_token
        if plain is None or drafted is None:
            return _STALE_AFTER
        return min(_STALE_AFTER_AT_MOST, _STALE_AFTER * (plain / drafted) ** 2)

    def _beats_plain(self, seconds_per_token: float | None) -> bool:
        plain = self._plain.seconds_per_token
        return plain is None or (seconds_per_token is not None and seconds_per_token <= plain)
