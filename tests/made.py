"""A GPT-2 whose four heads are built by hand, so that what each of them reads is known.

Tokens, positions and the token before have dimensions of their own in the stream. Layer 0: head 0 reads the token
before and writes it into the stream, head 1 reads key 0. Layer 1: head 0 is an induction head (it looks for keys whose
token before is its own token), head 1 reads all same tokens, itself among them, alike.
"""

from __future__ import annotations

import torch
import transformers as tf

VOCAB, PLACES, HEAD = 12, 32, 48
TOKEN, PLACE, BEFORE = 0, VOCAB, VOCAB + PLACES
SHARP = 30.0
SINK_NORM = 7.0


def made() -> tf.GPT2LMHeadModel:
    config = tf.GPT2Config(
        vocab_size=VOCAB,
        n_positions=PLACES,
        n_embd=2 * HEAD,
        n_layer=2,
        n_head=2,
        attn_implementation="eager",
        bos_token_id=0,
        eos_token_id=0,
    )
    model = tf.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.fill_(1.0)
        model.transformer.wte.weight[:, TOKEN : TOKEN + VOCAB] = torch.eye(VOCAB)
        model.transformer.wpe.weight[:, PLACE : PLACE + PLACES] = torch.eye(PLACES)
        first, second = (block.attn for block in model.transformer.h)
        width = 2 * HEAD
        for p in range(PLACES):  # Conv1D: [in, 3 · width]; head h has columns h · HEAD … of q, k and v each
            first.c_attn.weight[PLACE + p, p] = SHARP
            if p + 1 < PLACES:
                first.c_attn.weight[PLACE + p, width + p + 1] = SHARP
        first.c_attn.bias[HEAD] = SHARP
        first.c_attn.weight[PLACE, width + HEAD] = SHARP
        for t in range(VOCAB):
            first.c_attn.weight[TOKEN + t, 2 * width + t] = 1.0
            first.c_proj.weight[t, BEFORE + t] = 1.0
            second.c_attn.weight[TOKEN + t, t] = SHARP
            second.c_attn.weight[BEFORE + t, width + t] = SHARP
            second.c_attn.weight[TOKEN + t, HEAD + t] = SHARP
            second.c_attn.weight[TOKEN + t, width + HEAD + t] = SHARP
    return model
