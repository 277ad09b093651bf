"""Real models: load one, tokenize a text, run it once and have the attention of every layer as a matrix.

    source = load("smollm2")                     # or "minilm", a folder, a Hugging Face id
    done = run(source, "Mika saw that …")        # one forward pass
    done.recording[3][0, 2, -1]                  # what the last token reads in layer 3, head 2
    done.recording.save("mika.safetensors")      # and later open("mika.safetensors")[3][0, 2, -1]

`record(model)` does the same around code of your own. It works for every model whose attention goes through
transformers' attention interface with causal, sliding-window, chunked, padding or packed-document masks, with
grouped queries, softcap and sinks: tried are BERT, Cohere 1 and 2, DeepSeek 3, DistilBERT, ELECTRA, Gemma 2
and 3, GPT-2, GPT-J, GPT-NeoX, gpt-oss, Granite, Llama and Llama 4, Mistral, Mixtral, ModernBERT, OLMo 2, OPT,
Phi 3, Qwen 2 and 3, RoBERTa, SmolLM 2 and 3, ViT. It refuses by name what it cannot show: models that do their
attention by themselves (BLOOM, DeBERTa, Falcon, GPT-Neo, MPNet, …), a learned position bias (T5), layers that
share one module (ALBERT), other masks. Models of several stacks (BART) are recorded a part at a time.
"""

from __future__ import annotations

from . import measures
from .leaks import ModelLeaks, leaks
from .onepass import Run, run
from .parquet import SurveyError
from .predict import PredictError, next_tokens
from .record import record
from .recording import Recording
from .rule import RecordError
from .sources import Source, SourceError, load
from .store import open
from .survey import Survey, survey
from .tokens import TextError, Tokens
from .words import Words, join

__all__ = [
    "ModelLeaks",
    "PredictError",
    "RecordError",
    "Recording",
    "Run",
    "Source",
    "SourceError",
    "Survey",
    "SurveyError",
    "TextError",
    "Tokens",
    "Words",
    "join",
    "leaks",
    "load",
    "measures",
    "next_tokens",
    "open",
    "record",
    "run",
    "survey",
]
