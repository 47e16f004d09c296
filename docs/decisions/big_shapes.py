"""Speed on the shapes of larger models: random weights in 4-bit groups, one row that decodes and one prompt, no head.

python docs/decisions/big_shapes.py [--models 1b,3b]
"""

import argparse
import dataclasses

from branchline.base.machine import Machine
from branchline.bench.cases import design
from branchline.bench.limits import measure_limits
from branchline.bench.step import EXECUTORS, measure, multipliers
from branchline.models.random import RandomCheckpoint, tiny_config

SHAPES = {
    # Llama 3.2: layers, hidden, heads, key heads, head size, FFN
    "1b": (16, 2048, 32, 8, 64, 8192),
    "3b": (28, 3072, 24, 8, 128, 8192),
}
VOCABULARY = 512
"""Small: the tokenizer of random models knows few ids, and a head that nobody computes must not count as read."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="1b,3b")
    threads = Machine.look().cpus
    for name in parser.parse_args().models.split(","):
        layers, hidden, heads, kv_heads, head_dim, ffn = SHAPES[name]
        config = dataclasses.replace(
            tiny_config("llama"), name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads,
            head_dim=head_dim, ffn=ffn, vocab_size=VOCABULARY, context_length=2048,
        )  # fmt: skip
        plan = design(context_length=2048, rows=[1], prompts=[256], prefixes=[], repeats=5, page_size=16, step_tokens=512)
        subject = EXECUTORS["native"](RandomCheckpoint(config), plan, threads, True, quantize="int4")
        try:
            timings = measure(subject, plan)
        finally:
            subject.worker.close()
        limits = measure_limits(threads, multipliers("native", "auto"))
        print(f"{name}: {subject.name}, memory {limits.read_bytes_s / 1e9:.1f} GB/s")
        for one in timings:
            shares = ", ".join(f"{kind} {ns / sum(one.op_ns.values()):.0%}" for kind, ns in one.op_ns.items())
            print(
                f"  {one.case.kind} {one.case.tokens}: {one.median_ns / 1e6:.1f} ms, {one.tokens_s:.1f} tok/s, "
                f"{one.read_bytes_s / limits.read_bytes_s:.0%} of memory, {one.flop_s / 2e9:.0f} GMAC/s ({shares})"
            )


if __name__ == "__main__":
    main()
