"""Writes a converted model as a Hugging Face folder, as vLLM and transformers load it.

The weights are rounded to bf16, the type in which such models are served.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollstream.services.engine.convert import built_once
from rollstream.services.engine.tokenizer import Tokenizer
from rollstream.services.engine.weights import Floats, Weights, load_converted

FOLDER = "hugging-face"


def hugging_face_folder(converted: Path) -> Path:
    """The folder beside the converted model's files, written if need be."""
    return built_once(converted / FOLDER, lambda building: _write(converted, building))


def _write(converted: Path, folder: Path) -> None:
    weights = load_converted(converted)
    config = weights.config
    shutil.copy(converted / "tokenizer.json", folder)
    shutil.copy(converted / "chat_template.jinja", folder)
    tokenizer = Tokenizer(converted, bos_token=config.bos_token, eos_token=config.eos_token)
    bos, eos = map(tokenizer.token_name, (config.bos_token, config.eos_token))
    _json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": bos, "eos_token": eos,
        "pad_token": eos, "model_max_length": config.context,
    })
    ids = {"bos_token_id": config.bos_token, "eos_token_id": config.eos_token}
    _json(folder / "generation_config.json", ids)
    _json(folder / "config.json", ids | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_act": "silu", "hidden_size": config.hidden, "head_dim": config.head_dim,
        "intermediate_size": config.feed_forward, "max_position_embeddings": config.context,
        "num_attention_heads": config.heads, "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads, "rms_norm_eps": config.rms_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta, "tie_word_embeddings": weights.head is weights.embedding,
        "vocab_size": config.vocab,
    })
    _safetensors(folder / "model.safetensors", dict(_tensors(weights)))


def _tensors(weights: Weights) -> Iterator[tuple[str, Floats]]:
    """Hugging Face's names and [out, in] matrices: the way back of `weights.assemble`."""
    config = weights.config
    yield "model.embed_tokens.weight", weights.embedding.T
    yield "model.norm.weight", weights.norm
    if weights.head is not weights.embedding:
        yield "lm_head.weight", weights.head.T
    q, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    for i, layer in enumerate(weights.layers):
        at = f"model.layers.{i}."
        yield f"{at}input_layernorm.weight", layer.attn_norm
        for name, first, last in (("q", 0, q), ("k", q, q + kv), ("v", q + kv, q + 2 * kv)):
            yield f"{at}self_attn.{name}_proj.weight", layer.qkv[:, first:last].T
        yield f"{at}self_attn.o_proj.weight", layer.out.T
        yield f"{at}post_attention_layernorm.weight", layer.mlp_norm
        yield f"{at}mlp.gate_proj.weight", layer.gate_up[:, : config.feed_forward].T
        yield f"{at}mlp.up_proj.weight", layer.gate_up[:, config.feed_forward :].T
        yield f"{at}mlp.down_proj.weight", layer.down.T


def _safetensors(file: Path, tensors: dict[str, Floats]) -> None:
    """The format: 8 bytes little-endian length, that many bytes of JSON, then the data."""
    header, end = {}, 0
    for name, array in tensors.items():
        size = 2 * array.size
        header[name] = {
            "dtype": "BF16", "shape": array.shape, "data_offsets": [end, end + size],
        }
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for array in tensors.values():
            out.write(_bf16(array).tobytes())


def _bf16(array: Floats) -> NDArray[np.uint16]:
    """Rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def _json(file: Path, value: dict) -> None:
    file.write_text(json.dumps(value, indent=2))
