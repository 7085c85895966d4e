"""How fast plain decoding is: what drafting has to beat."""

from __future__ import annotations

_ENOUGH = 32  # quiet steps after which the speed of a load level is known
_STALE = 2000  # steps with drafting after which it is measured again
_NEWEST = 0.02  # weight of the newest quiet step
_STRANGE = 5.0  # an interval this many times longer than foretold was disturbed: it counts no more


def level_of(load: int) -> int:
    """Loads that are taken for alike: 1, 2, 3 to 4, 5 to 8, ... sequences."""
    return max(0, load - 1).bit_length()


class _Level:
    """What was seen at one load level."""

    def __init__(self, like: _Level | None) -> None:
        self.emitted: float = like.emitted if like else 1.0
        self.foretold: float = like.foretold if like else 1.0
        self.quiet = 0
        self.disturbed = 0


class PlainSpeed:
    """The speed of plain steps by load, measured while nobody drafts.

    A cost table tells how long a step takes on a machine that does nothing else. What is lost
    between steps, and to clients that take their tokens, shows only here.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _Level] = {}

    def rate(self, load: int) -> float:
        """Tokens that a sequence gets in the time that the table foretells for one step."""
        level = self._nearest(level_of(load))
        return level.emitted / level.foretold if level else 1.0

    def known(self, load: int) -> bool:
        """Whether drafting can be judged under this load; else nobody should draft for a while."""
        level = self._levels.get(level_of(load))
        return level is not None and level.quiet >= _ENOUGH

    def quiet(self, load: int, emitted: int, time: float, steps: int = 1) -> None:
        """Steps without any drafting.

        Args:
            load: Sequences alive.
            emitted: Tokens that they were given in all, and
            time: how long that took, the time since the step before included, over what the table
                foretells for one step.
            steps: How many they are.
        """
        if time > _STRANGE * steps:
            return
        level = self._at(load)
        level.quiet = min(level.quiet + steps, int(1 / _NEWEST))
        level.disturbed = 0
        share = max(1 - (1 - _NEWEST) ** steps, steps / (level.quiet + 1))
        level.emitted += share * (emitted / steps - level.emitted)
        level.foretold += share * (load * time / steps - level.foretold)

    def disturbed(self, load: int) -> None:
        """A step with drafting: what is known grows old."""
        level = self._at(load)
        level.disturbed += 1
        if level.disturbed >= _STALE:
            level.quiet = level.disturbed = 0

    def _at(self, load: int) -> _Level:
        number = level_of(load)
        if number not in self._levels:
            self._levels[number] = _Level(self._nearest(number))
        return self._levels[number]

    def _nearest(self, number: int) -> _Level | None:
        if number in self._levels:
            return self._levels[number]
        nearest = min(self._levels, key=lambda seen: (abs(seen - number), seen), default=None)
        return None if nearest is None else self._levels[nearest]
