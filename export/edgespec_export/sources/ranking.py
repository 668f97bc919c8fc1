"""How rerankers score texts for a query: the text that they read, and the row of the score's logit.

The row is a head's, or what the words "yes" and "no" have apart in the LM head (Zhang et al. 2025,
"Qwen3 Embedding", arXiv 2506.05176).
"""

import json
import re
from collections.abc import Callable

from edgespec_export.sources.checkpoint import Checkpoint
from edgespec_models.bundles.bundle import Ranking
from edgespec_models.files.blocks import F32
from edgespec_models.text.tokenizer import Tokenizer

_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_QWEN3 = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
    "<think>\n\n</think>\n\n"
)


def ranking_of(checkpoint: Checkpoint, name: str, template: Callable[[], str]) -> tuple[Ranking, F32] | None:
    """How a model scores texts, and the row, float32 ``(hidden_size,)``; None if it does not.

    Without a head, models are rerankers by their ``name``, as in llama.cpp's converter. Other heads than
    Qwen3-Reranker's read ``template``.
    """
    pattern = checkpoint.family.reranker
    says_yes = bool(pattern) and re.search(pattern, name, re.IGNORECASE) is not None
    if "score" in checkpoint.tensors:
        rows = checkpoint.values("score") / checkpoint.logits_factor
        row = rows[0] - rows[1:].sum(axis=0)  # of two, yes and no, the probability is the difference's
    elif says_yes:
        tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json())
        words = [tokenizer.encode(word) for word in ("yes", "no")]
        if any(len(tokens) > 1 for tokens in words):
            return None
        yes, no = (checkpoint.values("lm_head", token, token + 1)[0] for (token,) in words)
        row = yes - no
    else:
        return None
    text = _QWEN3 if says_yes else template().replace(_INSTRUCTION, "{instruction}")
    return Ranking(template=text, instruction=_INSTRUCTION if "{instruction}" in text else ""), row


def pair_template(tokenizer_json: str) -> str:
    """The text of a query and a document, as a ``tokenizer.json`` puts two texts together."""
    processor = json.loads(tokenizer_json).get("post_processor") or {}
    steps = (processor, *processor.get("processors", ()))
    pairs = (step["pair"] for step in steps if step.get("type") == "TemplateProcessing")
    pair = next(pairs, [{"Sequence": {"id": "A"}}, {"Sequence": {"id": "B"}}])
    texts = {"A": "{query}", "B": "{document}"}
    parts = (part.get("SpecialToken") or part["Sequence"] for part in pair)
    return "".join(texts.get(part["id"], part["id"]) for part in parts)
