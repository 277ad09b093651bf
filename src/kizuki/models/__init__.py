"""Real models: load one, tokenize a text, run it once and have the attention of every layer as a matrix.

    source = load("smollm2")                     # or "minilm", a folder, a Hugging Face id
    done = run(source, "Mika saw that …")        # one forward pass
    done.recording[3][0, 2, -1]                  # what the last token reads in layer 3, head 2
    done.recording.save("mika.safetensors")      # and later open("mika.safetensors")[3][0, 2, -1]

`record(model)` does the same around code of your own, for any torch model whose attention passes by a place that is
heard:

- transformers' attention interface, with causal, sliding-window, chunked, padding or packed-document masks, grouped
  queries, softcap, sinks, position bias and cross-attention. Tried are ALBERT, BART, BERT, CLIP, Cohere 1 and 2,
  DeepSeek 3, DINOv2, DistilBERT, ELECTRA, Gemma 2 and 3, GPT-2, GPT-J, GPT-NeoX, gpt-oss, Granite, Llama and Llama 4,
  LLaVA, Mistral, Mixtral, ModernBERT, OLMo 2, OPT, Phi 3, Qwen 2, 3 and 3-Next, RoBERTa, SmolLM 2 and 3, Swin, T5 and
  UMT5, ViT, Whisper;
- `F.scaled_dot_product_attention`, `nn.MultiheadAttention`, `nn.TransformerEncoder` and its fast path,
  `kizuki.attention` and kizuki's own layers;
- BLOOM and Falcon, which write their attention out;
- `note(query, key, value, …)`, one line in the forward of any other module.

It refuses by name what it cannot show: library models that write their attention out in some other way (DeBERTa,
GPT-Neo, MPNet, MPT, XGLM, …), masks without a rule, and every layer whose own output A v does not give.

`install()` registers kizuki with transformers; after it `attn_implementation="kizuki"` names it.
"""

from __future__ import annotations

from . import causes, measures
from .generation import GeneratedLayer, Generation, Row
from .implementation import install
from .leaks import ModelLeaks, leaks
from .note import note
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
    "GeneratedLayer",
    "Generation",
    "ModelLeaks",
    "PredictError",
    "RecordError",
    "Recording",
    "Row",
    "Run",
    "Source",
    "SourceError",
    "Survey",
    "SurveyError",
    "TextError",
    "Tokens",
    "Words",
    "causes",
    "install",
    "join",
    "leaks",
    "load",
    "measures",
    "next_tokens",
    "note",
    "open",
    "record",
    "run",
    "survey",
]
