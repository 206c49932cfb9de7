"""A tiny model of the llama architecture with random weights: it evaluates in milliseconds, and every run gives the same file."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

N_EMBEDDING, N_FEED_FORWARD, N_LAYERS, N_HEADS, N_KV_HEADS, N_CONTEXT = 64, 96, 2, 4, 2, 256
PIECES = [*"etaoinsrhldcumwfgypb", "th", "he", "in", "er", "an", "re", "on", "at", "en", "nd", "the", "ing", "and"]
N_VOCAB = 3 + 256 + 2 * len(PIECES)


def write_tiny_model(
    path: Path, *, add_bos: bool = True, file_type: str = "F16", seed: int = 0, n_embedding: int = N_EMBEDDING,
    n_experts: int = 0, n_used: int = 2, tied: bool = False,
) -> Path:  # fmt: skip
    """Write the model; return `path`.

    Parameters
    ----------
    path : the GGUF
    add_bos : whether the tokenizer starts a text with BOS
    file_type : "F32", "F16", "BF16" or "Q8_0", of the matrices
    seed : of the weights
    n_embedding : 64, or another multiple of 64 (256 for K-quants)
    n_experts, n_used : experts of each feed-forward part, and to how many of them a token is sent; 0: no experts
    tied : whether the token embedding is the output matrix too
    """
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(N_CONTEXT)
    writer.add_embedding_length(n_embedding)
    writer.add_block_count(N_LAYERS)
    n_feed_forward = N_FEED_FORWARD * n_embedding // N_EMBEDDING
    writer.add_feed_forward_length(n_feed_forward)
    writer.add_head_count(N_HEADS)
    writer.add_head_count_kv(N_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(n_embedding // N_HEADS)
    writer.add_vocab_size(N_VOCAB)
    if n_experts:
        writer.add_expert_count(n_experts)
        writer.add_expert_used_count(n_used)
    writer.add_tokenizer_model("llama")
    words = [w for piece in PIECES for w in (piece, "\u2581" + piece)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    kinds += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(words)
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * 259 + [-float(i) for i in range(len(words))])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(add_bos)

    kind = gguf.GGMLQuantizationType[file_type]

    def matrix(name: str, rows: int, columns: int, scale: float, *outer: int) -> None:
        values = rng.standard_normal((*outer, rows, columns)).astype(np.float32) * np.float32(scale)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    def norm(name: str) -> None:
        writer.add_tensor(name, np.ones(n_embedding, np.float32) + rng.standard_normal(n_embedding).astype(np.float32) / 16)

    n_kv = n_embedding // N_HEADS * N_KV_HEADS
    matrix("token_embd.weight", N_VOCAB, n_embedding, 1.0)
    for layer in range(N_LAYERS):
        at = f"blk.{layer}."
        norm(at + "attn_norm.weight")
        matrix(at + "attn_q.weight", n_embedding, n_embedding, 0.2)
        matrix(at + "attn_k.weight", n_kv, n_embedding, 0.2)
        matrix(at + "attn_v.weight", n_kv, n_embedding, 0.2)
        matrix(at + "attn_output.weight", n_embedding, n_embedding, 0.2)
        norm(at + "ffn_norm.weight")
        outer, end = ((n_experts,), "_exps.weight") if n_experts else ((), ".weight")
        if n_experts:
            matrix(at + "ffn_gate_inp.weight", n_experts, n_embedding, 0.2)
        matrix(at + "ffn_gate" + end, n_feed_forward, n_embedding, 0.2, *outer)
        matrix(at + "ffn_up" + end, n_feed_forward, n_embedding, 0.2, *outer)
        matrix(at + "ffn_down" + end, n_embedding, n_feed_forward, 0.2, *outer)
    norm("output_norm.weight")
    if not tied:
        matrix("output.weight", N_VOCAB, n_embedding, 0.2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
