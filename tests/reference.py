"""The obvious, slow twins of what is fast: they import nothing from the fast code and say what it must do."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from cascade.draft import Verdict

MASK = 2**64 - 1


# -- noise -------------------------------------------------------------------------------------------


def mix(x: int) -> int:
    x ^= x >> 30
    x = x * 0xBF58476D1CE4E5B9 & MASK
    x ^= x >> 27
    x = x * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def key(seed: int, position: int) -> int:
    phi = 0x9E3779B97F4A7C15
    return mix(mix((seed + phi) & MASK) ^ mix((position * phi + 0x6A09E667F3BCC909) & MASK))


def uniform(seed: int, position: int, token: int) -> float:
    k = key(seed, position)
    hashed = mix(mix((k + token * 0x9E3779B97F4A7C15) & MASK) ^ k)
    return (hashed // 2**12 + 0.5) / 2**52


def gumbel(seed: int, position: int, token: int) -> float:
    return -math.log(-math.log(uniform(seed, position, token)))


# -- sampling ----------------------------------------------------------------------------------------


def relative(scores: Sequence[float], temperature: float) -> list[float]:
    """Logits less their maximum, over the temperature; on paper any constant may be subtracted."""
    top = max(scores)
    return [(s - top) / temperature if s > -math.inf else -math.inf for s in map(float, scores)]


def survivors(
    scores: Sequence[float], temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[int]:
    """The ids that top-k, then top-p, then min-p leave, ascending."""
    ids = list(range(len(scores)))
    if 0 < top_k < len(scores):
        kth = sorted(scores, reverse=True)[top_k - 1]
        ids = [i for i in ids if scores[i] >= kth]
    logits = relative(scores, temperature)
    if top_p < 1:
        total = math.fsum(math.exp(logits[i]) for i in ids)
        kept: list[int] = []
        before = 0.0
        for i in sorted(ids, key=lambda i: (-logits[i], i)):
            if logits[i] == -math.inf or before >= top_p * total:
                break
            kept.append(i)
            before = math.fsum(math.exp(logits[j]) for j in kept) if len(kept) < 100 else before + math.exp(logits[i])
        ids = sorted(kept)
    if min_p > 0:
        ids = [i for i in ids if logits[i] >= math.log(min_p)]
    return ids


def sample(
    scores: Sequence[float],
    seed: int,
    position: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """The survivor with the largest logit + Gumbel number; the lowest id of equals."""
    if temperature == 0 or top_k == 1:
        return max(range(len(scores)), key=lambda i: (scores[i], -i))
    logits = relative(scores, temperature)
    ids = survivors(scores, temperature, top_k, top_p, min_p)
    return max(ids, key=lambda i: (logits[i] + gumbel(seed, position, i), -i))


def penalised(scores: Sequence[float], tokens: Sequence[int], penalty: float) -> list[float]:
    """Repetition penalty in float32: every distinct id of the text once."""
    out = [np.float32(s) for s in scores]
    for token in set(tokens):
        if token < len(out):
            score = out[token]
            out[token] = score * np.float32(penalty) if score < 0 else score / np.float32(penalty)
    return [float(s) for s in out]


def logprobs(scores: Sequence[float], temperature: float, chosen: int, n: int) -> dict[int, float]:
    """Log-probabilities of the n likeliest possible tokens, then of the chosen one."""
    logits = relative(scores, temperature)
    total = math.log(math.fsum(math.exp(x) for x in logits))
    ids = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:n]
    return {i: logits[i] - total for i in [*ids, chosen] if logits[i] > -math.inf}


# -- n-grams -----------------------------------------------------------------------------------------


def ngram_continuation(tokens: Sequence[int], committed: int, n_min: int, n_max: int, count: int) -> list[int]:
    """What followed the latest occurrence of the longest suffix; both must be committed."""
    text = list(tokens)
    for n in range(n_max, n_min - 1, -1):
        for end in range(committed - 1, n - 1, -1):
            if text[end - n : end] == text[len(text) - n :]:
                for i in range(count):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


# -- trees -------------------------------------------------------------------------------------------


def line(parents: Sequence[int], node: int) -> list[int]:
    """A node and what it descends from, root first."""
    return [] if node < 0 else [*line(parents, parents[node]), node]


def depth_first(parents: Sequence[int], root: int = -1) -> list[int]:
    """The nodes below `root`, each followed by those below it."""
    out: list[int] = []
    for node, parent in enumerate(parents):
        if parent == root:
            out += [node, *depth_first(parents, node)]
    return out


def merged(drafts: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[tuple[tuple[int, ...], list[int]]]:
    """Every path of tokens that a draft proposes and which ones do: below a path, in order of first appearance."""
    proposers: dict[tuple[int, ...], list[int]] = {(): []}
    for i, (tokens, parents) in enumerate(drafts):
        for node in range(len(tokens)):
            ids = tuple(tokens[n] for n in line(parents, node))
            proposers[ids] = sorted({*proposers.get(ids, []), i})

    def below(path: tuple[int, ...]) -> list[tuple[int, ...]]:
        out = []
        for ids in proposers:
            if ids and ids[:-1] == path:
                out += [ids, *below(ids)]
        return out

    return [(ids, proposers[ids]) for ids in below(())]


def block_verification(draft, verifier):
    """Algorithm 2 of Sun et al. (2025) for a chain with q, as it is written there."""
    p = [verifier.distribution(node).tolist() for node in range(-1, len(draft))]
    q = [row.tolist() for row in draft.q or []]
    weight, accepted, weights = 1.0, 0, [1.0]
    for i, token in enumerate(draft.tokens):
        weight = min(weight * p[i][token] / q[i][token], 1.0)
        weights.append(weight)
        if i + 1 == len(draft.tokens):
            chance = weight
        else:
            rest = sum(max(weight * a - b, 0.0) for a, b in zip(p[i + 1], q[i + 1], strict=True))
            chance = rest / (rest + 1.0 - weight) if rest > 0.0 else 0.0
        if verifier.flip(chance):
            accepted = i + 1
    left = p[accepted]
    if accepted < len(draft.tokens):
        left = [max(weights[accepted] * a - b, 0.0) for a, b in zip(p[accepted], q[accepted], strict=True)]
    left = left if sum(left) > 0 else p[accepted]
    extra = verifier.draw(torch.tensor(left, dtype=torch.float64))
    return Verdict(list(range(accepted)), extra, accepted, accepted, len(draft.tokens))
