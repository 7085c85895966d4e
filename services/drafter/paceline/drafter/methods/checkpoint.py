"""Model folders of drafters: reading and writing them, their target, and its frozen weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from paceline.convert import ModelSource, Origin, open_model
from paceline.convert.drafters import (
    DRAFT_TOKENS,
    DRAFTED,
    DrafterTensors,
    published_shape,
    read_described,
)
from paceline.decoder import DecoderConfig, PackedModel, UnsupportedModelError
from paceline.decoder.linear import Linear
from paceline.decoder.packed import Part
from paceline.drafter.methods.base import SECTION, Fit, LoadError, Resources
from paceline.drafter.methods.layers import LayerShape, drafted_tokens, linear
from paceline.kernels.linear import PackedMatrix

P = ParamSpec("P")
T = TypeVar("T")
Shape = TypeVar("Shape", bound=LayerShape)

CONFIG_FILE = "config.json"

WEIGHTS_FILE = "model.safetensors"

FORMAT = 2  # of the section; folders of another format are refused
# Names of the target's frozen tensors in a drafter's folder that holds them.
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"

# Tensors that a folder may also hold: the target's own, and maps between vocabularies.
_OTHER_TENSORS = frozenset({EMBEDDING, HEAD, DRAFTED, DRAFT_TOKENS})

# Type of a drafter by its tensors' type.
_DTYPES = {
    torch.float32: torch.float32, torch.bfloat16: torch.bfloat16, torch.float16: torch.bfloat16
}  # fmt: skip


def required_folder(method: str, folder: Path | None) -> Path:
    """Return the folder or GGUF file of a method with weights. Raises ``LoadError`` FOLDER_MISSING
    if it is None."""
    if folder is None:
        raise LoadError("FOLDER_MISSING", f"{method} needs a model folder: {method}:DIR")
    return folder


def load_model(
    folder: Path, resources: Resources, load: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call ``load`` on a thread that ends afterwards, and return its result.

    The OpenMP workers of a thread end with it. If they stayed, they and the drafting thread's own
    would outnumber the cores and slow every operation. Raises ``LoadError``, the loader's own, or
    UNSUPPORTED_MODEL for any other error.
    """
    threads = resources.threads or torch.get_num_threads()

    def prepare() -> None:
        torch.set_num_threads(threads)
        resources.device.use()

    try:
        with ThreadPoolExecutor(1, initializer=prepare) as pool:
            return pool.submit(load, *args, **kwargs).result()
    except LoadError:
        raise
    except Exception as error:  # damaged files make the libraries raise anything
        raise LoadError("UNSUPPORTED_MODEL", f"cannot load {folder}: {error}") from error


def refuse_recurrent(method: str, config: DecoderConfig) -> None:
    """Refuse a model with recurrent states in a method whose caches have none. Raises ``LoadError``
    if it has them."""
    if config.delta_layers:
        raise LoadError(
            "UNSUPPORTED_MODEL",
            f"{method} does not draft with a model of type {config.model_type!r}, which has "
            "recurrent states; expected one with attention in all layers",
        )


def read_fit(folder: Path) -> Fit:
    """Read which targets the drafter in a model folder or GGUF file fits.

    The ``paceline`` section of config.json may have a ``target_fingerprint``, a ``target_origin``
    and a ``tokenizer_digest``. Without the last one, the digest is computed from the folder's
    tokenizer.json. Raises ``LoadError`` if there is no valid config.json or no safetensors file,
    the digest in config.json is not tokenizer.json's, or a GGUF file is damaged.
    """
    if folder.is_file():
        try:
            source = open_model(folder)
            vocab_size = source.config().vocab_size
        except UnsupportedModelError as error:
            raise LoadError("UNSUPPORTED_MODEL", str(error)) from error
        return Fit(tokenizer_digest=source.tokenizer_digest, vocab_size=vocab_size)
    try:
        config = read_described(folder)
    except (FileNotFoundError, UnsupportedModelError) as error:
        raise LoadError("NO_CONFIG", f"{error}; expected a Hugging Face model folder") from error
    if not any(folder.glob("*.safetensors")):
        raise LoadError(
            "NO_SAFETENSORS",
            f"{folder} has no *.safetensors file; convert weights of other formats to it",
        )
    section = config.get(SECTION, {})
    declared = str(section.get("tokenizer_digest", ""))
    try:
        digest = open_model(folder).tokenizer_digest
    except UnsupportedModelError as error:
        raise LoadError("UNSUPPORTED_MODEL", str(error)) from error
    if declared and digest and declared != digest:
        raise LoadError(
            "TOKENIZER_MISMATCH",
            f"config.json of {folder} has the tokenizer_digest {declared}, but that of "
            f"tokenizer.json is {digest}; restore the one the drafter was trained with",
        )
    origin = section.get("target_origin")
    return Fit(
        target_fingerprint=str(section.get("target_fingerprint", "")),
        target_origin=Origin.parse(origin) if isinstance(origin, dict) else None,
        tokenizer_digest=declared or digest,
        vocab_size=_vocab_size(config, folder),
    )


def check_target(folder: Path, target: TargetRef, fit: Fit) -> Fit:
    """Check that the drafter in ``folder`` was trained for a target.

    Another format of that target fits too. Return the fit to ``target`` itself. Raises
    ``LoadError``: TARGET_MISMATCH or TOKENIZER_MISMATCH.
    """
    origin, digest = target.origin, target.tokenizer_digest
    if fit.target_origin is not None and origin is not None and fit.target_origin.fits(origin):
        return replace(fit, target_fingerprint=target.fingerprint, tokenizer_digest=digest)
    pairs = (
        ("TARGET_MISMATCH", "weights", fit.target_fingerprint, target.fingerprint),
        ("TOKENIZER_MISMATCH", "the tokenizer", fit.tokenizer_digest, digest),
    )
    for reason, what, expected, actual in pairs:
        if expected and expected != actual and not (fit.target_fingerprint or fit.target_origin):
            raise LoadError(
                reason,
                f"the tokenizers differ: {folder} has one with the digest {expected}, "
                f"{target.name} {actual or 'none'}; a small model drafts for targets with its own",
            )
        if expected and expected != actual:
            raise LoadError(
                reason,
                f"{folder} was made for a target with {what} {expected}, but {target.name} has "
                f"{actual or 'none'}; give the target it was trained for",
            )
    return fit


def check_own_tensors(folder: Path, config: LayerShape) -> None:
    """Check the shapes of embedding and LM head, if the folder has its own. Raises
    ``UnsupportedModelError`` if one has another shape."""
    weights = DrafterTensors(folder, torch.float32)
    kinds = ((EMBEDDING, {config.vocab_size}), (HEAD, {config.vocab_size, config.drafted}))
    for name, rows in kinds:
        if name in weights and weights.shape(name) not in {(n, config.hidden) for n in rows}:
            raise UnsupportedModelError(
                f"tensor {name!r} of {folder} has shape {weights.shape(name)}, expected "
                f"{(max(rows), config.hidden)}"
            )


def check_shape(folder: Path, shape: LayerShape, path: Path, config: DecoderConfig) -> None:
    """Check that the drafter in ``folder`` can read the target in ``path``. Raises
    ``UnsupportedModelError`` if it cannot."""
    for name, value in shape.of_target.items():
        if getattr(config, name) != value:
            raise UnsupportedModelError(
                f"{folder} is for a target with {name} {value}, but {path} has "
                f"{getattr(config, name)}; give the target it was trained for"
            )


def _vocab_size(config: dict[str, Any], folder: Path) -> int:
    layer = config.get("transformer_layer_config")  # where the speculators format has it
    size = config.get("vocab_size", layer.get("vocab_size") if isinstance(layer, dict) else None)
    if not isinstance(size, int) or size <= 0:
        raise LoadError(
            "NO_CONFIG", f"config.json of {folder} has the vocab_size {size!r}, expected a number"
        )
    return size


@dataclass(frozen=True)
class TargetRef:
    """The target that a drafter was made for."""

    name: str  # name of its folder or file, without the path
    fingerprint: str  # see :func:`paceline.convert.weights_fingerprint`
    tokenizer_digest: str  # SHA-256 hex of its tokenizer.json; empty if it has none
    origin: Origin | None = None  # by which other formats of it are recognised; None: not known

    @classmethod
    def packed(cls, model: PackedModel) -> TargetRef:
        about = model.description
        origin = Origin.parse(about.origin)
        return cls(about.name, about.fingerprint, about.tokenizer_digest, origin)

    @classmethod
    def of(cls, path: str | Path | ModelSource) -> TargetRef:
        """Read a target, including all its weights. Raises ``UnsupportedModelError`` if a folder
        has no safetensors weights or a file is damaged, and ``FileNotFoundError`` if there is no
        such file, or a folder has no config.json."""
        source = open_model(path)
        return cls(
            name=source.name,
            fingerprint=source.fingerprint(),
            tokenizer_digest=source.tokenizer_digest,
            origin=Origin.of(source),
        )


def save_drafter(
    folder: str | Path,
    config: LayerShape,
    tensors: Mapping[str, Tensor],
    target: TargetRef,
    *,
    levels: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    notes: Mapping[str, Any] | None = None,
    further: Mapping[str, Any] | None = None,
) -> None:
    """Write a drafter's folder: tensors of any float type as ``dtype``, the depth (``levels``) that
    it was trained to draft to, ``notes`` on its training, and ``further`` fields of config.json."""
    from safetensors.torch import save_file

    ours: dict[str, Any] = {
        "method": config.method,
        "format": FORMAT,
        "shape": config.to_json(),
        "levels": levels,
        "target": target.name,
        "target_fingerprint": target.fingerprint,
        "tokenizer_digest": target.tokenizer_digest,
    }
    if target.origin is not None:
        ours["target_origin"] = asdict(target.origin)
    if notes:
        ours["training"] = dict(notes)
    kind = str(dtype).removeprefix("torch.")
    whole = {"vocab_size": config.vocab_size, "dtype": kind, **(further or {}), SECTION: ours}
    base = Path(folder)
    base.mkdir(parents=True, exist_ok=True)
    # Copies: a tied embedding and head share memory, which the file format does not allow.
    copies = {
        name: tensor.detach().to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
        for name, tensor in tensors.items()
    }
    copies = {name: tensor.contiguous() for name, tensor in copies.items()}
    save_file(copies, base / WEIGHTS_FILE, metadata={"format": "pt"})
    text = json.dumps(whole, indent=2, sort_keys=True)
    (base / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")


def read_shape(
    kind: type[Shape], folder: str | Path, target_layers: int = 0
) -> tuple[Shape, torch.dtype]:
    """Read a drafter's shape, and the type of its tensors; ``target_layers`` is the depth of its
    target, 0 if it is not known. Raises ``UnsupportedModelError`` if it is of another method or
    format, for a target of another depth, or has fields or a type that are not supported, and
    ``FileNotFoundError`` if there is no config.json."""
    path, described = Path(folder) / CONFIG_FILE, read_described(Path(folder))
    section = described.get(SECTION)
    if section is not None and (section.get("method"), section.get("format")) != (
        kind.method, FORMAT,
    ):  # fmt: skip
        raise UnsupportedModelError(
            f"{path} is of method {section.get('method')!r}, format {section.get('format')!r}; "
            f"expected {kind.method!r}, format {FORMAT}: train it again with this version"
        )
    try:
        if section is None:
            fields = published_shape(described, kind.method, target_layers)
        elif not isinstance(fields := section.get("shape"), dict):
            raise UnsupportedModelError(f"the {SECTION!r} section has the shape {fields!r}")
        config = kind.from_json(fields)
        made_for: int = getattr(config, "target_layers", 0)
        if made_for and target_layers and made_for != target_layers:
            raise UnsupportedModelError(
                f"this drafter is for a target of {made_for} layers, this one has {target_layers}"
            )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from error
    return config, _stored_dtype(folder, "layers.0.self_attn.q_proj.weight")


def _stored_dtype(folder: str | Path, name: str) -> torch.dtype:
    weights = DrafterTensors(folder, torch.float32)
    if name not in weights:
        raise UnsupportedModelError(
            f"{folder} has no tensor {name!r}, expected the names of the drafter of its config.json"
        )
    stored = weights.stored(name).dtype
    if stored not in _DTYPES:
        raise UnsupportedModelError(
            f"tensor {name!r} of {folder} has the type {stored}, expected one of {list(_DTYPES)}"
        )
    return _DTYPES[stored]


def check_tensors(folder: str | Path, config: LayerShape) -> dict[str, tuple[int, ...]]:
    """Check names and shapes of all tensors of a drafter except the target's, without reading;
    return shapes by name. Raises ``UnsupportedModelError``: see :func:`load_weights`."""
    tensors, shapes = DrafterTensors(folder, torch.float32), config.tensors()
    if unknown := sorted(set(tensors) - set(shapes) - _OTHER_TENSORS):
        raise UnsupportedModelError(
            f"{folder} holds the tensors {unknown[:5]}, which no drafter of its config.json has"
        )
    for name, shape in shapes.items():
        if name not in tensors:
            raise UnsupportedModelError(f"{folder} lacks the tensor {name!r}")
        if (stored := tensors.shape(name)) != shape:
            raise UnsupportedModelError(
                f"tensor {name!r} of {folder} has shape {stored}, expected {shape} by config.json"
            )
    return shapes


def load_weights(
    folder: str | Path, config: LayerShape, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Read all tensors of a drafter except the target's. Raises ``UnsupportedModelError`` if a
    tensor is missing, has another shape, or is not known, which means that the drafter has a part
    that its config.json does not describe."""
    shapes, tensors = check_tensors(folder, config), DrafterTensors(folder, dtype, device)
    drafted = drafted_tokens(Path(folder), config)
    weights = {name: tensors[name] for name in shapes}
    return weights if drafted is None else {**weights, DRAFT_TOKENS: drafted.to(device)}


class TargetEmbedding:
    """The target's embedding and LM head, or the drafter's own.

    The target's are mapped from the packed file that a verifier reads too, and not copied unless
    the head gets other bits or keeps some rows alone. Plain ones of the drafter's folder are mapped
    from it where type and device are the file's.
    """

    def __init__(
        self,
        embedding: Tensor | PackedMatrix,
        head: Tensor | PackedMatrix,
        dtype: torch.dtype,
        tokens: Tensor | None = None,
        bits: int = 0,
    ) -> None:
        """Take both matrices; a plain one is of ``dtype``.

        With ``tokens``, the head keeps their rows alone, unless it has no others; ``bits`` as for
        :func:`linear`.
        """
        self.embedding = embedding  # ``[V, hidden]``, plain or packed
        # The target's token id of each row of the head, int64 `[R]`; None: all, in order.
        self.tokens = tokens
        self.head = _head(head, dtype, tokens, bits)  # the LM head
        packed = () if self.head.weight is head or self.head.packed is None else (self.head.packed,)
        # Bytes of packed matrices that nobody else has.
        self.private_bytes = sum(t.nbytes for matrix in packed for t in matrix.tensors().values())

    @classmethod
    def read(
        cls,
        folder: Path | None,
        target: PackedModel | None,
        shape: LayerShape,
        dtype: torch.dtype,
        device: torch.device | str,
        bits: int = 0,
    ) -> TargetEmbedding:
        """Read each from the drafter's folder if it holds it, otherwise from the target's; without
        a folder from the target's.

        A head in the drafter's folder may have the rows of the drafted tokens alone. The head gets
        ``bits``, 8 or 4, or stays as it came. Raises ``UnsupportedModelError`` if neither folder
        has them, or they have another shape; the ids of the drafted tokens are missing or invalid.
        """
        tokens = tensors = None
        if folder is not None:
            tokens, tensors = drafted_tokens(folder, shape), DrafterTensors(folder, dtype, device)
        parts = {} if target is None else target.outer(device)
        outer = {n: p.to(dtype) if isinstance(p, Tensor) else p for n, p in parts.items()}

        def read(name: str, part: str) -> Tensor | PackedMatrix:
            path, rows = folder, {shape.vocab_size}
            matrix: Part
            if tensors is not None and name in tensors:
                matrix = tensors.mapped(name)
                rows |= {shape.drafted} if name == HEAD else set()
            elif target is None:
                raise UnsupportedModelError(
                    f"{folder} has no {name}: it shares the target's; give the target's "
                    "folder or GGUF file as the option target=PATH"
                )
            else:
                path, matrix = target.path, outer.get(part, outer["head"])  # tied ones are one
            if matrix.shape[0] not in rows or tuple(matrix.shape[1:]) != (shape.hidden,):
                raise UnsupportedModelError(
                    f"{name!r} of {path} has shape {tuple(matrix.shape)}, expected "
                    f"{(max(rows), shape.hidden)}"
                )
            assert isinstance(matrix, Tensor | PackedMatrix), "as stored, a target is not rotated"
            return matrix

        return cls(read(EMBEDDING, "embedding"), read(HEAD, "head"), dtype, tokens, bits)


def _head(
    head: Tensor | PackedMatrix, dtype: torch.dtype, tokens: Tensor | None, bits: int
) -> Linear:
    """Return the LM head of some tokens, of all if they are None."""
    if isinstance(head, PackedMatrix):
        if tokens is None and not bits:
            return Linear(head)
        head = head.rows(torch.arange(head.outs) if tokens is None else tokens).to(dtype)
    elif tokens is not None and len(tokens) != len(head):
        head = head[tokens.to(head.device)]
    return linear([head], bits)
