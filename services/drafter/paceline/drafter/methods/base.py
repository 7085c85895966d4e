"""The interface of a drafting method, and options from text."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar, get_type_hints

from paceline.device import CPU, Device
from paceline.drafter.generation import Budget, DraftSequence, GenerationInfo, Update
from paceline.drafter.kv import KvGone, KvOptions
from paceline.formats import SECTION
from paceline.tree import TokenTree

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.convert import ModelSource, Origin

__all__ = [
    "SECTION",
    "Budget",
    "DraftSequence",
    "Drafter",
    "Fit",
    "GenerationInfo",
    "LoadError",
    "Needs",
    "Resources",
    "Update",
    "check_choice",
    "parse_options",
    "refuse_folder",
]


Options = TypeVar("Options")


class LoadError(Exception):
    """A drafter cannot be loaded: its method, folder, options or weights are invalid."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason  # stable upper-case name of the error


@dataclass(frozen=True)
class Needs:
    """Data that a method reads from the verifier besides tokens."""

    kv_layers: tuple[int, ...] = ()
    """Target layers whose committed K and V it reads; negative ones count from the last. A
    generation without them (:attr:`GenerationInfo.kv`) is refused."""

    kv_options: KvOptions = field(default_factory=KvOptions)
    """Transport and selection policy of the KV."""

    kv_budget: int = 0  # maximum number of positions that it reads per layer; 0: all, in tokens
    kv_ratio: float = 0.0
    """Share of the text's positions that it reads, where that is more than ``kv_budget``."""

    hidden_state_layers: tuple[int, ...] = ()
    """Target layers whose outputs it reads, 0 for the first, increasing. A generation without them
    (:attr:`GenerationInfo.states`) is refused."""

    hidden_state_window: int = 0
    """Number of last positions whose hidden states it reads; 0: all. Unit: tokens."""

    hidden_state_transport: str = "auto"
    """Transport of hidden states: map, follow, or auto: map if possible."""

    def kv_budget_at(self, length: int) -> int:
        """Return the most positions to read per layer of ``length``; 0: all. Unit: tokens."""
        return self.kv_budget and max(self.kv_budget, math.ceil(self.kv_ratio * length))


@dataclass(frozen=True)
class Fit:
    """Targets that a drafter fits; an empty field fits any."""

    target_fingerprint: str = ""  # fingerprint of the target that it was made for
    target_origin: Origin | None = None  # by which other formats of that target are recognised
    tokenizer_digest: str = ""  # SHA-256 hex of its tokenizer.json
    vocab_size: int = 0  # number of token ids


@dataclass(frozen=True)
class Resources:
    """Hardware that a loaded drafter uses."""

    device: Device = CPU
    threads: int | None = None  # threads of the math library; None: its default
    numerics: str = "portable"
    """How programs multiply bfloat16, as :func:`paceline.kernels.choose_numerics` has it."""


class SharedGrowth(Protocol):
    """How the trees of several sequences grow together, such as
    :class:`~paceline.drafter.growth.sequence.TreeGrowth`."""

    def draft_many(
        self, rounds: Sequence[tuple[DraftSequence, Budget]]
    ) -> Sequence[TokenTree | KvGone]:
        """See :meth:`Drafter.draft_many`."""

    def draft_ahead(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        """See :meth:`Drafter.draft_ahead`."""


class Drafter(ABC):
    """A loaded version of a method: weights and options that all its sequences share.

    :meth:`start` may be called from any thread. :meth:`draft_many` and the methods of its sequences
    are called from one thread at a time. The registry closes a drafter after its last sequence.
    """

    method: ClassVar[str]  # name of the method
    label: ClassVar[str] = ""  # its name in prose, such as EAGLE-3; empty: its own name
    path_options: ClassVar[tuple[str, ...]] = ()
    """Options that name a file or folder. Like the drafter's own, it must be below a root. With an
    option ``target``, ``paceline serve`` names the folder of its target there."""

    cpu_tree: ClassVar[Mapping[str, str]] = {}
    """Options of the tree that ``paceline serve`` chooses on a CPU, where each node costs, and each
    level; empty: the defaults of the options."""

    gpu_tree: ClassVar[Mapping[str, str]] = {}
    """Options of the tree that ``paceline serve`` chooses on a GPU."""

    cpu_weights: ClassVar[str] = ""
    """Format of the weights that ``paceline serve`` chooses for compiled CPU kernels, a value of
    the option ``weights``; empty: there is no such option."""

    recipe: ClassVar[str] = ""
    """Its recipe of training, as ``module:Class``, which ``paceline train`` imports: a subclass of
    ``paceline.train.recipes.Recipe``; empty: it is not trained. Services never import it."""

    fit: Fit = Fit()
    needs: Needs = Needs()
    max_nodes: int = 64  # maximum number of nodes that it drafts in a round
    max_depth: int = 64  # longest path that it drafts, in tokens
    weight_bytes: int = 0  # memory of the weights, in bytes
    drafted_tokens: Tensor | None = None
    """The target's ids of the tokens that it can draft, rising, int64 ``[R]``; None: all."""

    growth: SharedGrowth | None = None
    """How the trees of its sequences grow together; None: each sequence drafts by itself."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path | None, options: Mapping[str, str], resources: Resources) -> Drafter:
        """Load a version from its model folder or file (None: none was given), by options. It may
        take long, and is not called on the event loop. Raises ``LoadError`` if the folder or an
        option is invalid."""

    @classmethod
    def layout(cls, described: Mapping[str, Any]) -> str | None:
        """Return the project whose layout a folder of this method has, by its config.json with a
        ``paceline`` section that is an object; None: the folder is one of another method. By
        default the folders of a method have its name in the section, ``"paceline": {"method":
        NAME}``, or are published ones of it."""
        if SECTION in described:
            return SECTION if described[SECTION].get("method") == cls.method else None
        from paceline.convert.drafters import published

        method, project = published(described) or ("", None)
        return project if method == cls.method else None

    @classmethod
    def inspect(cls, folder: Path, target: ModelSource | None) -> Mapping[str, str]:
        """Check whether a folder of this method, whose config.json has a :meth:`layout`, can be
        loaded for a target (None: any), and read no weights. Returns more facts to be shown, by
        name. Raises ``UnsupportedModelError`` or ``LoadError`` if it cannot be loaded, or does not
        fit."""
        return {}

    @abstractmethod
    def start(self, generation: GenerationInfo) -> DraftSequence:
        """Start a generation. Cheap: :meth:`DraftSequence.warm` processes its text."""

    def draft_many(
        self, rounds: Sequence[tuple[DraftSequence, Budget]]
    ) -> Sequence[TokenTree | KvGone]:
        """Draft a tree for each of several sequences of this drafter.

        If it raises, every one of the sequences must be able to draft again. Returns the tree of
        each, or the error of one whose cache is gone: its KV or hidden states may have been
        overwritten while they were read. It concerns no other sequence.
        """
        if self.growth is not None:
            return self.growth.draft_many(rounds)
        return [sequence.draft(budget) for sequence, budget in rounds]

    def draft_ahead(self, sequences: Sequence[DraftSequence]) -> list[DraftSequence]:
        """Draft one level beyond the newest tree of each, as if the verifier accepted its path.

        Called while the verifier works, where the drafter has a processor of its own. A sequence
        keeps what turns out to be the text for its next tree. Returns the sequences for which
        another call can be of use.
        """
        return [] if self.growth is None else self.growth.draft_ahead(sequences)

    def close(self) -> None:  # noqa: B027 - only methods that hold more than memory need it
        """Release memory and connections."""


def refuse_folder(method: str, folder: Path | None) -> None:
    """Refuse the folder of a method without weights. Raises ``LoadError``: FOLDER_NOT_WANTED: A
    folder was given."""
    if folder is not None:
        raise LoadError(
            "FOLDER_NOT_WANTED", f"{method} has no weights, got the folder {folder}; leave it out"
        )


def parse_options(kind: type[Options], given: Mapping[str, str]) -> Options:
    """Fill the dataclass ``kind`` from text by name. Its fields have defaults and the types int,
    int | None (by default), float, str, bool (``true`` or ``false``) or tuple[int, ...] (numbers
    with commas); its ``__post_init__`` raises ``ValueError`` for values out of range. Raises
    ``LoadError`` if an option is unknown, whose message lists the known ones, or a value is
    invalid."""
    types = get_type_hints(kind)
    known = {f.name: f for f in fields(kind)}  # type: ignore[arg-type]
    values: dict[str, Any] = {}
    for name, text in given.items():
        if name not in known:
            listed = ", ".join(f"{f.name} (default {f.default})" for f in known.values())
            raise LoadError(
                "UNKNOWN_OPTION", f"unknown option {name!r}; known are {listed or 'none'}"
            )
        parse, what = _TYPES[types[name]]
        try:
            values[name] = parse(text.strip())
        except ValueError as error:
            raise LoadError("INVALID_OPTION", f"option {name}={text!r} is not a {what}") from error
    try:
        return kind(**values)
    except ValueError as error:
        raise LoadError("INVALID_OPTION", str(error)) from error


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Raises ``ValueError`` unless ``value`` is one of ``known``."""
    if value not in known:
        raise ValueError(f"option {name}={value!r}: expected one of {', '.join(known)}")


def _parse_bool(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError(text)
    return text == "true"


def _parse_ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


_TYPES: dict[Any, tuple[Callable[[str], Any], str]] = {
    int: (int, "whole number"),
    int | None: (int, "whole number"),
    float: (float, "number"),
    str: (str, "text"),
    bool: (_parse_bool, "truth value (true or false)"),
    tuple[int, ...]: (_parse_ints, "list of whole numbers (such as 4,4,2)"),
}
