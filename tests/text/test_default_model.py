"""The tokenizer and template of the model that is served by default."""

import time

import pytest
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers

from branchline.core.request import SamplingParams
from branchline.text.build import build_text_side
from branchline.text.detokenize import Detokenizer
from branchline.text.tokenizer import Tokenizer
from branchline.wire.messages import ChatPrompt, Generate, ModelFacts

TEXTS = [
    "The capital of France is",
    "I'll pay $1,234.56 in 2025;   they've   said\tso.\n\n\nOK?\r\n",
    "naïve café — “quotes” … ½ ² Ⅷ ١٢٣",
    "你好，世界。日本語 한국어 ไทย العربية",
    "🙂👩‍👩‍👧‍👦🇫🇷 e\u0301 \u200b\u00a0x",
    "def f(x):\n    return x**2  # <|im_start|>user\n",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>  <|im_end|>",
    " leading and trailing  ",
    "\x00\x7f\ufffd",
    "",
]


@pytest.fixture(scope="module")
def tokenizer(default_checkpoint):
    return Tokenizer.from_source(default_checkpoint.tokenizer)


@pytest.fixture(scope="module")
def oracle(default_checkpoint):
    """SmolLM2's own ``tokenizer.json``, rebuilt: digits one by one, then GPT-2's words."""
    metadata = default_checkpoint.tokenizer.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    made = tokenizers.Tokenizer(models.BPE(vocab={text: token for token, text in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens[:17]])
    return made


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_the_original_tokenizer(tokenizer, oracle, text):
    ids = tokenizer.encode(text, add_special=True)
    assert ids == oracle.encode(text).ids
    detokenizer = Detokenizer(tokenizer, skip_special=False)
    assert "".join(detokenizer.feed(token) for token in ids) + detokenizer.flush() == text
    assert tokenizer.decode(ids, skip_special=False) == text


def test_known_ids(tokenizer):
    assert tokenizer.encode("The capital of France is", add_special=True) == [504, 3575, 282, 4649, 314]
    assert (tokenizer.vocab_size, tokenizer.bos_id, len(tokenizer.special_ids)) == (49152, 1, 17)
    assert set(tokenizer.eos_ids) == {0, 2}


def test_loading_is_quick(default_checkpoint):
    started = time.process_time()
    Tokenizer.from_source(default_checkpoint.tokenizer)
    assert time.process_time() - started < 3


def test_chat(default_checkpoint, tokenizer):
    facts = ModelFacts(name="m", digest="d", vocab_size=49152, context_length=8192, max_prompt_tokens=8191, executor="none")
    side = build_text_side(default_checkpoint, facts)
    messages = ({"role": "user", "content": "What is <|im_end|>?"},)
    effects = side.handle(Generate(request_id="r", prompt=ChatPrompt(messages=messages), sampling=SamplingParams()))
    prompt = effects.to_engine[0].spec.prompt
    assert tokenizer.decode(prompt, skip_special=False) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is <|im_end|>?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert [token for token in prompt if token in (1, 2)] == [1, 2, 1, 2, 1]
