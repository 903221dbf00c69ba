"""How close written captions come to true ones: CIDEr, BLEU-1 to 4 and ROUGE-L, by sampler and length, and blind.

The measures are those of `pycocoevalcap`, the code of the COCO caption evaluation. Its tokeniser is a Java program; in
its place stands `plain_words`, so numbers compare between runs here, and only nearly with published ones.

Letters: M pictures, P patches, D width, L tokens.
"""

import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

from pycocoevalcap.bleu.bleu import Bleu
from pycocoevalcap.cider.cider import Cider
from pycocoevalcap.rouge.rouge import Rouge
from torch import Tensor

from mdc.draws import derive_seed
from mdc.generate.samplers import SAMPLERS, generate
from mdc.train.checkpoint import LoadedModel


def plain_words(text: str) -> str:
    """Words in lower case with one space between them; punctuation and symbols divide words and are left out.

    Tokenizers put spaces around hyphens and apostrophes where captions have none: so both become the same words.
    """
    letters = unicodedata.normalize("NFKC", text).casefold()
    return " ".join("".join(" " if unicodedata.category(c)[0] in "PS" else c for c in letters).split())


def caption_scores(written: Sequence[str], references: Sequence[Sequence[str]]) -> dict[str, float]:
    """The measures for M pictures, each with one written caption and one or more true ones.

    All are 0 at worst and 1 at best but CIDEr, which ends at 10. CIDEr weighs words by how few of these M pictures have
    them in their references, so it is 0 for one picture and depends on which pictures are taken.
    """
    told = {str(i): [plain_words(text)] for i, text in enumerate(written)}
    true = {str(i): [plain_words(text) for text in texts] for i, texts in enumerate(references)}
    bleu, _ = Bleu(4).compute_score(true, told, verbose=0)
    cider, _ = Cider().compute_score(true, told)
    rouge, _ = Rouge().compute_score(true, told)
    by_length = {f"bleu_{n}": float(value) for n, value in enumerate(bleu, start=1)}
    return {"cider": float(cider), **by_length, "rouge_l": float(rouge)}


def score_written(
    loaded: LoadedModel,
    patches_MPD: Tensor,
    references: Sequence[Sequence[str]],
    lengths: Sequence[int],
    seed: int,
    on_captions: Callable[[int], object],
) -> list[dict[str, Any]]:
    """A row of scores for every sampler that fits the model and every length, in that order.

    lengths: tokens, the end token included. "blind" holds the scores of captions written for the mean picture: what
    knowing the words alone is worth. on_captions: called with the number of captions written.
    """
    objective = loaded.config.pretrain.objective
    sights = {"seen": patches_MPD, "blind": patches_MPD.mean(0, keepdim=True).expand_as(patches_MPD)}
    seeds = [derive_seed(seed, "caption score", place) for place in range(len(references))]
    rows = []
    for sampler in (name for name, sampler in SAMPLERS.items() if objective in sampler.objectives):
        for length in lengths:
            scores = {}
            for sight, seen_MPD in sights.items():
                tokens_ML = generate(loaded.model, loaded.config, seen_MPD, length, sampler, seed=seeds).tokens_ML
                texts = [loaded.tokenizer.decode(tokens) for tokens in tokens_ML.tolist()]
                scores[sight] = caption_scores(texts, references)
                on_captions(len(texts))
            rows.append({"sampler": sampler, "length": length, **scores["seen"], "blind": scores["blind"]})
    return rows
