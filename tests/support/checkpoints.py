"""Small model files on disk, written with foreign tools: the ``gguf`` package, and JSON by hand."""

import json
import struct

import gguf
import numpy as np

from branchline.models.quants import dequantize
from branchline.models.random import CONTROL_TOKENS, byte_letters


def write_gguf(path, checkpoint, kind="F32", extra=(), without=(), metadata=()):
    """Write a checkpoint as GGUF; matrices as ``kind``. ``extra`` adds tensors, ``metadata`` adds or replaces values."""
    config, tokenizer = checkpoint.config, checkpoint.tokenizer
    architecture = "llama" if config.architecture == "mistral" else config.architecture
    writer = gguf.GGUFWriter(path, dict(metadata).get("general.architecture", architecture))
    own = {
        "block_count": config.layers,
        "context_length": config.context_length,
        "embedding_length": config.hidden,
        "feed_forward_length": config.ffn,
        "attention.head_count": config.heads,
        "attention.head_count_kv": config.kv_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.norm_eps,
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rope.rotary_dim,
    }
    values = {f"{architecture}.{key}": value for key, value in own.items()}
    values |= dict(tokenizer.metadata) | {"tokenizer.chat_template": tokenizer.chat_template}
    for key, value in (values | dict(metadata)).items():
        if value is not None and key != "general.architecture":
            add_value(writer, key, value)
    for name in sorted(checkpoint.names - set(without)):
        array = dequantize(checkpoint.tensor(name))
        add_tensor(writer, name, array, kind if array.ndim == 2 else "F32")
    for name, array in dict(extra).items():
        add_tensor(writer, name, array, "F32")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_value(writer, key, value):
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if value >= 0 else writer.add_int32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:
        writer.add_array(key, value)


def add_tensor(writer, name, array, kind):
    if kind in ("F32", "F16"):
        writer.add_tensor(name, array.astype(kind.lower().replace("f", "float")))
    else:
        raw = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(array, raw), raw_dtype=raw)


def assert_one_sentence(error, name=""):
    """What an operator sees: short, on one line, with the name of the file and without its folder."""
    message = str(error)
    assert message.startswith(name)
    assert "\n" not in message
    assert "/tmp" not in message
    assert len(message) < 400


# ---------------------------------------------------------------- Hugging Face

_TO_HF = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def hf_name(name):
    if name.startswith("blk."):
        _, layer, part, suffix = name.split(".")
        return f"model.layers.{layer}.{_TO_HF[part]}.{suffix}"
    return {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }[name]


def hf_config(config, **changes):
    return {
        "model_type": config.architecture,
        "num_hidden_layers": config.layers,
        "hidden_size": config.hidden,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tied_embeddings,
        "sliding_window": config.sliding_window,
        "hidden_act": "silu",
        "bos_token_id": 257,
        "eos_token_id": 258,
    } | changes


def hf_tokenizer():
    """The ``tokenizer.json`` of ``RandomCheckpoint``'s byte-level tokenizer."""
    tokens = [*byte_letters(), *CONTROL_TOKENS]
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": token, "special": True, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False}
            for i, token in enumerate(tokens[256:], start=256)
        ],
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens[:256])}, "merges": []},
    }


def safetensors_bytes(arrays, kinds=()):
    """``{name: array}`` as the bytes of a safetensors file; numpy has no BF16, so ``kinds`` may rename uint16."""
    table, data = {}, b""
    for name, array in arrays.items():
        kind = dict(kinds).get(name) or {"float32": "F32", "float16": "F16", "int64": "I64"}[str(array.dtype)]
        begin, data = len(data), data + array.tobytes()
        table[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": [begin, len(data)]}
    header = json.dumps(table).encode()
    return struct.pack("<Q", len(header)) + header + data


def write_folder(path, checkpoint, shards=1, **changes):
    """Write a checkpoint as a Hugging Face folder; ``changes`` go into ``config.json``."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf_config(checkpoint.config, **changes)))
    (path / "tokenizer.json").write_text(json.dumps(hf_tokenizer()))
    names = sorted(checkpoint.names)
    arrays = [{hf_name(name): dequantize(checkpoint.tensor(name)) for name in names[i::shards]} for i in range(shards)]
    if shards == 1:
        (path / "model.safetensors").write_bytes(safetensors_bytes(arrays[0]))
        return path
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for file, part in zip(files, arrays, strict=True):
        (path / file).write_bytes(safetensors_bytes(part))
    weight_map = {name: file for file, part in zip(files, arrays, strict=True) for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def bf16(array):
    """Upper halves of float32 numbers, truncated."""
    return (np.ascontiguousarray(array, np.float32).view(np.uint32) >> 16).astype(np.uint16)
