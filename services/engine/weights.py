"""The weights of one Llama-shaped model, in the layout that numpy multiplies fastest.

Matrices lie [in, out] (`x @ w`), q, k and v are one matrix, gate and up are another. On disk a
converted model is a folder: `weights.npy` (one flat float32 array, mapped at load), `model.json`
(configuration and where each tensor lies), `tokenizer.json` and `chat_template.jinja`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and constants of the model; `head_dim` is also the number of rotated dimensions."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    feed_forward: int
    vocab: int
    context: int
    rms_eps: float
    rope_theta: float
    bos_token: int
    eos_token: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves behind."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 4


class LayerWeights(NamedTuple):
    attn_norm: Floats
    qkv: Floats
    """[hidden, (heads + 2 kv_heads) * head_dim]"""
    out: Floats
    mlp_norm: Floats
    gate_up: Floats
    """[hidden, 2 feed_forward]"""
    down: Floats


class Weights(NamedTuple):
    config: ModelConfig
    layers: list[LayerWeights]
    norm: Floats
    head: Floats
    """[hidden, vocab]"""
    embedding: Floats
    """[hidden, vocab] too: the same array as `head` where the two are tied."""


class BadWeights(ValueError):
    """These files hold no model that this engine can run."""


def assemble(config: ModelConfig, tensor: Callable[[str], Floats | None]) -> dict[str, Floats]:
    """Our tensors by name, from a source that knows Hugging Face names ([out, in] matrices).

    `tensor` returns None for a tensor that isn't there. Raises BadWeights.
    """

    def need(name: str, *shape: int) -> Floats:
        found = tensor(name)
        if found is None:
            raise BadWeights(f"tensor {name} is missing")
        if found.shape != shape:
            raise BadWeights(f"tensor {name} has shape {found.shape}, the model needs {shape}")
        return found

    c = config
    q_rows, kv_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
    tensors = {
        "norm": need("model.norm.weight", c.hidden),
        "embedding": need("model.embed_tokens.weight", c.vocab, c.hidden).T,
    }
    if (head := tensor("lm_head.weight")) is not None:
        tensors["head"] = head.T
    for i in range(c.layers):
        at = f"model.layers.{i}."
        qkv = [
            need(f"{at}self_attn.q_proj.weight", q_rows, c.hidden),
            need(f"{at}self_attn.k_proj.weight", kv_rows, c.hidden),
            need(f"{at}self_attn.v_proj.weight", kv_rows, c.hidden),
        ]
        gate_up = [
            need(f"{at}mlp.gate_proj.weight", c.feed_forward, c.hidden),
            need(f"{at}mlp.up_proj.weight", c.feed_forward, c.hidden),
        ]
        tensors |= {
            f"{i}.attn_norm": need(f"{at}input_layernorm.weight", c.hidden),
            f"{i}.qkv": np.concatenate(qkv).T,
            f"{i}.out": need(f"{at}self_attn.o_proj.weight", c.hidden, q_rows).T,
            f"{i}.mlp_norm": need(f"{at}post_attention_layernorm.weight", c.hidden),
            f"{i}.gate_up": np.concatenate(gate_up).T,
            f"{i}.down": need(f"{at}mlp.down_proj.weight", c.hidden, c.feed_forward).T,
        }
    return tensors


def arrange(config: ModelConfig, tensors: dict[str, Floats]) -> Weights:
    """The named tensors of `assemble` as the structure that the forward pass walks."""
    layers = [
        LayerWeights(*(tensors[f"{i}.{name}"] for name in LayerWeights._fields))
        for i in range(config.layers)
    ]
    embedding = tensors["embedding"]
    return Weights(config, layers, tensors["norm"], tensors.get("head", embedding), embedding)


def save_converted(folder: Path, config: ModelConfig, tensors: dict[str, Floats]) -> None:
    """Writes `weights.npy` and `model.json` into a folder that exists."""
    places: dict[str, tuple[int, tuple[int, ...]]] = {}
    end = 0
    for name, array in tensors.items():
        places[name] = (end, array.shape)
        end += array.size
    flat = np.lib.format.open_memmap(folder / "weights.npy", "w+", np.dtype(np.float32), (end,))
    for name, array in tensors.items():
        start, shape = places[name]
        flat[start : start + array.size].reshape(shape)[...] = array
    flat.flush()
    model = {"config": msgspec.to_builtins(config), "tensors": places}
    (folder / "model.json").write_text(json.dumps(model))


def load_config(folder: Path) -> ModelConfig:
    """The configuration of a converted model."""
    model = json.loads((folder / "model.json").read_text())
    return msgspec.convert(model["config"], ModelConfig)


def load_converted(folder: Path) -> Weights:
    """The weights of a converted model, mapped read-only."""
    model = json.loads((folder / "model.json").read_text())
    flat = np.load(folder / "weights.npy", mmap_mode="r")
    tensors = {
        name: np.asarray(flat[start : start + int(np.prod(shape))]).reshape(shape)
        for name, (start, shape) in model["tensors"].items()
    }
    return arrange(msgspec.convert(model["config"], ModelConfig), tensors)


def load_safetensors(folder: Path, config: ModelConfig) -> Weights:
    """New weights for the model of `config` from a Hugging Face folder (a trainer's checkpoint).

    Reads every `*.safetensors` in it, bf16, f16 or f32. Raises BadWeights.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise BadWeights(f"{folder} holds no *.safetensors file")
    tensors: dict[str, Floats] = {}
    for file in files:
        tensors |= read_safetensors(file)
    contiguous = {
        name: np.ascontiguousarray(array) for name, array in assemble(config, tensors.get).items()
    }
    return arrange(config, contiguous)


def read_safetensors(file: Path) -> dict[str, Floats]:
    """All tensors of one safetensors file as float32.

    The format: 8 bytes little-endian length, that many bytes of JSON, then the data.
    Raises BadWeights for a type that isn't a float of 16 or 32 bits.
    """
    raw = np.memmap(file, np.uint8, "r")
    length = int(raw[:8].view("<u8")[0])
    header = json.loads(raw[8 : 8 + length].tobytes())
    tensors: dict[str, Floats] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, end = entry["data_offsets"]
        data = raw[8 + length + start : 8 + length + end]
        match entry["dtype"]:
            case "F32":
                values = np.frombuffer(data.tobytes(), "<f4")
            case "F16":
                values = np.frombuffer(data.tobytes(), "<f2").astype(np.float32)
            case "BF16":
                bits = np.frombuffer(data.tobytes(), "<u2").astype(np.uint32) << 16
                values = bits.view(np.float32)
            case other:
                raise BadWeights(f"{file}: tensor {name} is {other}; write F32, F16 or BF16")
        tensors[name] = values.reshape(entry["shape"])
    return tensors
