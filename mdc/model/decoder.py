"""The caption decoder: a pre-norm transformer over tokens that attends to the patches of its image.

The same class without a memory is the text tower of the contrastive objectives.

Letters: B captions, M images (B = M x R, the R captions of one image being consecutive rows), P patches, L tokens,
D width, H heads, d width of a head, V vocabulary, N chosen positions.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

KeyValue = tuple[Tensor, Tensor]  # k_BHLd, v_BHLd
Memory = Tensor | list[KeyValue]  # patches_MPD, or what `Decoder.keys` makes of them

INIT_STD = 0.02  # GPT-2's


@dataclass
class Past:
    """Self-attention keys and values of the tokens decoded so far, in one layer."""

    keys: KeyValue | None = None

    def extend(self, k_BHLd: Tensor, v_BHLd: Tensor) -> KeyValue:
        """Put those of new tokens behind the earlier ones; returns all of them."""
        if self.keys is not None:
            k_BHLd, v_BHLd = torch.cat([self.keys[0], k_BHLd], dim=2), torch.cat([self.keys[1], v_BHLd], dim=2)
        self.keys = k_BHLd, v_BHLd
        return self.keys


@dataclass
class Cache:
    """The past of every layer, and how many tokens it holds."""

    layers: dict[int, Past] = field(default_factory=lambda: defaultdict(Past))
    length: int = 0

    def reorder(self, rows_B: Tensor) -> None:
        """Let row i go on from what row `rows_B[i]` has decoded (beam search)."""
        for past in self.layers.values():
            assert past.keys is not None
            past.keys = past.keys[0][rows_B], past.keys[1][rows_B]


def attention_mask(real_BL: Tensor, causal_B: Tensor) -> tuple[Tensor | None, bool]:
    """What self-attention may look at, as `(mask, is_causal)` for `Decoder.forward`.

    real_BL: which positions hold tokens; padding follows them. causal_B: rows that see only what comes before.
    Padding is never attended to. It needs no mask in causal rows, since no real token looks ahead, so a fused kernel
    gets a mask only where full rows are padded or both kinds are mixed. A row of padding alone looks at its first
    position, which keeps it finite. Call it on the host: it decides by values.
    """
    if bool(causal_B.all()):
        return None, True
    length = real_BL.shape[1]
    keys_B11L = (real_BL | (torch.arange(length, device=real_BL.device) == 0))[:, None, None, :]
    if not bool(causal_B.any()):
        return (None if bool(real_BL.all()) else keys_B11L), False
    earlier_LL = torch.ones(length, length, dtype=torch.bool, device=real_BL.device).tril()
    return torch.where(causal_B[:, None, None, None], earlier_LL, keys_B11L), False


class SelfAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x_BLD: Tensor, mask: Tensor | None, is_causal: bool, past: Past | None = None) -> Tensor:
        """past: of earlier tokens, which come before the ones given; it is extended."""
        B, L, D = x_BLD.shape
        q, k, v = self.qkv(x_BLD).view(B, L, 3, self.heads, D // self.heads).permute(2, 0, 3, 1, 4)
        if past is not None:
            k, v = past.extend(k, v)
        mixed_BHLd = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
        return self.out(mixed_BHLd.transpose(1, 2).reshape(B, L, D))


class CrossAttention(nn.Module):
    def __init__(self, width: int, heads: int, memory_width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(memory_width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def keys(self, patches_MPD: Tensor) -> KeyValue:
        """Keys and values `[M, H, P, d]`, to be computed once per image."""
        M, P, _ = patches_MPD.shape
        k, v = self.kv(patches_MPD).view(M, P, 2, self.heads, -1).permute(2, 0, 3, 1, 4)
        return k, v

    def forward(self, x_BLD: Tensor, keys: KeyValue) -> Tensor:
        """All captions of an image are one long query, so its keys are never copied."""
        B, L, D = x_BLD.shape
        k_MHPd, v_MHPd = keys
        M = k_MHPd.shape[0]
        q_MHQd = self.q(x_BLD).view(M, (B // M) * L, self.heads, D // self.heads).transpose(1, 2)
        mixed_MHQd = F.scaled_dot_product_attention(q_MHQd, k_MHPd, v_MHPd)
        return self.out(mixed_MHQd.transpose(1, 2).reshape(B, L, D))


class Block(nn.Module):
    """Self-attention, cross-attention where there is a memory, and a four times wider MLP, each behind its norm."""

    def __init__(self, width: int, heads: int, memory_width: int | None) -> None:
        super().__init__()
        self.norm_self = nn.LayerNorm(width)
        self.self_attention = SelfAttention(width, heads)
        if memory_width is not None:
            self.norm_cross = nn.LayerNorm(width)
            self.cross_attention = CrossAttention(width, heads, memory_width)
        self.norm_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(
        self,
        x_BLD: Tensor,
        memory: Tensor | KeyValue | None,
        mask: Tensor | None,
        is_causal: bool,
        past: Past | None,
    ) -> Tensor:
        """memory: patches_MPD, or this block's keys and values of them."""
        x_BLD = x_BLD + self.self_attention(self.norm_self(x_BLD), mask, is_causal, past)
        if memory is not None:
            keys = self.cross_attention.keys(memory) if isinstance(memory, Tensor) else memory
            x_BLD = x_BLD + self.cross_attention(self.norm_cross(x_BLD), keys)
        return x_BLD + self.down(F.gelu(self.up(self.norm_mlp(x_BLD))))


class Decoder(nn.Module):
    """Tokens in, hidden states out; `logits` is apart so that only positions with a loss are projected.

    Learned positions, tied input and output embedding, no bias in projections (METHOD section 1; CapPa). It is not
    told t. memory_width: D of the patch features; None for a tower that reads text alone. never: ids that no caption
    contains (padding, begin, mask): their probability is zero, in training, scoring and sampling alike, as in the
    zero masking probabilities of Sahoo et al. 2024 (arXiv 2406.07524), section 3.2.3.
    """

    never_V: Tensor

    def __init__(
        self,
        vocabulary: int,
        positions: int,
        width: int,
        depth: int,
        heads: int,
        memory_width: int | None,
        never: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions_LD = nn.Parameter(torch.empty(positions, width))
        self.blocks = nn.ModuleList(Block(width, heads, memory_width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        never_V = torch.zeros(vocabulary)
        never_V[list(never)] = -torch.inf
        self.register_buffer("never_V", never_V, persistent=False)
        self._initialise()

    def _initialise(self) -> None:
        """Normal weights, with branches that end in the residual stream scaled down by their number, as GPT-2."""
        branches = sum(name.endswith(("out.weight", "down.weight")) for name, _ in self.named_parameters())
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=INIT_STD / branches**0.5 if residual else INIT_STD)

    def keys(self, patches_MPD: Tensor) -> list[KeyValue]:
        """The cross-attention keys and values of M images, layer by layer, for a memory that is read many times."""
        return [block.cross_attention.keys(patches_MPD) for block in self.blocks]  # type: ignore[union-attr,operator]

    def forward(
        self,
        tokens_BL: Tensor,
        memory: Memory | None,
        mask: Tensor | None = None,
        is_causal: bool = False,
        cache: Cache | None = None,
    ) -> Tensor:
        """Hidden states `[B, L, D]` after the final norm.

        memory: the patches of M images with B = M x R, or what `keys` gives for them. mask, is_causal: from
        `attention_mask`. cache: the tokens given follow the cached ones, one at a time, and are added to it.

        Every parameter of a block is used within the block's own forward: it is sharded, recomputed or compiled alone.
        """
        first = 0 if cache is None else cache.length
        x_BLD = self.embed(tokens_BL) + self.positions_LD[first : first + tokens_BL.shape[1]]
        for i, block in enumerate(self.blocks):
            past = None if cache is None else cache.layers[i]
            x_BLD = block(x_BLD, memory[i] if isinstance(memory, list) else memory, mask, is_causal, past)
        if cache is not None:
            cache.length += tokens_BL.shape[1]
        return self.norm(x_BLD)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """`[N, V]`, minus infinity at ids that no caption contains."""
        return F.linear(hidden_ND, self.embed.weight, self.never_V.to(hidden_ND.dtype))
