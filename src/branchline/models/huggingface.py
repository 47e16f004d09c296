"""A Hugging Face folder as a checkpoint: ``config.json``, tokenizer files and safetensors, in this engine's vocabulary.

Only numbers and texts are read. There is no way to code: ``auto_map`` and ``.py`` files are never looked at.

Knows: names of tensors and files. Refuses to know: the keys of ``config.json`` (``huggingface_config``), bytes
(``safetensors``), links and sizes (``folder``).
"""

import functools
import re
from collections.abc import Mapping

import msgspec

from branchline.base.errors import ModelError
from branchline.models.checkpoint import TURN_ENDS, Tensor, TokenizerSource, checkpoint_digest
from branchline.models.facts import Facts, blame, clip
from branchline.models.folder import Folder
from branchline.models.huggingface_config import model_config
from branchline.models.safetensors import SafetensorsFile, read_safetensors
from branchline.models.shapes import check_shapes

_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = re.compile(r"model\.layers\.(0|[1-9]\d{0,3})\.([a-z_.]+)\.(weight|bias)")
_IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_INDEX = "model.safetensors.index.json"
_MAX_TOKENIZER_BYTES = 128 << 20


class HuggingFaceCheckpoint:
    """Implements ``Checkpoint``."""

    def __init__(self, folder: Folder) -> None:
        facts = folder.facts("config.json")
        files = _weight_files(folder)
        self._folder_name = folder.name
        self._headers = b"".join(file.header for file in files.values())
        self._tensors = _canonical(files)
        self.config = model_config(facts, folder.name)
        check_shapes(self.config, {name: tensor.shape for name, tensor in self._tensors.items()})
        self.tokenizer = _tokenizer(folder, facts, self.config.vocab_size)

    @classmethod
    def open(cls, path: str) -> "HuggingFaceCheckpoint":
        """Raises ModelError, one sentence with the name of the folder, if it cannot be served."""
        folder = Folder(path)
        with blame(folder.name):
            return cls(folder)

    @functools.cached_property
    def digest(self) -> str:
        return checkpoint_digest(f"{self.config!r}".encode() + self._headers, self._tensors.values())

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._tensors)

    def tensor(self, name: str) -> Tensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise ModelError(f"{self._folder_name}: there is no tensor {clip(name)}") from None


# ---------------------------------------------------------------- weights


def _weight_files(folder: Folder) -> dict[str, SafetensorsFile]:
    return {name: _read(folder, name) for name in _weight_file_names(folder)}


def _weight_file_names(folder: Folder) -> list[str]:
    if folder.has(_INDEX):
        return sorted(set(folder.facts(_INDEX, 64 << 20).section("weight_map").all_texts().values()))
    names = folder.names(".safetensors")
    if "model.safetensors" in names:
        return ["model.safetensors"]
    if len(names) != 1:
        raise ModelError("model.safetensors is missing (weights in other formats are not read)")
    return names


def _read(folder: Folder, file_name: str) -> SafetensorsFile:
    path = folder.locate(file_name)
    with blame(file_name):
        return read_safetensors(path)


def _canonical(files: Mapping[str, SafetensorsFile]) -> dict[str, Tensor]:
    """Tensors of all files under their GGUF names. Tables of rope frequencies are derived data and left out."""
    tensors: dict[str, Tensor] = {}
    for file_name, file in files.items():
        for name, tensor in file.tensors.items():
            if name.endswith("rotary_emb.inv_freq"):
                continue
            canonical = canonical_name(name)
            if canonical in tensors:
                raise ModelError(f"{file_name}: tensor {clip(name)} appears twice")
            tensors[canonical] = Tensor(canonical, tensor.shape, tensor.kind, tensor.data)
    return tensors


def canonical_name(name: str) -> str:
    """GGUF name of a Hugging Face tensor; an unknown one keeps its name."""
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _IN_LAYER:
        return f"blk.{layer[1]}.{_IN_LAYER[layer[2]]}.{layer[3]}"
    return _TOP.get(name, name)


# ---------------------------------------------------------------- tokenizer


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _TokenizerJson(msgspec.Struct):
    added_tokens: list[_AddedToken] = []


def _tokenizer(folder: Folder, config: Facts, vocab_size: int) -> TokenizerSource:
    text = folder.text("tokenizer.json", _MAX_TOKENIZER_BYTES)
    added = _added_tokens(text)
    settings = folder.optional_facts("tokenizer_config.json", 16 << 20)
    generation = folder.optional_facts("generation_config.json")
    ids = {token.content: token.id for token in added}
    ends = [*_ids(config, "eos_token_id"), *_ids(generation, "eos_token_id"), *_named(settings, "eos_token", ids)]
    ends += [token.id for token in added if token.special and token.content in TURN_ENDS]
    return TokenizerSource(
        tokenizer_json=text,
        chat_template=_chat_template(folder, settings),
        bos_token_id=_first(*_ids(config, "bos_token_id"), *_named(settings, "bos_token", ids)),
        eos_token_ids=tuple(dict.fromkeys(token for token in ends if 0 <= token < vocab_size)),
        pad_token_id=_first(*_ids(config, "pad_token_id"), *_named(settings, "pad_token", ids)),
        vocab_size=vocab_size,
    )


def _added_tokens(text: str) -> list[_AddedToken]:
    try:
        return msgspec.json.decode(text, type=_TokenizerJson).added_tokens
    except (msgspec.MsgspecError, RecursionError):
        raise ModelError("tokenizer.json: it is not the description of a tokenizer") from None


def _chat_template(folder: Folder, settings: Facts) -> str | None:
    """The file if there is one, else the text in the settings; of several named ones that named 'default'."""
    if folder.has("chat_template.jinja"):
        return folder.text("chat_template.jinja", 1 << 20)
    if "chat_template" not in settings:
        return None
    try:
        return settings.text("chat_template")
    except ModelError:
        named = [Facts(item) for item in settings.items("chat_template") if isinstance(item, dict)]
        templates = {item.text("name"): item.text("template") for item in named}
        return templates.get("default")


def _ids(facts: Facts, key: str) -> list[int]:
    """One id or a list of them."""
    if key not in facts:
        return []
    try:
        return [facts.integer(key)]
    except ModelError:
        return [Facts({key: item}).integer(key) for item in facts.items(key)]


def _named(settings: Facts, key: str, ids: Mapping[str, int]) -> list[int]:
    """Id of a token that the settings give by text, or by a mapping with its text."""
    if key not in settings:
        return []
    try:
        content = settings.text(key)
    except ModelError:
        content = settings.section(key).text("content", "")
    return [ids[content]] if content in ids else []


def _first(*ids: int) -> int | None:
    return ids[0] if ids else None
