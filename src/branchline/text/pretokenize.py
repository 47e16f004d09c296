"""How byte-level BPE models cut text into words before merging: one table, keyed by GGUF's ``tokenizer.ggml.pre``.

Each entry is the rule of the model's original ``tokenizer.json``: patterns applied one after the other, each keeping
its matches as words of their own and cutting what is left between them (Oniguruma syntax, as ``tokenizers`` uses it).
Refuses to know: vocabularies.
"""

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from branchline.base.errors import ModelError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SHORT_FORMS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT_FORMS}|{_WORD}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT_FORMS}|{_WORD}|\p{{N}}|{_REST}"

# Words in capitals, then words in small letters: the tokenizers of GPT-4o and of Mistral's Tekken.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_SLASHED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_SLASHED_REST}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_SHORT_FORMS}?|{_LEAD}{_UPPER}+{_LOWER}*{_SHORT_FORMS}?"
    rf"|\p{{N}}{{1,3}}|{_SLASHED_REST}"
)

_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_ASCII_WORD = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_DEEPSEEK3 = (
    rf"{_ASCII_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class WordRule:
    patterns: tuple[str, ...]
    nfc: bool = False
    """Compose characters first (Unicode NFC)."""
    ignore_merges: bool = False
    """A word that is a token is taken whole, whatever the merges say."""
    add_bos: bool = False
    """What holds if the file does not say ``add_bos_token``."""

    @property
    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])

    @property
    def normalizers(self) -> list[normalizers.Normalizer]:
        return [normalizers.NFC()] if self.nfc else []


_DEFAULT_RULE = WordRule((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"))
_GPT2_RULE = WordRule((_GPT2,))
_DIGITS_RULE = WordRule((r"\p{N}", _GPT2))
_LLAMA3_RULE = WordRule((_LLAMA3,), ignore_merges=True, add_bos=True)
_QWEN2_RULE = WordRule((_QWEN2,), nfc=True)

RULES: dict[str, WordRule] = {
    "default": _DEFAULT_RULE,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat", "exaone4", "mellum"), _GPT2_RULE),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_RULE),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3_RULE),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), WordRule((_LLAMA3,))),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), _QWEN2_RULE),
    **dict.fromkeys(("stablelm2", "hunyuan", "grok-2"), WordRule((_QWEN2,))),
    "tekken": WordRule((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4"), WordRule((_GPT4O,))),
    "falcon": WordRule((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), WordRule((_BLOOM,))),
    "viking": WordRule((_BLOOM, r"\p{N}")),
    "deepseek-coder": WordRule((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": WordRule((r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", _DEEPSEEK3)),
}


def word_rule(name: str) -> WordRule:
    """The rule of a pre-tokenizer name; raises ModelError if nobody knows it."""
    rule = RULES.get(name)
    if rule is None:
        raise ModelError(f"the model's pre-tokenizer {name!r} is unknown, so its text would be cut wrongly")
    return rule
