"""The blocks that decoder-only transformers share, as short runs of operators.

Value names are reused from layer to layer, so that an executor's memory does not grow with depth. ``x`` is the
residual stream.

Knows: how blocks of a pre-norm transformer are wired, names of weights. Refuses to know: which model has which block.
"""

from branchline.models.config import ModelConfig
from branchline.models.rope import rope_spec
from branchline.ops.graph import Add, Embed, GatedActivation, Graph, Linear, Logits, Norm, Op, PagedAttention, Rope, RopeSpec


def transformer(config: ModelConfig) -> Graph:
    """Embedding, ``layers`` times attention and gated feed-forward, norm, output head."""
    rope = rope_spec(config.rope, config.head_dim)
    layers = [op for layer in range(config.layers) for op in (*attention(config, rope, layer), *feed_forward(config, layer))]
    return Graph(
        ops=(Embed("x", "token_embd.weight"), *layers, *head(config)),
        layers=config.layers,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
    )


def attention(config: ModelConfig, rope: RopeSpec, layer: int) -> tuple[Op, ...]:
    """Norm, projections (with bias and per-head norms where the model has them), rope, attention, residual."""
    blk = f"blk.{layer}"
    bias = {name: f"{blk}.attn_{name}.bias" if config.qkv_bias else None for name in "qkv"}
    return (
        Norm("h", "x", f"{blk}.attn_norm.weight", config.hidden, config.norm_eps),
        Linear("q", "h", f"{blk}.attn_q.weight", bias["q"]),
        Linear("k", "h", f"{blk}.attn_k.weight", bias["k"]),
        Linear("v", "h", f"{blk}.attn_v.weight", bias["v"]),
        *(head_norms(config, layer) if config.qk_norm else ()),
        Rope("q", "q", rope),
        Rope("k", "k", rope),
        PagedAttention(
            "h",
            "q",
            "k",
            "v",
            layer=layer,
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            window=config.sliding_window,
        ),
        Linear("h", "h", f"{blk}.attn_output.weight"),
        Add("x", "x", "h"),
    )


def head_norms(config: ModelConfig, layer: int) -> tuple[Op, ...]:
    """Norm of each query and key head by itself, before rope (Qwen 3)."""
    return (
        Norm("q", "q", f"blk.{layer}.attn_q_norm.weight", config.head_dim, config.norm_eps),
        Norm("k", "k", f"blk.{layer}.attn_k_norm.weight", config.head_dim, config.norm_eps),
    )


def feed_forward(config: ModelConfig, layer: int) -> tuple[Op, ...]:
    """Norm, ``down(silu(gate(h)) * up(h))``, residual."""
    blk = f"blk.{layer}"
    return (
        Norm("h", "x", f"{blk}.ffn_norm.weight", config.hidden, config.norm_eps),
        Linear("gate", "h", f"{blk}.ffn_gate.weight"),
        Linear("up", "h", f"{blk}.ffn_up.weight"),
        GatedActivation("h", "gate", "up"),
        Linear("h", "h", f"{blk}.ffn_down.weight"),
        Add("x", "x", "h"),
    )


def head(config: ModelConfig) -> tuple[Op, ...]:
    """Final norm and logits; a model with tied embeddings reads the embedding table a second time."""
    table = "token_embd.weight" if config.tied_embeddings else "output.weight"
    return (Norm("x", "x", "output_norm.weight", config.hidden, config.norm_eps), Logits("logits", "x", table))
