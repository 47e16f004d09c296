"""Small vocabularies of every kind, a text side around one of them, and an engine that says what it is told to."""

import itertools
import json
from datetime import UTC, datetime

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from branchline.base.finish import FinishReason
from branchline.core.request import SamplingParams
from branchline.core.result import Finish, Output, TokenLogprobs, Usage
from branchline.models.checkpoint import TokenizerSource
from branchline.models.random import byte_letters
from branchline.text.side import TextSide
from branchline.text.template import NoTemplate, chat_template
from branchline.text.tokenizer import Tokenizer
from branchline.wire.messages import Generate, ModelFacts, Outputs, TextPrompt

MERGES = ("h e", "l l", "he ll", "hell o", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld", "< |", "| >", "Ġ Ġ", "' s")
START, END, CALL = "<|im_start|>", "<|im_end|>", "<tool_call>"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
NOON = datetime(2025, 2, 3, 12, tzinfo=UTC)


def byte_level_tokens():
    merged = ["".join(merge.split(" ")) for merge in MERGES]
    return [*byte_letters(), *merged, START, END, CALL]


def byte_level_source(pre="gpt-2", **changes):
    """GGUF metadata of a byte-level vocabulary: 256 bytes, some merges, two control tokens, one user-defined token."""
    tokens = byte_level_tokens()
    count = len(tokens)
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (count - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": list(MERGES),
    }
    fields = {
        "metadata": metadata, "chat_template": CHATML, "bos_token_id": count - 3, "eos_token_ids": (count - 2,),
        "add_bos": False, "vocab_size": count,
    }  # fmt: skip
    return TokenizerSource(**(fields | changes))


def byte_level_json(ids, **added):
    """A ``tokenizer.json`` for the same vocabulary, built with the library alone."""
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    vocab = {text: token for token, text in enumerate(byte_level_tokens()[:-3])}
    oracle = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    oracle.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    oracle.decoder = decoders.ByteLevel()
    oracle.add_tokens([AddedToken(text, special=text != CALL, **({"normalized": False} | added)) for text in ids])
    return oracle.to_str()


# Pieces by falling score, as SentencePiece's BPE trainer numbers them: the earlier a merge was learnt the better.
PIECES = (
    "▁t", "he", "▁the", "in", "er", "▁a", "an", "▁an", "ll", "ell", "▁h", "▁he", "▁hell", "▁hello", "▁▁", "aa", "aaa",
    "aaaa", "th", "ther", "ing", "▁b", "▁be", "or", "ld", "orld", "▁w", "▁world", "▁", "a", "b", "d", "e", "g", "h", "i",
    "l", "n", "o", "r", "t", "w", ".", "é",
)  # fmt: skip


def sentence_piece_source(prefix=True, **changes):
    """GGUF metadata of the SentencePiece kind: control tokens, 256 byte tokens, pieces, and two tokens a user added."""
    control, users = ["<unk>", "<s>", "</s>"], ["<start_of_turn>", "    "]
    tokens = [*control, *(f"<0x{byte:02X}>" for byte in range(256)), *PIECES, *users]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [float(-index) for index in range(len(PIECES))] + [-1000.0] * 2,
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(PIECES) + [4, 4],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    fields = {
        "metadata": metadata, "bos_token_id": 1, "eos_token_ids": (2,), "add_bos": True, "vocab_size": len(tokens),
    }  # fmt: skip
    return TokenizerSource(**(fields | changes))


def sentence_piece_oracle(source, text):
    """SentencePiece's algorithm, naively: join the neighbours whose union scores best, the leftmost of equals."""
    tokens = source.metadata["tokenizer.ggml.tokens"]
    scores = dict(zip(tokens, source.metadata["tokenizer.ggml.scores"], strict=True))
    ids = {text: token for token, text in enumerate(tokens)}
    normal = set(PIECES)
    text = ("▁" if source.metadata["tokenizer.ggml.add_space_prefix"] and text else "") + text.replace(" ", "▁")
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(symbols)) if a + b in normal]
        if not pairs:
            break
        _, place = min(pairs)
        symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
    spelled = [[ids[s]] if s in normal else [ids[f"<0x{byte:02X}>"] for byte in s.encode()] for s in symbols]
    return [token for part in spelled for token in part]


def edited_json(text, **changes):
    return json.dumps(json.loads(text) | changes)


# ------------------------------------------------------------------------------------------------ a text side

FACTS = ModelFacts(name="tiny", digest="d1", vocab_size=10_000, context_length=64, max_prompt_tokens=60, executor="none")


def make_side(source=None, facts=FACTS, template=CHATML, seed=7):
    tokenizer = Tokenizer.from_source(source or byte_level_source())
    made = chat_template(template, variables=tokenizer.variables, now=lambda: NOON) if template else NoTemplate()
    return TextSide(tokenizer, made, facts, draw_seed=lambda: seed), tokenizer


def generate(request_id="r", prompt="hello", **fields):
    sampling = SamplingParams(**fields.pop("sampling", {}))
    prompt = TextPrompt(prompt) if isinstance(prompt, str) else prompt
    return Generate(request_id=request_id, prompt=prompt, sampling=sampling, **fields)


def news(request_id, tokens=(), *, finish=None, logprobs=False, **fields):
    """What an engine says about one request. ``finish`` is a reason or a whole ``Finish``."""
    if isinstance(finish, FinishReason):
        finish = Finish(finish, Usage())
    rows = tuple(TokenLogprobs(token, -0.5, ((token, -0.5), (0, -2.0))) for token in tokens) if logprobs else ()
    return Outputs((Output(request_id, tuple(tokens), rows, finish=finish, **fields),))
