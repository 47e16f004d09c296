"""Columns of a step without a worker: greedy rows, but for what is named, and tokens to score."""

import numpy as np

from branchline.ops.batch import Ragged, SamplingColumns, Scored

RAGGED = {"known": np.int64, "bias_ids": np.int64, "bias_values": np.float32, "forbidden": np.int64, "mask": np.uint32}
DEFAULTS = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0,
            "frequency_penalty": 0.0, "seed": 1, "position": 1, "logprobs": -1, "prompt_count": 0}  # fmt: skip
KINDS = {"top_k": np.int64, "position": np.int64, "logprobs": np.int64, "prompt_count": np.int64, "seed": np.uint64}


def columns(rows, token_limit, **wish):
    """The same ``wish`` in the first rows of a batch."""
    return columns_of([wish] * rows, token_limit)


def columns_of(wishes, token_limit):
    """One row for each of ``wishes``, from the first row of a batch on."""
    plain = {
        name: np.array([of.get(name, usual) for of in wishes], KINDS.get(name, np.float64))
        for name, usual in DEFAULTS.items()
    }
    ragged = {name: Ragged.of([np.array(of.get(name, ()), kind) for of in wishes], kind) for name, kind in RAGGED.items()}
    return SamplingColumns(token_limit=token_limit, row=np.arange(len(wishes)), **plain, **ragged)


def scored(places=(), tokens=(), tops=()):
    return Scored(*(np.array(of, np.int64) for of in (places, tokens, tops)))
