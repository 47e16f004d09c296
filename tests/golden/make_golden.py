"""Make ``smollm2.npz``: what Hugging Face transformers computes with the default model, in float32.

Run once, in an environment of its own, on the GGUF file that the engine serves by default:

    pip install torch==2.13.0 transformers==5.24.0 accelerate==1.15.0 gguf==0.19.0
    python tests/golden/make_golden.py SmolLM2-135M-Instruct.Q4_1.gguf tests/golden/smollm2.npz

Contents, for 20 prompts:

    prompt_tokens      all prompts, one after another          prompt_offsets [21]
    greedy_tokens      [20, 64], end-of-sequence tokens are ordinary ones
    margins            [20, 64], lead of the best logit over the second at each of these tokens
    checked            positions, counted from the last prompt position, whose logits are kept (one forward over everything)
    top_ids, top_values          [20, checked, 200]: the highest logits
    random_ids, random_values    [200], [20, checked, 200]: logits of the same random tokens everywhere
"""

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NEW_TOKENS = 64
CHECKED = (0, 15, 31, 63)
KEPT = 200

LONG = (
    "The lighthouse keeper wrote down the weather every morning, and every evening he read what he had written. "
    "On the first of March the wind came from the north, and two fishing boats stayed in the harbour. "
    "On the second of March it turned to the west; the boats went out and came back with herring. "
    "On the third there was fog, and he rang the bell from six until noon. "
)

TEXTS = (
    "Hello",
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "Q: What is 17 + 25?\nA:",
    "def fibonacci(n):\n    ",
    "import numpy as np\n\nclass Matrix:\n    def __init__(self, rows, cols):\n",
    "SELECT name, COUNT(*) FROM orders\nWHERE",
    '{"name": "Ada", "born": 1815, "works": [',
    "Die Hauptstadt von Österreich heißt",
    "La vie est belle parce que",
    "日本の首都は",
    "Привет, как дела?",
    "مرحبا بالعالم",
    "Emoji test: 🎉🚀 and 👩‍👩‍👧‍👦 mean",
    "1, 1, 2, 3, 5, 8, 13,",
    "<|im_start|>user\nWrite a haiku about rain.<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>system\nYou are a pirate.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n",
    "    \n\n\t  indented   and   spaced\n\n",
    "The three laws of thermodynamics are as follows. First,",
    LONG * 8 + "On the fourth of March",
)


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompt: list[int]) -> tuple[list[int], list[float]]:
    """64 most likely tokens after one another, and the lead of each."""
    tokens, margins, cache = [], [], None
    step = torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        out = model(input_ids=step, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = out.logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        step = best.indices[:1][None]
    return tokens, margins


@torch.inference_mode()
def kept_logits(model: torch.nn.Module, prompt: list[int], tokens: list[int], random_ids: np.ndarray) -> tuple:
    logits = model(input_ids=torch.tensor([prompt + tokens[:-1]])).logits[0].numpy()
    chosen = logits[[len(prompt) - 1 + place for place in CHECKED]]
    top = np.argsort(-chosen, axis=1, kind="stable")[:, :KEPT]
    return top.astype(np.uint16), np.take_along_axis(chosen, top, 1), chosen[:, random_ids]


def main(model_file: str, target: str) -> None:
    folder, name = str(Path(model_file).parent), Path(model_file).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    prompts = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    random_ids = np.random.default_rng(1).choice(model.config.vocab_size, KEPT, replace=False)
    generated = [greedy(model, prompt) for prompt in prompts]
    kept = [kept_logits(model, prompt, tokens, random_ids) for prompt, (tokens, _) in zip(prompts, generated, strict=True)]
    np.savez_compressed(
        target,
        prompt_tokens=np.concatenate(prompts).astype(np.uint16),
        prompt_offsets=np.cumsum([0, *map(len, prompts)]).astype(np.int32),
        greedy_tokens=np.array([tokens for tokens, _ in generated], np.uint16),
        margins=np.array([margins for _, margins in generated], np.float32),
        checked=np.array(CHECKED, np.int32),
        top_ids=np.stack([ids for ids, _, _ in kept]),
        top_values=np.stack([values for _, values, _ in kept]),
        random_ids=random_ids.astype(np.uint16),
        random_values=np.stack([values for _, _, values in kept]),
    )
    for text, prompt, (tokens, margins) in zip(TEXTS, prompts, generated, strict=True):
        print(
            f"{len(prompt):4} tokens, smallest lead {min(margins):.5f}: {text[-40:]!r} -> {tokenizer.decode(tokens)[:60]!r}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
