"""Is a cache whole, and does it say what its target says? Bytes against checksums, rows against a live pass.

Knows caches and targets. Does not know how to build or repair one.
"""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftsmith.data.cache.codecs import DISTRIBUTION_CODECS, STATE_CODECS, kept_kl
from draftsmith.data.cache.manifest import NAME, read_manifest
from draftsmith.data.cache.reader import CachedRow, CacheReader
from draftsmith.data.cache.writer import shard_damage
from draftsmith.errors import UserError
from draftsmith.models.target import Target

# Two runs of one target differ by the order of summation, and in half precision by its rounding, block after block.
LIVE_ERROR = {torch.float32: 0.0, torch.bfloat16: 0.05, torch.float16: 0.02}
# Mean relative difference of what a codec makes of two passes' states: here and there a rounding falls to the other side.
# Measured below 1e-6 in fp32 for every codec; the outputs of neighbouring blocks differ by some per cent.
SAME = 2e-3


def verify_cache(folder: Path) -> list[str]:
    """Read every byte. One line for each damaged shard and each stray file, beginning with its name, and one for missing rows."""
    manifest = read_manifest(folder)
    found = [damage for shard in manifest.shards if (damage := shard_damage(folder, shard))]
    known = {NAME, *(shard.name for shard in manifest.shards)}
    strays = sorted(path.name for path in Path(folder).iterdir() if path.name not in known)
    found += [f"{name}: not part of the cache (a crash left it, or somebody put it there)" for name in strays]
    if manifest.missing_rows:
        found.append(f"incomplete: {manifest.missing_rows} of {manifest.rows} rows were never written")
    return found


def cache_info(folder: Path) -> dict[str, Any]:
    """What is in a cache, without opening a shard: the manifest with totals in place of the list of shards."""
    manifest = read_manifest(folder)
    stored = sum(shard.bytes for shard in manifest.shards)
    tokens = sum(shard.tokens for shard in manifest.shards)
    mass = sum(shard.kept_mass * shard.tokens for shard in manifest.shards) / max(tokens, 1)
    totals = {
        "shards": len(manifest.shards),
        "missing_rows": manifest.missing_rows,
        "dropped_rows": manifest.dropped_rows,
        "bytes": stored,
        "bytes_per_token": stored / max(tokens, 1),
        "kept_mass": mass,
    }
    return manifest.model_dump(mode="json", exclude={"shards"}) | totals


def check_against_target(folder: Path, target: Target) -> list[str]:
    """Compare the longest row of each shard with what `target` computes. One line for each disagreement."""
    reader = CacheReader(folder, target.fingerprint())
    found: list[str] = []
    first = 0
    for shard in reader.manifest.shards:
        index = max(range(first, first + shard.rows), key=lambda row: int(reader.lengths[row]))
        found += [
            f"{shard.name}, row {index}: {line}" for line in self_check(target, reader.manifest.fields, reader[index])
        ]
        first += shard.rows
    return found


@torch.inference_mode()
def self_check(target: Target, fields: dict[str, dict[str, Any]], row: CachedRow) -> list[str]:
    """What of one cached row a live forward pass contradicts, one line each.

    A tap of another block, a state before the norm or a shifted distribution differs by far more than any codec does; where
    a codec is coarse, what is stored is also compared with what it makes of the live states, which is far sharper.
    """
    blocks = tuple(fields["taps"]["blocks"]) if row.taps is not None else ()
    if blocks and not (min(blocks) >= 0 and max(blocks) < target.blocks):
        raise UserError(f"cache field taps: blocks {list(blocks)} do not exist in a target of {target.blocks} blocks")
    ids = torch.from_numpy(row.token_ids).to(target.device, torch.int64)[None]
    live = target.forward(ids, taps=blocks)
    assert live.logits is not None  # asked for by default
    noise = LIVE_ERROR.get(target.dtype, 0.0)
    found: list[str] = []
    if row.taps is not None and live.taps is not None:
        found += _check_states("taps", fields["taps"], torch.from_numpy(row.taps), live.taps[0], noise)
    log_p = torch.log_softmax(live.logits[0].float(), dim=-1).cpu()
    if row.last is not None:
        last = torch.from_numpy(row.last)
        found += _check_states("last", fields["last"], last[:, None], live.last[0, :, None], noise)
        rebuilt = target.head(last.to(target.device, target.dtype)).float().cpu()
        kl = float(kept_kl(log_p, torch.log_softmax(rebuilt, dim=-1)).mean())
        allowed = STATE_CODECS[fields["last"]["codec"]].kl + noise
        if not kl <= allowed:  # written so that NaN fails too
            found.append(f"logits rebuilt from last have KL {kl:.3g} to the target's, allowed {allowed:.3g}")
    if row.distribution is not None:
        found += _check_distribution(fields["distribution"], row.distribution, log_p, noise)
    return found


def _check_states(field: str, about: dict[str, Any], stored: Tensor, live: Tensor, noise: float) -> list[str]:
    """stored [T, A, W] against live states: the worst by the codec's tolerance, the mean by `SAME` of what it makes of them."""
    codec = STATE_CODECS[about["codec"]]
    worst = float(_relative_errors(stored, live.float().cpu()).max())
    if not worst <= codec.tolerance + noise:
        return [f"{field} differ from the target's by {worst:.3g} (relative), allowed {codec.tolerance + noise:.3g}"]
    mean = float(_relative_errors(stored, codec.roundtrip(live)).mean())
    allowed = SAME + noise + codec.tolerance / stored[..., 0].numel()  # one state may fall to the other side as a whole
    if not mean <= allowed:
        made = f"what {about['codec']} makes of the target's"
        return [f"{field} differ from {made} by {mean:.3g} (relative, on average), allowed {allowed:.3g}"]
    return []


def _check_distribution(
    about: dict[str, Any], stored: tuple[np.ndarray, ...], log_p: Tensor, noise: float
) -> list[str]:
    """ids and log-probabilities [T, k], or also weights [T, k], against the live log p [T, V]."""
    codec = DISTRIBUTION_CODECS[about["codec"]]
    ids, kept, *weights = (torch.from_numpy(array) for array in stored)
    true = log_p.gather(-1, ids.clamp_min(0))
    share = weights[0] if weights else kept.exp()
    found = []
    error = float(torch.where(share > 0, share * (true - kept).abs(), 0.0).sum(-1).mean())
    allowed = codec.tolerance + (2 * noise) ** 0.5  # a divergence of `noise` moves log-probabilities about so far
    if not error <= allowed:
        found.append(f"log-probabilities differ from the target's by {error:.3g} on average, allowed {allowed:.3g}")
    if weights:
        total = float((share.sum(-1) - 1).abs().max())
        if not total <= 1e-5:
            found.append(f"the weights of a sampled distribution sum to 1 within {total:.3g} only")
        # Systematic draws meet a token floor(k p) or ceil(k p) times.
        off = float((torch.where(ids >= 0, (share - true.exp()).abs(), 0.0)).max()) * about["k"]
        if not off <= 1.0 + 1e-3 + about["k"] * allowed:
            found.append(f"a token was drawn {off:.3g} times off its probability, allowed 1")
    return found


def _relative_errors(stored: Tensor, live: Tensor) -> Tensor:
    """‖stored − live‖ / ‖live‖ of states [..., W]."""
    return (stored - live).norm(dim=-1) / live.norm(dim=-1).clamp_min(1e-12)
