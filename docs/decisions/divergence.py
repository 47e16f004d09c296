"""How far the native executor's next-token distributions are from float32: mean KL divergence, and how often both agree on
the most likely token.

    python docs/decisions/divergence.py [--positions 2048] [--isa auto] [--quantize int8] [TEXT ...]

Plain texts, this project's own prose if none is named; the default model; the reference executor is the truth.
"""

import argparse
from pathlib import Path

import numpy as np

from branchline.base.config import Environment
from branchline.memory import kernel_kv
from branchline.memory.kernel_kv import KernelKvPool
from branchline.memory.kv import KvPool
from branchline.models.registry import build_graph
from branchline.models.repack import repack, to_floats
from branchline.models.source import open_checkpoint
from branchline.ops.batch import Batch
from branchline.ops.native import NativeExecutor
from branchline.ops.reference import ReferenceExecutor
from branchline.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
OURS = [ROOT / "LICENSE", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CHUNK, PAGE = 256, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--quantize", choices=("int8", "int4"))
    parser.add_argument("texts", nargs="*", type=Path, metavar="TEXT")
    arguments = parser.parse_args()
    checkpoint = open_checkpoint(None, Environment.read().cache_dir, print)
    text = "\n".join(path.read_text("utf-8") for path in arguments.texts or OURS)
    tokens = np.array(Tokenizer.from_source(checkpoint.tokenizer).encode(text, add_special=True)[: arguments.positions])
    graph = build_graph(checkpoint.config, checkpoint.names)
    shape = {**graph.kv_shape, "page_size": PAGE, "page_count": 1 + len(tokens) // PAGE}

    def native(kv_dtype: str) -> NativeExecutor:
        return NativeExecutor(
            graph,
            lambda name: repack(checkpoint.tensor(name), arguments.quantize),
            lambda name: to_floats(checkpoint.tensor(name)),
            KernelKvPool(**shape, kv_dtype=kv_dtype),
            threads=2,
            isa=arguments.isa,
        )

    reference = ReferenceExecutor(graph, lambda name: to_floats(checkpoint.tensor(name)), KvPool(**shape))
    subjects = {kv_dtype: native(kv_dtype) for kv_dtype in kernel_kv.NUMBERS}
    divergence: dict[str, list[float]] = {name: [] for name in subjects}
    agreed = dict.fromkeys(subjects, 0)
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        batch = Batch(
            tokens=chunk, positions=np.arange(start, start + len(chunk)), row_offsets=np.array([0, len(chunk)]),
            page_tables=np.arange(shape["page_count"])[None],
        )  # fmt: skip
        truth = log_softmax(reference.logits(reference.forward(batch)))
        for name, executor in subjects.items():
            found = log_softmax(executor.logits(executor.forward(batch)))
            divergence[name] += (np.exp(truth) * (truth - found)).sum(axis=1).tolist()
            agreed[name] += int((truth.argmax(axis=1) == found.argmax(axis=1)).sum())
    for name, values in divergence.items():
        print(f"pages {name}: mean KL {np.mean(values):.5f}, same greedy token {agreed[name] / len(values):.1%}")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


if __name__ == "__main__":
    main()
